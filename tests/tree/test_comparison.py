"""tree_equal, tree_check, tree_flatten_one_level."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import StructureError
from tests.helpers.trees import (
    ALL_TREES,
    MODULES,
    ONE,
    Affine,
    OwnInit,
    Pair,
    Static,
    affine,
    double,
    ramp,
)


def answers(same, expected, *trees):
    """Whether `same`, an answer of tree_equal, is as expected: an array, if JAX arrays differ."""
    has_arrays = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(trees))
    is_array = isinstance(same, jax.Array) and same.shape == () and same.dtype == bool
    return bool(same) is expected and (is_array if has_arrays else type(same) is bool)


def test_a_tree_equals_itself():
    """tree_equal(t, t) is true, with typematch, too; every tree of the catalogue is one."""
    for make in ALL_TREES.values():
        tree = make()
        assert answers(pm.tree_equal(tree, tree), True, tree)
        assert answers(pm.tree_equal(tree, tree, tree, typematch=True), True, tree)
        assert pm.tree_check(tree) is None
    pm.tree_check([ONE, ONE, None, None, (), (), pm.nn.Identity()])
    assert pm.tree_equal(ramp(2)) is True


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        (ramp(2), ramp(2), jax.Array),
        (ramp(2), ramp(2, start=2.0), jax.Array),
        (jax.random.key(0), jax.random.key(1), jax.Array),
        ([np.ones(2, np.float32), ramp(2)], [np.ones(2, np.float32), ramp(2)], jax.Array),
        (np.float32(2), jnp.asarray(2.0), jax.Array),
        (np.ones(2), np.ones(2), bool),
        (1, 1.0, bool),
    ],
)
def test_the_answer_is_an_array_once_arrays_were_compared(a, b, kind):
    """So that `~tree_equal(a, b)` negates it, as `~True`, which is -2, does not."""
    for same in (pm.tree_equal(a, b), pm.tree_equal(a, b, rtol=1e-3)):
        assert isinstance(same, kind)
        if kind is jax.Array:
            assert same.shape == ()
            assert same.dtype == bool
            assert bool(~same) is not bool(same)


def test_under_a_trace_the_answer_is_an_array():
    """Where values are traced the answer is traced; a structural difference is still a bool."""
    same = jax.jit(pm.tree_equal)

    assert same(affine(), affine()).dtype == bool
    assert bool(same(affine(), affine()))
    assert not bool(same(affine(), affine(start=2.0)))
    kinds = []
    jax.make_jaxpr(lambda x: kinds.append(pm.tree_equal([x], (x,))))(1.0)
    jax.make_jaxpr(lambda x: kinds.append(pm.tree_equal([x, 1], [x, 2])))(1.0)
    assert kinds == [False, False]


@pytest.mark.parametrize("leaf", [ramp(2), np.ones(2), jax.random.key(0)], ids=["jax", "np", "key"])
def test_equality_of_constant_modules_is_one_bool_under_a_trace(leaf):
    """`==` is decided at once: configuration is compared by it while a function is traced."""
    kinds = []
    jax.make_jaxpr(lambda: kinds.append(Affine(leaf, 1) == Affine(leaf, 1)))()
    jax.make_jaxpr(lambda: kinds.append(Affine(leaf, 1) == Affine(leaf, 2)))()
    assert kinds == [True, False]


def test_equality_of_modules_is_one_bool():
    """m == m is True, m != m is False, and m equals nothing of another type."""
    for make in MODULES.values():
        module = make()
        assert (module == module) is True
        assert (module != module) is False
        assert (module == 3) is False
        assert (module == [module]) is False


def test_flatten_one_level():
    """The immediate children, and a structure that puts them together."""
    tree = [1, (2, 3), affine(), None]
    children, treedef = pm.tree_flatten_one_level(tree)

    assert all(x is y for x, y in zip(children, tree, strict=True))
    assert treedef.unflatten(children) == tree
    layer = affine()
    children, treedef = pm.tree_flatten_one_level(layer)
    assert children[0] is layer.weight
    assert treedef.unflatten([1, 2]) == Affine(1, 2)
    assert pm.tree_flatten_one_level(5)[0] == [5]
    assert pm.tree_flatten_one_level(None)[0] == []


def test_what_is_no_tree_is_refused():
    """A node in itself, and a node at two paths, which would become two nodes."""
    layer, loop, inner = affine(), [], {"a": []}
    loop.append(loop)
    inner["a"].append(inner["a"])

    with pytest.raises(StructureError, match="itself"):
        pm.tree_flatten_one_level(loop)
    with pytest.raises(StructureError, match=r"(?s)at \['a'\]\n.*at \['a'\]\[0\]"):
        pm.tree_check(inner)
    with pytest.raises(StructureError, match=r"(?s)at \['encoder'\].*at \['heads'\]\[1\]"):
        pm.tree_check({"encoder": layer, "heads": [affine(), layer]})


def test_tangents_of_integers_are_equal_by_their_shapes():
    """Their dtype has no values, and NumPy compares none."""
    one, other = (jax.grad(lambda n: n * 2.0, allow_int=True)(3) for _ in range(2))
    three, four = (np.zeros(n, jax.dtypes.float0) for n in (3, 4))

    for tolerances in ({}, {"rtol": 1e-3}):
        assert pm.tree_equal((one, three), (other, three.copy()), **tolerances) is True
        assert pm.tree_equal(three, four, **tolerances) is False
    assert pm.tree_equal(three, np.zeros(3, bool)) is False


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (ramp(2), ramp(2).astype(jnp.bfloat16)),
        (jnp.asarray(1.0), 1.0),
        (None, 0),
        ([1], (1,)),
        (Pair(1, 2), (1, 2)),
        (Static(1, 2), Static(1, 3)),
        (OwnInit(2), OwnInit(2, use_bias=False)),
        (double, max),
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
    # A number is equal to one of another type, unless typematch is asked for.
    assert pm.tree_equal(1, True)
    assert pm.tree_equal(1, True, typematch=True) is False


def test_tolerances():
    """rtol and atol are for floating arrays."""
    a, b = jnp.asarray([1.0, 100.0]), jnp.asarray([1.001, 100.1])

    assert not pm.tree_equal(a, b)
    assert pm.tree_equal(a, b, rtol=1e-2)
    assert not pm.tree_equal(a, b, atol=1e-2)
    assert pm.tree_equal(a, b, atol=0.2)
    assert not pm.tree_equal(jnp.asarray(1), jnp.asarray(2), rtol=10.0)
