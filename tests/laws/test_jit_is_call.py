"""Law of filter_jit: `filter_jit(f)(*args) == f(*args)`, for models, trees and any argument."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import pytreemod as pm
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.laws import law, trees
from tests.helpers.trees import Affine, Color, OwnInit, Pair, affine, double, every_tree, ramp

identity = pm.filter_jit(lambda tree: tree)
mixed = pm.filter_jit(lambda *args, **kwargs: (args, kwargs))


def as_jax(tree):
    """The tree with JAX arrays for NumPy arrays, which a trace cannot return unchanged."""
    return jax.tree.map(lambda x: jnp.asarray(x) if pm.is_array(x) else x, tree)


@every_tree
@pytest.mark.sampled
def test_identity(make):
    """filter_jit(identity)(t) == t, time and again, and for its own result."""
    tree = make()
    for _ in range(3):
        found = identity(tree)
        assert_same(found, as_jax(tree))
    assert_same(identity(identity(found)), as_jax(tree))


@law
@given(trees)
def test_identity_of_any_tree(tree):
    """The same, for random trees."""
    assert_same(identity(tree), as_jax(tree))


@law
@given(st.lists(trees, max_size=2), st.dictionaries(st.sampled_from(["b", "a"]), trees, max_size=2))
def test_arguments_arrive_where_they_were_sent(args, kwargs):
    """Positional and keyword arguments all arrive unchanged."""
    found_args, found_kwargs = mixed(*args, **kwargs)

    assert_same(list(found_args), as_jax(args))
    assert_same(found_kwargs, as_jax(kwargs))


def update(model, x, rate=0.5):
    """The result of a training step: a number, a new model, and a non-array."""
    y = model(x)
    return jax.tree.map(lambda w: w - rate * jnp.sum(y), model), {"y": y, "rate": rate}


jitted_update = pm.filter_jit(update)


@pytest.mark.parametrize("rate", [0.5, 2.0])
@pytest.mark.parametrize("make", [affine, lambda: OwnInit(3), lambda: OwnInit(3, use_bias=False)])
def test_step_after_step(make, rate):
    """Five jitted steps equal five plain steps."""
    fast = slow = make()
    x = ramp(3)
    for _ in range(5):
        fast, seen = jitted_update(fast, x, rate=rate)
        slow, expected = update(slow, x, rate=rate)
        assert_close(seen, expected, rtol=1e-4)
    assert_close(fast, slow, rtol=1e-4)


CALLABLES = {
    "function": (double, (3.0,)),
    "Module": (affine(), (ramp(3),)),
    "bound method": (affine().scaled, (ramp(3),)),
    "Partial": (pm.Partial(Affine.scaled, affine(), by=2.0), (ramp(3),)),
    "class": (Affine, (ramp(2), "text")),
    "class with its own init": (OwnInit, (3,)),
    "built-in": (max, (3, 5)),
    "jitted": (jax.jit(double), (ramp(2),)),
    "filter_jit": (pm.filter_jit(double), (ramp(2),)),
    "filter_grad": (pm.filter_grad(lambda m: jnp.sum(m.weight**2)), (affine(),)),
    "named tuple": (Pair, (1, ramp(2))),
    "enumeration": (Color, (1,)),
    "method of a built-in": ("a,b".split, (",",)),
}


@pytest.mark.parametrize(("fn", "args"), CALLABLES.values(), ids=CALLABLES.keys())
def test_every_callable(fn, args):
    """filter_jit(f)(*args) == f(*args) for functions, Modules, methods, classes, partials."""
    for _ in range(2):
        assert_same(pm.filter_jit(fn)(*args), fn(*args))
