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
from tests.goldens import refusals
from tests.helpers.comparing import assert_same
from tests.helpers.laws import law, trees
from tests.helpers.trees import (
    Affine,
    Buffered,  # noqa: F401
    Holder,
    Pair,
    Static,
    affine,
    double,
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
def test_stack_undoes_unstack(tree, count):
    """stack(unstack(tree)) == tree."""
    stacked = pm.stack(members(tree, count))

    assert pm.tree_equal(pm.stack(pm.unstack(stacked)), stacked)


@law
@given(trees.filter(has_array), st.integers(1, 3))
def test_members_are_slices(tree, count):
    """Member i has element i of each array, and the very leaves that are no arrays."""
    stacked = pm.stack(members(tree, count))

    for i, member in enumerate(pm.unstack(stacked)):
        expected = jax.tree.map(lambda x, i=i: x[i] if pm.is_array(x) else x, stacked)
        assert pm.tree_equal(member, expected)


def test_stacked_layers_are_those_that_vmap_builds(key):
    """stack of layers built one by one == filter_vmap of what builds them."""
    keys = jax.random.split(key, 3)

    def make(key):
        return nn.Linear(2, 3, key=key)

    assert_same(pm.stack([make(key) for key in keys]), pm.filter_vmap(make)(keys))


def test_stacked_layers_are_mapped_and_scanned(key):
    """filter_vmap over a stack calls each layer; filter_scan calls one after the other."""
    layers = [nn.Linear(2, 2, key=key) for key in jax.random.split(key, 3)]
    stacked, x = pm.stack(layers), ramp(2)

    each = pm.filter_vmap(lambda layer, x: layer(x), in_axes=(0, None))(stacked, x)
    np.testing.assert_allclose(each, [layer(x) for layer in layers], rtol=1e-6)
    last, _ = pm.filter_scan(lambda x, layer: (layer(x), None), x, stacked)
    np.testing.assert_allclose(last, layers[2](layers[1](layers[0](x))), rtol=1e-6)


def test_numpy_arrays_stay_numpy_arrays():
    """What is a NumPy array in all trees is one afterwards, with a dtype JAX does not have."""
    stacked = pm.stack([{"x": np.float64(1)}, {"x": np.float64(2)}])

    assert type(stacked["x"]) is np.ndarray
    assert stacked["x"].dtype == np.float64
    assert pm.unstack(stacked) == [{"x": 1.0}, {"x": 2.0}]


def test_keys_are_stacked():
    """Random keys are arrays like others."""
    keys = [jax.random.key(seed) for seed in range(2)]

    assert_same(pm.unstack(pm.stack(keys)), keys)


def test_stack_under_jit_and_grad():
    """Both work on traced arrays, and are linear."""

    @pm.filter_jit
    def first_minus_second(a, b):
        one, two = pm.unstack(pm.stack([a, b], axis=1), axis=1)
        return jnp.sum(one.weight - two.weight)

    grad = pm.filter_grad(first_minus_second)(affine(), affine())
    assert_same(grad, Affine(jnp.ones((2, 3)), jnp.zeros(2)))


def test_any_iterable_of_trees():
    """A generator will do."""
    assert_same(pm.stack(ramp(2) for _ in range(2)), jnp.stack([ramp(2), ramp(2)]))


def test_trees_without_arrays_stack_to_themselves():
    """Where there is no array, nothing is stacked."""
    assert pm.stack([[1, "a"], [1, "a"]]) == [1, "a"]


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        pytest.param(
            [affine(2, 3), affine(2, 4)],
            r"got 1 difference\.\n  at tree\.weight: f32\[2,3\] in trees\[0\], "
            r"f32\[2,4\] in trees\[1\]$",
            id="shape",
        ),
        pytest.param(
            [{"x": ramp(2)}, {"x": jnp.arange(2)}],
            r"tree\['x'\]: f32\[2\] in trees\[0\], i32\[2\] in trees\[1\]",
            id="dtype",
        ),
        pytest.param(
            [[1.0, ramp(1)], [2.0, ramp(1)]],
            r"tree\[0\]: 1\.0 in trees\[0\], 2\.0 in trees\[1\]\n"
            r"  what is to differ from member to member has to be an array:\n"
            r"      jnp\.asarray\(value\)$",
            id="numbers",
        ),
        pytest.param(
            [Static(ramp(1), 1), Static(ramp(1), 2)],
            r"tree\.size: 1 in trees\[0\], 2 in trees\[1\]$",
            id="configuration",
        ),
        pytest.param(
            [{"a": ramp(1)}, {"b": ramp(1)}],
            r"tree\['a'\]: f32\[1\] in trees\[0\], nothing in trees\[1\]\n"
            r"  at tree\['b'\]: nothing in trees\[0\], f32\[1\] in trees\[1\]",
            id="keys",
        ),
        pytest.param(
            [(ramp(1),), [ramp(1)]],
            r"tree: tuple of 1 in trees\[0\], list of 1 in trees\[1\]",
            id="containers",
        ),
        pytest.param(
            [[ramp(1)], [None]],
            r"tree\[0\]: f32\[1\] in trees\[0\], None in trees\[1\]",
            id="None",
        ),
        pytest.param(
            [Holder([double, ramp(1)]), Holder([abs, ramp(1)])],
            r"tree\.content\[0\]: double \(trees\.py:\d+\) in trees\[0\], the function abs in",
            id="functions",
        ),
        pytest.param(
            [[lambda: 0, ramp(1)], [lambda: 0, ramp(1)]],
            r"tree\[0\]: <lambda> \(.*\) in trees\[0\], <lambda> \(.*\), another in",
            id="functions of one name",
        ),
        pytest.param(
            [Pair(ramp(1), 0), (ramp(1), 0)],
            r"tree: Pair of 2 in trees\[0\], tuple of 2 in trees\[1\]",
            id="named tuple",
        ),
        pytest.param(
            [[ramp(1), np.float32(1)], [ramp(1), 1.0]],
            r"tree\[1\]: f32\[\] in trees\[0\], 1\.0 in trees\[1\]",
            id="array and number",
        ),
        pytest.param(
            [pm.Partial(double, ramp(1)), pm.Partial(abs, ramp(1))],
            r"tree\.func: double \(trees\.py:\d+\) in trees\[0\], the function abs in trees\[1\]",
            id="partials",
        ),
        pytest.param(
            [jax.tree_util.Partial(double, ramp(1)), jax.tree_util.Partial(abs, ramp(1))],
            r"tree \(auxiliary data\): double \(.*\) in trees\[0\], the function abs in trees\[1\]",
            id="a foreign node's own data",
        ),
    ],
)
def test_what_differs_is_named(pair, text):
    """Trees that differ in more than values are refused by path, with both sides."""
    with pytest.raises(StructureError, match=rf"stack\(trees\): expected trees[\s\S]*{text}"):
        pm.stack(pair)


test_refusals = refusals(globals())
