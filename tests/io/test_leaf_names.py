"""A tree as a flat dict, and back."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pytreemod as pm
from pytreemod import from_named, named_leaves, nn
from pytreemod.errors import StructureError
from tests.helpers.comparing import assert_identical
from tests.helpers.laws import law, leaves, trees
from tests.helpers.trees import affine, every_tree, ramp


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


@settings(law, max_examples=60)
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


@pytest.mark.parametrize(
    ("named", "name"),
    [
        ({"weight": jnp.zeros((3, 2)), "bias": ramp(2)}, "weight"),
        ({"weight": np.zeros((2, 3)), "bias": ramp(2)}, "weight"),
        ({"weight": ramp(2, 3), "bias": 0.0}, "bias"),
        ({"weight": ramp(2, 3)}, "bias"),
        ({"weight": ramp(2, 3), "bias": ramp(2), "wieght": ramp(2)}, "wieght"),
    ],
    ids=["shape", "dtype", "class", "missing", "unexpected"],
)
def test_what_does_not_fit_is_refused_by_name(named, name):
    """Nothing is cast, reshaped or broadcast, for an abstract tree as well."""
    for like in (affine(), pm.filter_eval_shape(affine)):
        with pytest.raises(StructureError, match=f"at {name}:"):
            from_named(like, named)


@pytest.mark.parametrize(
    ("like", "leaf"), [(1, True), (jax.random.key(0), jax.random.key(0, impl="rbg"))], ids=str
)
def test_leaves_that_are_of_another_kind_are_refused_even_if_not_strict(like, leaf):
    """A bool is no count, and the numbers of another generator are other keys."""
    with pytest.raises(StructureError, match="at 0:"):
        from_named([like], {"0": leaf}, strict=False)


def test_two_keys_with_one_name_are_refused():
    """The number 0 and the text "0" meet in one node only where nothing sorts the keys."""
    with pytest.raises(StructureError, match=r"0: \['0'\]"):
        named_leaves(OrderedDict([(0, 1), ("0", 2)]))


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


def test_some_leaves_may_be_given():
    """Not strict: missing leaves are unchanged, unexpected ones are left out."""
    made = from_named(affine(), {"bias": ramp(2), "other": 1}, strict=False)

    assert made == affine().replace(bias=ramp(2))
