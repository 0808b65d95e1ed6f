"""stack and unstack: several trees as one with a further axis, and back."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import StructureError
from tests.helpers.comparing import assert_same
from tests.helpers.laws import law, trees
from tests.helpers.trees import (
    Affine,
    Static,
    affine,
    ramp,
)


def has_array(tree):
    """Whether there is something to stack."""
    return any(map(pm.is_array, jax.tree.leaves(tree)))


def rank(tree):
    """The lowest rank of an array in a tree."""
    return min(leaf.ndim for leaf in jax.tree.leaves(tree) if pm.is_array(leaf))


def members(tree, count):
    """Trees that differ from `tree` in the values of their arrays."""

    def changed(i):
        return jax.tree.map(lambda x: np.roll(x, i) if isinstance(x, np.ndarray) else x, tree)

    return [changed(i) for i in range(count)]


@law
@given(trees.filter(has_array), st.integers(1, 3), st.data())
def test_unstack_undoes_stack(tree, count, data):
    """unstack(stack(trees)) == trees, along every axis that all arrays can have."""
    axis = data.draw(st.integers(-rank(tree) - 1, rank(tree)))
    trees = members(tree, count)

    found = pm.unstack(pm.stack(trees, axis), axis)
    assert len(found) == count
    assert pm.tree_equal(found, trees)


@law
@given(trees.filter(has_array), st.integers(1, 3))
def test_members_are_slices(tree, count):
    """Member i has element i of each array, and the same non-array leaves."""
    stacked = pm.stack(members(tree, count))

    for i, member in enumerate(pm.unstack(stacked)):
        expected = jax.tree.map(lambda x, i=i: x[i] if pm.is_array(x) else x, stacked)
        assert pm.tree_equal(member, expected)


def test_stacked_layers_are_those_that_vmap_builds(key):
    """stack of layers built one by one == filter_vmap of their constructor."""
    keys = jax.random.split(key, 3)

    def make(key):
        return nn.Linear(2, 3, key=key)

    assert_same(pm.stack([make(key) for key in keys]), pm.filter_vmap(make)(keys))


def test_numpy_arrays_stay_numpy_arrays():
    """A leaf that is a NumPy array in all trees remains one, with a dtype JAX does not have."""
    stacked = pm.stack([{"x": np.float64(1)}, {"x": np.float64(2)}])

    assert type(stacked["x"]) is np.ndarray
    assert stacked["x"].dtype == np.float64
    assert pm.unstack(stacked) == [{"x": 1.0}, {"x": 2.0}]


def test_stack_under_jit_and_grad():
    """Both work on traced arrays, and are linear."""

    @pm.filter_jit
    def first_minus_second(a, b):
        one, two = pm.unstack(pm.stack([a, b], axis=1), axis=1)
        return jnp.sum(one.weight - two.weight)

    grad = pm.filter_grad(first_minus_second)(affine(), affine())
    assert_same(grad, Affine(jnp.ones((2, 3)), jnp.zeros(2)))


@pytest.mark.parametrize(
    "trees",
    [
        [Static(ramp(1), 1), Static(ramp(1), 2)],
        [[1.0, ramp(1)], [2.0, ramp(1)]],
        [{"x": ramp(2)}, {"x": jnp.arange(2)}],
        [ramp(2), ramp(2), ramp(3)],
    ],
    ids=["configuration", "number", "dtype", "shape"],
)
def test_trees_that_differ_in_more_than_values_are_refused(trees):
    """The result has one value for all."""
    with pytest.raises(StructureError, match="stack"):
        pm.stack(trees)
