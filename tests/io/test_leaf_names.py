"""A tree as a flat dict, and back."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pytreemod as pm
from pytreemod import from_named, named_leaves, nn
from pytreemod.errors import StructureError
from tests.goldens import refusals
from tests.helpers.comparing import assert_identical
from tests.helpers.laws import law, leaves, trees
from tests.helpers.trees import affine, every_tree, ramp
from tests.nn.catalogue import CATALOGUE

every_layer = pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)


def net():
    """A model with all kinds of names, and its State."""

    def make(key):
        noise = nn.Dropout(0.5, stream=pm.RngStream())
        return {"head.v1": nn.Sequential([nn.BatchNorm(2), noise, nn.Linear(2, 2, key=key)])}

    model, state = pm.make_with_state(make)(jax.random.key(0))
    return model, state.seed(jax.random.key(1))


# ---- laws


@every_tree
def test_there_and_back(make):
    """from_named(tree, named_leaves(tree)) == tree, leaf for leaf, in order."""
    tree = make()
    named = named_leaves(tree)

    assert_identical([*named.values()], jax.tree.leaves(tree))
    assert_identical(from_named(tree, named), tree)


words = st.sampled_from(["a", "b", "a.b", "b.a", "", "'", "'a'", ".", "0", "a/b", "\n"])
odd_trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


@settings(law, max_examples=150)
@given(trees | odd_trees, st.sampled_from([".", "/", "::"]))
def test_there_and_back_of_any_tree(tree, sep):
    """The same, whatever its keys are made of: no two leaves have one name."""
    named = named_leaves(tree, sep)

    assert len(named) == len(jax.tree.leaves(tree))
    assert_identical(from_named(tree, named, sep), tree)


@law
@given(trees, trees)
def test_a_name_does_not_depend_on_what_else_there_is(one, two):
    """The names below a node are its own, after the node's."""
    alone = {f"a.{name}" if name else "a": leaf for name, leaf in named_leaves(one).items()}
    beside = named_leaves({"a": one, "b": two})

    assert [*alone] == [name for name in beside if name == "a" or name.startswith("a.")]


@every_layer
def test_layers_and_their_states_there_and_back(entry):
    """A layer beside its State: typed keys, running statistics, streams."""
    pair = entry.build()

    assert from_named(pair, named_leaves(pair)) == pair


# ---- which names


def test_names_of_a_model_and_its_state():
    """Fields and indices bare, odd keys in quotes; a State's values by the path of their token."""
    assert [*named_leaves(net())] == [
        "0.'head.v1'.layers.0.weight",
        "0.'head.v1'.layers.0.bias",
        "0.'head.v1'.layers.2.weight",
        "0.'head.v1'.layers.2.bias",
        "1.'head.v1'.layers.0.state_index.0",
        "1.'head.v1'.layers.0.state_index.1",
        "1.'head.v1'.layers.1.stream.key",
        "1.'head.v1'.layers.1.stream.count",
    ]


def test_a_leaf_alone_has_the_empty_name():
    """No steps, no words."""
    assert named_leaves(1.5) == {"": 1.5}
    assert from_named(1.5, {"": 2.5}) == 2.5


def test_none_has_no_name():
    """As in all of JAX, None is not a leaf."""
    assert named_leaves({"a": None, "b": 1}) == {"b": 1}


# ---- and back


def test_what_is_wrong_is_told_in_one_table():
    """Shapes, dtypes, missing names, with similar names, and unexpected ones."""
    model = nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    named = named_leaves(model)
    named["layers.0.wieght"] = named.pop("layers.0.weight")
    named["layers.1.weight"] = named["layers.1.weight"].T
    named["layers.1.bias"] = np.zeros(2, np.float64)
    with pytest.raises(StructureError, match="by their names, got 4 that differ") as caught:
        from_named(model, named)

    assert str(caught.value) == (
        "from_named(like, named): expected the leaves of like, by their names, got 4 that differ.\n"
        "  at layers.1.weight: expected f32[2,4], got f32[4,2]\n"
        "  at layers.1.bias: expected f32[2], got f64[2]\n"
        "  at layers.0.weight: missing (is it 'layers.0.wieght'?)\n"
        "  at layers.0.wieght: unexpected"
    )


