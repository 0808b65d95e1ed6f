"""`named_leaves` and `from_named`: a tree as a flat dict, and back."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pytreemod as pm
from pytreemod import from_named, named_leaves, nn
from pytreemod.errors import ArgumentError, StructureError
from tests.helpers.comparing import assert_identical, assert_same
from tests.helpers.laws import law, leaves, trees
from tests.helpers.trees import affine, every_tree, ramp


@every_tree
def test_there_and_back(make):
    """from_named(tree, named_leaves(tree)) == tree, leaf for leaf, in order."""
    tree = make()
    named = named_leaves(tree)

    assert_identical([*named.values()], jax.tree.leaves(tree))
    assert_same(from_named(tree, named), tree)


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
    assert_same(from_named(tree, named, sep), tree)


def test_names_of_a_model_and_its_state():
    """Fields and indices bare, odd keys in quotes, a Stack whole; a State by paths of tokens."""

    def make(key):
        noise = nn.Dropout(0.5, stream=pm.RngStream())
        stack = nn.Stack(lambda key: nn.Linear(2, 2, key=key), 3, key=key)
        return {"head.v1": nn.Sequential([nn.BatchNorm(2), noise, stack])}

    model, state = pm.make_with_state(make)(jax.random.key(0))
    assert [*named_leaves((model, state.seed(jax.random.key(1)), 1.5, None))] == [
        "0.'head.v1'.layers.0.weight",
        "0.'head.v1'.layers.0.bias",
        "0.'head.v1'.layers.2.layer.weight",
        "0.'head.v1'.layers.2.layer.bias",
        "1.'head.v1'.layers.0.state_index.0",
        "1.'head.v1'.layers.0.state_index.1",
        "1.'head.v1'.layers.1.stream.key",
        "1.'head.v1'.layers.1.stream.count",
        "2",
    ]
    assert named_leaves(1.5) == {"": 1.5}


def test_names_that_would_not_be_distinct_are_refused():
    """The number 0 and the text "0" meet in one node only where nothing sorts the keys."""
    with pytest.raises(StructureError, match=r"named_leaves: two leaves have one name\n  at 0"):
        named_leaves(OrderedDict([(0, 1), ("0", 2)]))
    for sep in ("", "'", 3):
        with pytest.raises(ArgumentError, match="sep"):
            named_leaves({"a": 1}, sep)


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
    for like, leaf in ((1, True), (jax.random.key(0), jax.random.key(0, impl="rbg"))):
        with pytest.raises(StructureError, match="at 0:"):
            from_named([like], {"0": leaf})


def test_arrays_are_of_the_kind_that_they_were():
    """NumPy's become JAX's where the tree had such, as copies, and the other way round."""
    like = {"jax": jnp.zeros(2), "numpy": np.zeros(2, np.float32)}
    # Where JAX could go on using the memory, if it were asked to.
    memory = np.ones(64, np.float32)
    first = -memory.ctypes.data % 64 // 4
    made = from_named(like, {"jax": memory[first : first + 2], "numpy": jnp.ones(2)})
    memory[:] = 7

    assert_same(made, {"jax": jnp.ones(2), "numpy": np.ones(2, np.float32)})
    # The order of bytes is no difference.
    x = np.arange(3).astype(">f4")
    assert_same(from_named([jnp.zeros(3)], {"0": x}), [jnp.arange(3.0)])
    assert_same(from_named([np.zeros_like(x)], {"0": x}), [x])
