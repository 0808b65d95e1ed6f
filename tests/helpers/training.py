"""A training step twice: with Modules and filters, and by hand on flat lists in plain JAX.

The first must not be slower than the second.
"""

from typing import Any

import jax
import jax.numpy as jnp

import pytreemod as pm

RATE, DECAY, DECAY_SQUARED, SMALL = 1e-2, 0.9, 0.999, 1e-8


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """A linear map of each row."""
    y = x @ weight
    return y + jnp.broadcast_to(bias, y.shape)


class Layer(pm.Module):
    """A linear map, with flags and a function beside its arrays."""

    weight: jax.Array
    bias: jax.Array
    activation: Any
    size: int = pm.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activation(linear(x, self.weight, self.bias))


class Network(pm.Module):
    """Layers one after the other."""

    layers: list[Layer]
    name: str = "network"

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


class Adam(pm.Module):
    """The state of the optimizer."""

    count: jax.Array
    mean: Any
    square: Any


def network(width: int = 4, depth: int = 3) -> Network:
    """A network whose arrays are all different."""
    scale = 1.0 / width**2
    weights = [
        scale * (i + jnp.arange(width**2, dtype=jnp.float32).reshape(width, width))
        for i in range(depth)
    ]
    return Network([Layer(w, w[0], jnp.tanh, width) for w in weights])


def adam(model: Any) -> Adam:
    """The state of the optimizer before the first step."""
    zeros = jax.tree.map(jnp.zeros_like, model)
    return Adam(jnp.zeros(()), zeros, jax.tree.map(jnp.zeros_like, model))


def batch(width: int = 4, size: int = 8) -> tuple[jax.Array, jax.Array]:
    """Inputs and targets."""
    x = jnp.linspace(-1.0, 1.0, size * width).reshape(size, width)
    return x, x**2


def loss(model: Network, x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean squared error."""
    return jnp.mean((model(x) - y) ** 2)


def moment(mean: jax.Array, grad: jax.Array) -> jax.Array:
    """A running mean."""
    return DECAY * mean + (1 - DECAY) * grad


def second_moment(square: jax.Array, grad: jax.Array) -> jax.Array:
    """A running mean of squares."""
    return DECAY_SQUARED * square + (1 - DECAY_SQUARED) * grad * grad


def update(count: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
    """The update of a parameter by Adam."""
    mean, square = mean / (1 - DECAY**count), square / (1 - DECAY_SQUARED**count)
    return -RATE * mean / (jnp.sqrt(square) + SMALL)


def step(model: Network, state: Adam, x: jax.Array, y: jax.Array) -> tuple[Network, Adam, Any]:
    """One step, with Modules and filters."""
    value, grads = pm.filter_value_and_grad(loss)(model, x, y)
    count = state.count + 1
    mean = jax.tree.map(moment, state.mean, grads)
    square = jax.tree.map(second_moment, state.square, grads)
    updates = jax.tree.map(lambda m, s: update(count, m, s), mean, square)
    return pm.apply_updates(model, updates), Adam(count, mean, square), value


def loss_by_hand(arrays: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """The loss of a network given as [weight, bias, weight, bias, ...]."""
    for weight, bias in zip(arrays[::2], arrays[1::2], strict=True):
        x = jnp.tanh(linear(x, weight, bias))
    return jnp.mean((x - y) ** 2)


def step_by_hand(
    arrays: list[jax.Array], state: list[jax.Array], x: jax.Array, y: jax.Array
) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
    """One step on flat lists; the state is [count, *means, *squares]."""
    value, grads = jax.value_and_grad(loss_by_hand)(arrays, x, y)
    count, size = state[0] + 1, len(arrays)
    mean = [moment(m, g) for m, g in zip(state[1 : size + 1], grads, strict=True)]
    square = [second_moment(s, g) for s, g in zip(state[size + 1 :], grads, strict=True)]
    updates = [update(count, m, s) for m, s in zip(mean, square, strict=True)]
    new = [a + u for a, u in zip(arrays, updates, strict=True)]
    return new, [count, *mean, *square], value