@pytest.mark.parametrize(
    ("like", "leaf"),
    [
        (jnp.zeros(2), np.zeros(2, np.int32)),
        (jnp.zeros(2), jnp.zeros((2, 1))),
        (jnp.zeros(()), 0.0),
        (0.0, jnp.zeros(())),
        (0.0, 0),
        (1, True),
        ("a", 1),
        (jax.random.key(0), jax.random.key_data(jax.random.key(0))),
        (jax.random.key(0), jax.random.key(0, impl="rbg")),
        (jax.ShapeDtypeStruct((2,), jnp.float32), jnp.zeros(3)),
    ],
    ids=repr,
)
def test_what_does_not_fit_is_refused(like, leaf):
    """Nothing is cast, reshaped or broadcast, strict or not."""
    for strict in (True, False):
        with pytest.raises(StructureError, match="got 1 that differs"):
            from_named([like], {"0": leaf}, strict=strict)


def test_arrays_are_of_the_kind_that_they_were():
    """NumPy's become JAX's where the tree had such, as copies, and the other way round."""
    like = {"jax": jnp.zeros(2), "numpy": np.zeros(2, np.float32)}
    # Where JAX could go on using the memory, if it were asked to.
    memory = np.ones(64, np.float32)
    first = -memory.ctypes.data % 64 // 4
    given = {"jax": memory[first : first + 2], "numpy": jnp.ones(2)}
    made = from_named(like, given)
    memory[:] = 7

    assert isinstance(made["jax"], jax.Array)
    assert isinstance(made["numpy"], np.ndarray)
    assert made["jax"].tolist() == made["numpy"].tolist() == [1, 1]


def test_an_abstract_tree_will_do():
    """Structs have shapes and dtypes for the checks."""
    like = pm.filter_eval_shape(affine)

    assert from_named(like, named_leaves(affine())) == affine()


def test_names_go_through_compiled_code():
    """Names are not values: both ways work under a trace."""
    model = affine()
    doubled = jax.jit(lambda m: from_named(m, {k: 2 * v for k, v in named_leaves(m).items()}))

    assert doubled(model) == jax.tree.map(lambda x: 2 * x, model)


def test_some_leaves_may_be_given():
    """Not strict: missing leaves are unchanged, unexpected ones are left out."""
    made = from_named(affine(), {"bias": ramp(2), "other": 1}, strict=False)

    assert made == affine().replace(bias=ramp(2))


def test_long_tables_end():
    """Of a file of another model one need not read all names."""
    named = {f"layer{number}": 1 for number in range(100)}
    with pytest.raises(StructureError, match="got 101 that differ") as caught:
        from_named([1], named)

    assert str(caught.value).endswith("  and 61 more")


def test_a_name_that_is_further_in_is_near():
    """A model in a file of a run: each leaf gets its own suggestion, not that of another layer."""
    wanted = ["layers.0.bias", "layers.1.bias"]
    given = [f"model.{name}" for name in wanted]

    with pytest.raises(StructureError, match="got 4 that differ") as caught:
        from_named({"layers": [{"bias": 1}, {"bias": 1}]}, dict.fromkeys(given, 1))

    assert [line.strip() for line in str(caught.value).split("\n")[1:3]] == [
        f"at {name}: missing (is it 'model.{name}'?)" for name in wanted
    ]


def test_every_missing_name_is_told():
    """Also those without a suggestion."""
    with pytest.raises(StructureError, match="got 40 that differ") as caught:
        from_named([1] * 41, {"0": 1})

    assert str(caught.value).count("missing") == 40


def test_nodes_without_names_have_numbers():
    """Of a class that was registered without keys, the children are counted."""

    class Plain:
        def __init__(self, *children):
            self.children = children

    jtu.register_pytree_node(Plain, lambda node: (node.children, None), lambda _, c: Plain(*c))

    assert named_leaves({"a": Plain(1, [2])}) == {"a.0": 1, "a.1.0": 2}


test_refusals = refusals(globals())
