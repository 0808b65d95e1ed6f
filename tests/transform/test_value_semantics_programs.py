"""Whole programs under value semantics: of NNX's first README (X), and of Mielke's text (S).

"From PyTorch to JAX" prints numbers, which these programs print, too. Its language model is
`examples/lstm_language_model.py`, which has its own tests.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import ramp

# ---- NNX 0.0.2


class Counted(pm.Module):
    """A layer with a count of its calls."""

    weight: jax.Array
    count: jax.Array = pm.buffer()

    def __call__(self, x):
        return x @ self.weight, self.replace(count=self.count + 1)


NET, X = Counted(ramp(3, 2), jnp.asarray(0)), ramp(4, 3)


def loss_fn(model, x):
    y, model = model(x)
    return jnp.mean(y**2), model


def descend(weight, grad):
    return weight - 0.01 * grad


@pm.filter_jit
def filtered(model, x):
    """The first style: whole models in, whole models out."""
    (_, model), grads = pm.filter_value_and_grad(loss_fn, has_aux=True)(model, x)
    return pm.apply_updates(model, jax.tree.map(lambda grad: -0.01 * grad, grads))


def test_a_partition_goes_through_plain_jit_and_grad():
    """X8: the halves of a model are trees for jax.jit and jax.grad, which know of nothing else."""
    model = NET
    params, rest = pm.partition(model, pm.select.role("param"))

    @jax.jit
    def step(params, rest, x):
        loss = lambda params: loss_fn(pm.combine(params, rest), x)  # noqa: E731
        grads, model = jax.grad(loss, has_aux=True)(params)
        params = jax.tree.map(descend, params, grads)
        return params, pm.partition(model, pm.select.role("param"))[1]

    for _ in range(3):
        params, rest = step(params, rest, X)
        model = filtered(model, X)
    assert_close(pm.combine(params, rest), model)
    assert int(model.count) == 3


def test_the_styles_are_one_program():
    """X7, X9: a step of a whole model, one of a bundled net, one by hand: equal numbers."""

    class Stateful(pm.Module):
        weight: jax.Array
        count: pm.StateIndex

        def __init__(self):
            self.weight, self.count = ramp(3, 2), pm.StateIndex(jnp.asarray(0))

        def __call__(self, x, state):
            return x @ self.weight, state.set(self.count, state.get(self.count) + 1)

    @jax.jit
    def by_hand(weight, count, x):
        grad = jax.grad(lambda weight: jnp.mean((x @ weight) ** 2))(weight)
        return descend(weight, grad), count + 1

    model, pair, carried = NET, pm.stateful(Stateful()), (ramp(3, 2), jnp.asarray(0))
    for _ in range(3):
        model, pair, carried = filtered(model, X), filtered(pair, X), by_hand(*carried, X)

    assert_close(model.weight, carried[0])
    assert_close(pair.model.weight, carried[0])
    counts = model.count, pair.state.get(pair.model.count), carried[1]
    assert [int(count) for count in counts] == [3, 3, 3]


def test_keys_are_arguments():
    """X3, S7: the same key makes the same layer, at any time; a key is required."""
    key = jax.random.key(0)
    first = nn.Linear(12, 2, key=key)
    nn.Linear(12, 2, key=jax.random.key(1))

    assert_same(nn.Linear(12, 2, key=key), first)
    with pytest.raises(TypeError, match="key"):
        nn.Linear(12, 2)
    x, dropout = jnp.ones(100), nn.Dropout(0.5)
    assert_same(dropout(x, key=key), dropout(x, key=key))
    assert not np.array_equal(dropout(x, key=key), dropout(x, key=jax.random.key(1)))


# ---- From PyTorch to JAX


class LinearRegressor(pm.Module):
    """Her first class. Nothing says how it is flattened."""

    w: jax.Array
    b: jax.Array

    def predict(self, x):
        return self.w * x + self.b

    @jax.jit
    def rms(self, xs, ys):
        return jnp.sqrt(jnp.sum(jnp.square(self.predict(xs) - ys)))


REGRESSOR = LinearRegressor(jnp.asarray(13.0), jnp.asarray(0.0))
POINT = jnp.asarray([42.0]), jnp.asarray([500.0])
LOSSES = [
    46.0, 42.47003, 38.940002, 35.410034, 31.880066, 28.350098, 24.820068, 21.2901, 17.760132,
    14.230164, 10.700165, 7.170166, 3.6401978, 0.110198975, 3.4197998,
]  # fmt: skip


def test_linear_regression_has_her_numbers():
    """S3, S4, S8: a class is its parameters, its method a function, its gradient of the class."""
    losses, model, rms = [], REGRESSOR, LinearRegressor.rms
    for _ in range(15):
        losses.append(float(rms(model, *POINT)))
        grads = jax.grad(rms)(model, *POINT)
        model = jax.tree.map(lambda param, grad: param - 0.002 * grad, model, grads)

    np.testing.assert_allclose(losses, LOSSES, rtol=1e-6)
    np.testing.assert_allclose(model.predict(42.0), 500.1102, rtol=1e-6)
    grads = jax.grad(rms)(REGRESSOR, *POINT)
    assert_same(grads, LinearRegressor(jnp.asarray(42.0), jnp.asarray(1.0)))


def test_what_depends_on_parameters_is_computed_inside():
    """S6: what is computed outside of a differentiated function has no gradient; inside it has."""
    shift = jnp.tanh(REGRESSOR.b)
    inside = jax.grad(lambda model: model.w * jnp.tanh(model.b))(REGRESSOR)
    outside = jax.grad(lambda model: model.w * shift)(REGRESSOR)
    assert_close((inside.b, outside.b), (REGRESSOR.w, jnp.zeros(())))


def test_init_and_apply_are_two_lines():
    """S9, L4: the pair of functions that other libraries ask for, made of a class."""

    def init(key):
        return pm.partition(nn.MLP(2, 1, 3, 1, key=key), pm.is_array)[0]

    static = pm.partition(nn.MLP(2, 1, 3, 1, key=jax.random.key(0)), pm.is_array)[1]
    apply = lambda params, x: pm.combine(params, static)(x)  # noqa: E731

    model = nn.MLP(2, 1, 3, 1, key=jax.random.key(1))
    params = jax.jit(init)(jax.random.key(1))
    assert_close(jax.jit(apply)(params, ramp(2)), model(ramp(2)))
    several = jax.vmap(init)(jax.random.split(jax.random.key(0), 4))
    assert jax.vmap(apply, in_axes=(0, None))(several, ramp(2)).shape == (4, 1)
