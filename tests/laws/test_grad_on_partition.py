"""Laws of filter_grad: it equals `jax.grad` of the function of the differentiated arrays alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_close
from tests.helpers.trees import (
    Affine,
    Boxed,
    Buffered,
    Child,
    Containers,
    Defaults,
    Holder,
    Pair,
    affine,
    ramp,
)

MODELS = {
    "affine": affine,
    "array": lambda: ramp(3),
    "dict": lambda: {"b": affine(), "a": Pair(1.0, ramp(2)), "c": None},
    "defaults": lambda: Defaults(ramp(2), act=affine()),
    "buffers": lambda: Buffered(ramp(2), ramp(2), ramp(3), Buffered(*[ramp(1)] * 3)),
    "child": lambda: Child("a", 2),
    "generic": lambda: Boxed([ramp(2), jnp.arange(3), True]),
    "containers": lambda: Containers([ramp(1)], {"a": affine()}, (jnp.asarray([True]), 1j)),
    "NumPy": lambda: Holder([np.float32(2.0), np.ones(2, np.float32), np.arange(2)]),
    "bound method": lambda: affine().scaled,
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())


def loss(tree, factor=1.0):
    """A scalar that depends on every floating array, on each differently."""
    parts = [x for x in jax.tree.leaves(tree) if pm.is_inexact_array(x)]
    terms = [jnp.sum(jnp.sin((i + 1.0) * jnp.asarray(x))) for i, x in enumerate(parts)]
    return factor * sum(terms, start=jnp.asarray(0.0))


def by_hand(tree, spec, *args):
    """The gradient by partition, jax.grad and combine."""
    picked, rest = pm.partition(tree, spec)
    return jax.grad(lambda diff: loss(pm.combine(diff, rest), *args))(picked)


TRAINED = ~pm.select.role("buffer") & pm.is_inexact_array


@every_model
@pytest.mark.sampled
def test_default_is_every_floating_array_but_buffers(make):
    """filter_grad(f)(m) == jax.grad(f on the partition)(m's trainable half)."""
    found = pm.filter_grad(loss)(make(), 2.0)

    assert_close(found, by_hand(make(), TRAINED, 2.0))


@every_model
def test_value_and_grad_is_both(make):
    """filter_value_and_grad(f)(m) == (f(m), filter_grad(f)(m)), like the trainable half."""
    value, gradient = pm.filter_value_and_grad(loss)(make())

    assert_close(value, loss(make()))
    assert_close(gradient, pm.filter_grad(loss)(make()))
    assert jax.tree.structure(gradient) == jax.tree.structure(pm.trainable(make())[0])


@every_model
def test_wrt_says_otherwise(make):
    """filter_grad(f, wrt=s)(m) == jax.grad on partition(m, s & is_inexact_array)."""
    tree = make()
    for wrt in (pm.is_inexact_array, pm.select.type(Affine, list) | pm.select.role("buffer"), True):
        picked = pm.select.type(object) & wrt & pm.is_inexact_array
        if any(picked.mask(tree)):
            assert_close(pm.filter_grad(loss, wrt=wrt)(tree), by_hand(tree, picked))


def test_jit_of_grad_is_grad_of_jit():
    """Composition with filter_jit in either order gives the same gradient."""
    model = affine()
    plain = pm.filter_grad(loss)(model)

    assert_close(pm.filter_jit(pm.filter_grad(loss))(model), plain)
    assert_close(pm.filter_grad(pm.filter_jit(loss))(model), plain)
