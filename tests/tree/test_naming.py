"""`named_leaves` and `from_named`: a tree as a flat dict, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import pytreemod as pm
from pytreemod import from_named, named_leaves, nn
from pytreemod.errors import StructureError
from tests.helpers.comparing import assert_identical, assert_same
from tests.helpers.laws import law, trees
from tests.helpers.trees import affine, ramp


@law
@given(trees)
def test_there_and_back_of_any_tree(tree):
    """from_named(tree, named_leaves(tree)) == tree, leaf for leaf, in order; with any separator."""
    for sep in (".", "/", "::"):
        named = named_leaves(tree, sep)
        assert_identical([*named.values()], jax.tree.leaves(tree))
        assert_same(from_named(tree, named, sep), tree)


def test_names_of_a_model_and_its_state():
    """Fields, indices and keys bare, a Stack whole; a State by paths of tokens."""

    def make(key):
        noise = nn.Dropout(0.5, stream=pm.RngStream())
        stack = nn.Stack(lambda key: nn.Linear(2, 2, key=key), 3, key=key)
        return {"head": nn.Sequential([nn.BatchNorm(2), noise, stack])}

    model, state = pm.make_with_state(make)(jax.random.key(0))
    assert [*named_leaves((model, state.seed(jax.random.key(1)), 1.5, None))] == [
        "0.head.layers.0.weight",
        "0.head.layers.0.bias",
        "0.head.layers.2.layer.weight",
        "0.head.layers.2.layer.bias",
        "1.head.layers.0.state_index.0",
        "1.head.layers.0.state_index.1",
        "1.head.layers.1.stream.key",
        "1.head.layers.1.stream.count",
        "2",
    ]
    assert named_leaves(1.5) == {"": 1.5}


def test_names_that_would_not_be_distinct_are_refused():
    """A key that contains the separator may have the name of two keys; another one has not."""
    tree = {"a": {"b": 1}, "a.b": 2}
    with pytest.raises(StructureError, match=r"two leaves have one name\n  at a\.b"):
        named_leaves(tree)
    assert named_leaves(tree, "/") == {"a/b": 1, "a.b": 2}


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
    like = {"jax": jnp.zeros(2), "numpy": np.zeros(2, np.float32), "scalar": np.float32(0)}
    # Where JAX could go on using the memory, if it were asked to.
    memory = np.ones(64, np.float32)
    first = -memory.ctypes.data % 64 // 4
    news = {"jax": memory[first : first + 2], "numpy": jnp.ones(2), "scalar": jnp.asarray(1.0)}
    made = from_named(like, news)
    memory[:] = 7

    expected = {"jax": jnp.ones(2), "numpy": np.ones(2, np.float32), "scalar": np.float32(1)}
    assert_same(made, expected)
