"""tree_equal, `==` of Modules, how far arrays are apart, tree_flatten_one_level."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from tests.helpers.trees import ALL_TREES, MODULES, Affine, OwnInit, Pair, Static, affine, ramp


def test_a_tree_equals_itself():
    """With typematch, too. The answer is an array if JAX arrays were compared."""
    for make in ALL_TREES.values():
        tree = make()
        has_arrays = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
        for same in (pm.tree_equal(tree, tree), pm.tree_equal(tree, tree, tree, typematch=True)):
            assert bool(same)
            assert isinstance(same, jax.Array) is has_arrays
    assert pm.tree_equal(ramp(2)) is True


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        (ramp(2), ramp(2, start=2.0), jax.Array),
        (jax.random.key(0), jax.random.key(1), jax.Array),
        ([np.ones(2, np.float32), ramp(2)], [np.ones(2, np.float32), ramp(2)], jax.Array),
        (np.float32(2), jnp.asarray(2.0), jax.Array),
        (jnp.zeros((0, 2)), jnp.ones((0, 2)), jax.Array),
        (np.ones(2), np.ones(2), bool),
        (1, 1.0, bool),
    ],
)
def test_the_answer_is_an_array_once_arrays_were_compared(a, b, kind):
    """So that `~tree_equal(a, b)` negates it, as `~True`, which is -2, does not."""
    for same in (pm.tree_equal(a, b), pm.tree_equal(a, b, rtol=1e-3)):
        assert isinstance(same, kind)
        if kind is jax.Array:
            assert (same.shape, same.dtype) == ((), bool)
            assert bool(~same) is not bool(same)


def test_under_a_trace_the_answer_is_an_array():
    """Where values are traced the answer is traced; a structural difference is still a bool."""
    same = jax.jit(pm.tree_equal)
    assert bool(same(affine(), affine()))
    assert not bool(same(affine(), affine(start=2.0)))
    known = ramp(2)
    for found in (ramp(2), ramp(2, start=2.0)):
        for equal in (ft.partial(pm.tree_equal, known), lambda x: pm.tree_equal(x, known)):
            assert bool(jax.jit(equal)(found)) is bool((found == known).all())
    kinds = []
    jax.make_jaxpr(lambda x: kinds.append(pm.tree_equal([x], (x,))))(1.0)
    jax.make_jaxpr(lambda x: kinds.append(pm.tree_equal([x, 1], [x, 2])))(1.0)
    assert kinds == [False, False]


def test_equality_of_modules_is_one_bool():
    """Also under a trace, by which configuration is compared; and to nothing of another type."""
    for make in MODULES.values():
        module = make()
        assert (module == module) is True
        assert (module != module) is False
        assert (module == [module]) is False
    for leaf in (ramp(2), np.ones(2), jax.random.key(0)):
        kinds = []
        both = lambda x=leaf, k=kinds: k.append((Affine(x, 1) == Affine(x, 1), Affine(x, 1)))  # noqa: E731
        jax.make_jaxpr(both)()
        assert kinds[0][0] is True
        assert kinds[0][1] != Affine(leaf, 2)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (ramp(2), ramp(2).astype(jnp.bfloat16)),
        (jnp.asarray(1.0), 1.0),
        (None, 0),
        ([None, 1], [1, None]),
        (ramp(2), ramp(2, 1)),
        ([1], (1,)),
        (Pair(1, 2), (1, 2)),
        (Static(1, 2), Static(1, 3)),
        (OwnInit(2), OwnInit(2, use_bias=False)),
        (jax.random.key(0), jax.random.key(1)),
        (jnp.asarray(np.nan), jnp.asarray(np.nan)),
        (Affine, Affine(1, 2)),
    ],
)
def test_differences_are_seen(a, b):
    """Type, structure, configuration, dtype and value all count; NaN equals nothing."""
    assert not pm.tree_equal(a, b)
    assert not pm.tree_equal([b, 1], [a, 1])
    assert not pm.tree_equal(a, a, b)


def test_tolerances_and_types():
    """rtol and atol are for floating arrays; numbers of two types are equal if none asks."""
    a, b = jnp.asarray([1.0, 100.0]), jnp.asarray([1.001, 100.1])
    assert pm.tree_equal(a, b, atol=0.2)
    assert not pm.tree_equal(a, b, atol=1e-2)
    assert not pm.tree_equal(jnp.asarray(1), jnp.asarray(2), rtol=10.0)
    assert pm.tree_equal(1, True)
    assert pm.tree_equal(1, True, typematch=True) is False


def test_tangents_of_integers_are_equal_by_their_shapes():
    """Their dtype has no values, and NumPy compares none."""
    three, four = (np.zeros(n, jax.dtypes.float0) for n in (3, 4))
    assert pm.tree_equal(three, three.copy(), rtol=1e-3) is True
    assert pm.tree_equal(three, four) is False
    assert pm.tree_equal(three, np.zeros(3, bool)) is False


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ([1.0, np.nan, np.inf], [1.0, np.nan, np.inf], "none"),
        ([1.0, np.nan, 3.0], [2.0, np.nan, 5.0], "2 of 3 differ, by 2"),
        ([np.nan, 1.0], [0.0, 1.0], "1 of 2 differ, by nan"),
        ([1 + 1j, 2.0], [1 + 4j, 2.0], "1 of 2 differ, by 3"),
        (np.float16([60000]), np.float16([-60000]), "1 of 1 differ, by 1.2e\\+05"),
        (jax.random.key(0), jax.random.key(1), "1 of 2 differ, by 1"),
    ],
)
def test_how_far_arrays_are_apart(a, b, text):
    """In wide numbers; NaN equals NaN, as in a comparison of two files."""
    a, b = ({"x": x if pm.is_array(x) else np.array(x)} for x in (a, b))
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(str(pm.diff(a, b)))
    with pytest.raises(AssertionError, match=r"difference 0\.125, relative 0\.5, 1 of 2"):
        pm.testing.assert_trees_close(np.array([0, 0.25]), np.array([0, 0.375]))


def test_flatten_one_level():
    """The immediate children, and a structure that puts them together."""
    tree = [1, (2, 3), affine(), None]
    children, treedef = pm.tree_flatten_one_level(tree)
    assert all(x is y for x, y in zip(children, tree, strict=True))
    assert treedef.unflatten(children) == tree
    assert pm.tree_flatten_one_level(affine())[1].unflatten([1, 2]) == Affine(1, 2)
    assert pm.tree_flatten_one_level(5)[0] == [5]
    assert pm.tree_flatten_one_level(None)[0] == []
    loop = []
    loop.append(loop)
    assert pm.tree_flatten_one_level(loop)[0][0] is loop
