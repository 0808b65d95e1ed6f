"""Plain JAX takes Modules whose leaves are arrays: no filter, no partition, no wrapper."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import (
    Affine,
    Boxed,
    Buffered,
    Child,
    Containers,
    Holder,
    OwnInit,
    Pair,
    Static,
    affine,
    by_hand,
    double,
    ramp,
)


class Network(pm.Module):
    """Layers, an activation and sizes: a typical model."""

    first: Affine
    second: OwnInit
    act: object
    depth: int = pm.field(static=True)

    def __init__(self, size, act=jnp.tanh):
        self.first = affine(size, 3)
        self.second = OwnInit(size)
        self.act = act
        self.depth = 2

    def __call__(self, x):
        return self.second(self.act(self.first(x)))


MODELS = {
    "affine": affine,
    "network": lambda: Network(2),
    "own init": lambda: OwnInit(2),
    "static": lambda: Static(ramp(2), 3),
    "child": lambda: jax.tree.map(jnp.asarray, Child("a", 2)),
    "generic": lambda: Boxed[jax.Array](ramp(2)),
    "buffered": lambda: Buffered(ramp(2), ramp(2), ramp(1), affine()),
    "containers": lambda: Containers(
        [ramp(1), affine()], {"b": ramp(2), "a": ramp(1)}, (Pair(ramp(1), double and ramp(2)),)
    ),
    "functions and strings": lambda: Holder([OwnInit(1), Holder(double), Holder("text")]),
    "bound method": lambda: affine().scaled,
    "Partial": lambda: pm.Partial(double, ramp(2)),
    "by hand": by_hand,
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())


def total(model):
    """A scalar that depends on every leaf."""
    return sum((jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(model)), start=jnp.zeros(()))


def doubled(model):
    """A Module of the same structure."""
    return jax.tree.map(double, model)


@every_model
@pytest.mark.sampled
def test_jit(make):
    """jax.jit takes and returns Modules, and traces once for equal structures."""
    traces = []

    @jax.jit
    def step(model):
        traces.append(None)
        return doubled(model), total(model)

    for _ in range(2):
        model, value = step(make())
        assert_close(value, total(make()))
        assert_close(jax.tree.leaves(model), jax.tree.leaves(doubled(make())))
        assert type(model) is type(make())
    assert len(traces) == 1


@every_model
def test_grad(make):
    """jax.grad gives a Module of gradients."""
    gradient = jax.grad(total)(make())

    assert jax.tree.structure(gradient) == jax.tree.structure(make())
    assert_close(gradient, jax.tree.map(jnp.cos, make()))


@every_model
def test_vmap(make):
    """jax.vmap maps over a stacked Module, and gives one."""
    stacked = jax.tree.map(lambda x: jnp.stack([x, x + 1]), make())

    assert_close(jax.vmap(doubled)(stacked), doubled(stacked))
    assert jax.vmap(total)(stacked).shape == (2,)


@every_model
@pytest.mark.sampled
def test_scan_carry(make):
    """jax.lax.scan carries a Module, and stacks those it is given back."""
    final, seen = jax.lax.scan(lambda m, _: (doubled(m), m), make(), length=2)

    assert_close(final, jax.tree.map(lambda x: 4 * x, make()))
    assert_close(seen, jax.tree.map(lambda x: jnp.stack([x, 2 * x]), make()))


@every_model
@pytest.mark.sampled
def test_cond_and_loops(make):
    """jax.lax.cond, while_loop and fori_loop take a Module."""
    chosen = jax.lax.cond(jnp.asarray(True), doubled, lambda m: m, make())
    assert_close(chosen, doubled(make()))

    looped = jax.lax.fori_loop(0, 2, lambda _, m: doubled(m), make())
    assert_close(looped, jax.tree.map(lambda x: 4 * x, make()))


@every_model
@jax.numpy_dtype_promotion("standard")  # optax counts steps in int32.
@pytest.mark.sampled
def test_optax(make):
    """optax.adam takes the model itself, with no filter, and moves every leaf."""
    optimizer = optax.adam(1e-3)
    state = optimizer.init(make())
    updates, state = jax.jit(optimizer.update)(jax.grad(total)(make()), state, make())
    moved = optax.apply_updates(make(), updates)

    assert type(moved) is type(make())
    assert_same(pm.apply_updates(make(), updates), moved)
    for old, new in zip(jax.tree.leaves(make()), jax.tree.leaves(moved), strict=True):
        assert not np.array_equal(old, new)


@jax.numpy_dtype_promotion("standard")  # optax counts steps in int32.
def test_a_training_loop_without_any_filter():
    """A network is fitted with jax.jit, jax.value_and_grad and optax alone."""
    xs = ramp(4, 3) / 12
    ys = jnp.sum(xs, axis=1, keepdims=True) * jnp.ones((1, 2))
    optimizer = optax.adam(0.05)

    def loss(model):
        return jnp.mean((jax.vmap(model)(xs) - ys) ** 2)

    @jax.jit
    def step(model, state):
        value, gradient = jax.value_and_grad(loss)(model)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(model, updates), state, value

    model = Network(2)
    state = optimizer.init(model)
    losses = []
    for _ in range(40):
        model, state, value = step(model, state)
        losses.append(float(value))
    assert losses[-1] < 0.2 * losses[0]
    assert model.depth == 2
    assert model.act is jnp.tanh


def test_a_leaf_that_is_no_array_is_jaxs_error():
    """Plain jax.jit names the path of the string; the filter_ forms accept it."""
    with pytest.raises(TypeError, match=r"model\.content\[1\]"):
        jax.jit(lambda model: total(model))(Holder([ramp(1), "text"]))
