"""Plain JAX takes Modules whose leaves are arrays: no filter, no partition, no wrapper."""

import jax
import jax.numpy as jnp
import optax
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Buffered, Holder, OwnInit, Static, affine, by_hand, double, ramp

MODELS = {
    "own init": lambda: OwnInit(2),
    "static": lambda: Static(ramp(2), 3),
    "buffered": lambda: Buffered(ramp(2), ramp(2), ramp(1), affine()),
    "containers": lambda: Holder([{"b": ramp(2), "a": ramp(1)}, (affine(), None)]),
    "functions and strings": lambda: Holder([OwnInit(1), Holder(double), Holder("text")]),
    "bound method": lambda: affine().scaled,
    "Partial": lambda: pm.Partial(double, ramp(2)),
    "by hand": by_hand,
}


def total(model):
    """A scalar that depends on every leaf."""
    return sum((jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(model)), start=jnp.zeros(()))


def doubled(model):
    """A Module of the same structure."""
    return jax.tree.map(double, model)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
@jax.numpy_dtype_promotion("standard")  # optax counts steps in int32.
@pytest.mark.sampled
def test_plain_jax_takes_a_model(make):
    """jit, grad, vmap, scan, cond, fori_loop, and optax take and return Modules."""
    traces, four = [], jax.tree.map(lambda x: 4 * x, make())
    step = jax.jit(lambda model: traces.append(None) or (doubled(model), total(model)))
    for _ in range(2):
        model, value = step(make())
        assert_close((model, value), (doubled(make()), total(make())))
        assert type(model) is type(make())
    assert len(traces) == 1

    gradient, stacked = jax.grad(total)(make()), jax.tree.map(lambda x: jnp.stack([x, x]), make())
    assert_close(gradient, jax.tree.map(jnp.cos, make()))
    assert_close(jax.vmap(doubled)(stacked), doubled(stacked))
    final, seen = jax.lax.scan(lambda m, _: (doubled(m), m), make(), length=2)
    assert_close(final, four)
    assert_close(seen, jax.tree.map(lambda x: jnp.stack([x, 2 * x]), make()))
    assert_close(jax.lax.cond(True, doubled, lambda m: m, make()), doubled(make()))
    assert_close(jax.lax.fori_loop(0, 2, lambda _, m: doubled(m), make()), four)

    optimizer = optax.adam(1e-3)
    updates, _ = jax.jit(optimizer.update)(gradient, optimizer.init(make()), make())
    assert_same(pm.apply_updates(make(), updates), optax.apply_updates(make(), updates))


def test_a_leaf_that_is_no_array_is_jaxs_error():
    """Plain jax.jit names the path of the string; the filter_ forms accept it."""
    with pytest.raises(TypeError, match=r"model\.content\[1\]"):
        jax.jit(lambda model: total(model))(Holder([ramp(1), "text"]))
