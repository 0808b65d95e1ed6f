"""stack and unstack: several trees as one with a further axis, and back."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod.errors import ArgumentError, ShapeError, StructureError
from tests.helpers.comparing import assert_same
from tests.helpers.laws import law, trees
from tests.helpers.trees import Affine, Registered, Static, affine, double, ramp


def arrays(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if pm.is_array(leaf)]


@law
@given(trees.filter(arrays), st.integers(1, 3), st.data())
def test_unstack_undoes_stack(tree, count, data):
    """unstack(stack(trees)) == trees, along every axis; members are slices of each array."""

    def changed(i):
        return jax.tree.map(lambda x: np.roll(x, i) if isinstance(x, np.ndarray) else x, tree)

    rank = min(leaf.ndim for leaf in arrays(tree))
    axis = data.draw(st.integers(-rank - 1, rank))
    members = [changed(i) for i in range(count)]

    stacked = pm.stack(iter(members), axis)
    assert pm.tree_equal(pm.unstack(stacked, axis), members)
    for i, member in enumerate(members):
        slices = [np.take(np.asarray(x), i, axis) for x in arrays(stacked)]
        assert all(map(np.array_equal, slices, arrays(member)))


@pytest.mark.parametrize(
    "pair",
    [
        (np.float64(1), np.float64(2)),
        (jnp.ones(2, jnp.float16), jnp.zeros(2, jnp.float16)),
        (jnp.asarray(1.0), jnp.asarray(2.0)),
        (jax.random.key(0), jax.random.key(1)),
    ],
    ids=["NumPy", "half", "weak", "keys"],
)
def test_kinds_of_arrays_stay(pair):
    """NumPy arrays with dtypes that JAX does not have, weak types, keys."""
    stacked = pm.stack([{"x": x} for x in pair])["x"]
    assert isinstance(stacked, jax.Array) == isinstance(pair[0], jax.Array)
    assert stacked.dtype == pair[0].dtype
    assert getattr(stacked, "weak_type", None) == getattr(pair[0], "weak_type", None)
    assert pm.tree_equal(pm.unstack(stacked), [*pair])


def test_under_jit_and_grad():
    """Both work on traced arrays, and are linear; a stack of nothing has no members."""

    @pm.filter_jit
    def first_minus_second(a, b):
        one, two = pm.unstack(pm.stack([a, b], axis=1), axis=1)
        return jnp.sum(one.weight - two.weight)

    grad = pm.filter_grad(first_minus_second)(affine(), affine())
    assert_same(grad, Affine(jnp.ones((2, 3)), jnp.zeros(2)))
    assert pm.unstack(jnp.zeros((0, 2))) == []
    # Nobody can tell whether two notes of arrays are equal: no reason to refuse.
    assert pm.stack([Registered(ramp(2), np.ones(2)) for _ in "ab"]).value.shape == (2, 2)


@pytest.mark.parametrize(
    ("trees", "match"),
    [
        ([Static(ramp(1), 1), Static(ramp(1), 2)], r"tree\.size"),
        ([Static(ramp(1), (1, 2)), Static(ramp(1), (1, 3))], r"size: \(1, 2\) in"),
        ([Static(ramp(1), float("nan")) for _ in "ab"], r"tree\.size: nan .* nan.*, not equal"),
        ([Static(ramp(1), x) for x in (double, 1)], r"tree\.size: double \(trees\.py:\d+\) in"),
        ([[Registered(ramp(1), x)] for x in "ab"], r"^[^\n]*\n  at tree\[0\][^\n]*$"),
        ([[1.0, ramp(1)], [2.0, ramp(1)]], r"tree\[0\]: 1\.0 in trees\[0\]"),
        ([[1.0, ramp(1)], [ramp(2), ramp(1)]], r"1\.0 in trees\[0\], f32\[2\]"),
        ([{"x": ramp(2)}, {"x": jnp.arange(2)}], r"tree\['x'\](.*)i32\[2\]"),
        ([ramp(2), ramp(2), ramp(3)], r"f32\[3\] in trees\[2\]"),
        ([{"x": ramp(2)}, {"y": ramp(2)}], r"tree\['x'\]: f32\[2\] in .*nothing in trees\[1\]"),
        ([], "several trees"),
        ({"a": ramp(2)}, "several trees"),
    ],
)
def test_trees_that_differ_in_more_than_values_cannot_be_stacked(trees, match):
    """The result has one of everything else; the differences are named."""
    with pytest.raises((ArgumentError, StructureError), match=match):
        pm.stack(trees)


def test_arrays_without_one_size_cannot_be_unstacked():
    """The number of members is unknown."""
    with pytest.raises(ArgumentError, match="no array"):
        pm.unstack({"a": 1})
    for tree, axis in (({"a": ramp(2), "b": ramp(2, 2)}, 1), ({"a": ramp(2), "b": ramp(3)}, 0)):
        with pytest.raises(ShapeError, match=r"\['a'\]: f32\[2\]\n.*\['b'\]"):
            pm.unstack(tree, axis)


def test_the_error_shows_how_arrays_are_split():
    """Along explicit axes of a mesh, of which several may split one axis of an array."""
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds, devices=jax.devices()[:4])
    specs = {P(("a", "b"), None): r"f32\[4@\(a,b\),6\]", P(None, "b"): r"f32\[4,6@b\]"}
    for spec, text in specs.items():
        x = jax.device_put(jnp.ones((4, 6)), jax.NamedSharding(mesh, spec))
        with pytest.raises(StructureError, match=text):
            pm.stack([x, jnp.ones(3)])
