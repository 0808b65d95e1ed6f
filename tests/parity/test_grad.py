"""`filter_grad` and `filter_value_and_grad`: which leaves, and the order of results."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity.helpers import ramp, same_under_both_imports


def make_net(eqx):
    """A Module with float, integer, numpy and plain leaves, nested, and a static field."""

    class Layer(eqx.Module):
        weight: jax.Array
        bias: Any
        power: int = eqx.field(static=True, default=2)

        def __call__(self, x):
            return jnp.sum(self.weight * x**self.power) + self.bias

    class Net(eqx.Module):
        layers: tuple
        steps: jax.Array
        host: np.ndarray
        rate: float = 0.5

        def __call__(self, x):
            total = sum(layer(x) for layer in self.layers)
            return self.rate * total * self.steps.astype(jnp.float32) + jnp.sum(self.host)

    layers = (Layer(ramp(2), jnp.float32(0.5)), Layer(ramp(2) + 1, 1.0))
    return Net(layers, jnp.int32(3), np.ones(2, np.float32))


@same_under_both_imports
def test_inexact_arrays_of_the_first_argument_get_a_gradient(eqx):
    """Float arrays of both libraries get one; integers and plain numbers get None."""
    net = make_net(eqx)
    grads = eqx.filter_grad(lambda n, x: n(x))(net, ramp(2))
    return grads, jax.tree.structure(grads) == jax.tree.structure(
        eqx.filter(net, eqx.is_inexact_array)
    )


@pytest.mark.parametrize("name", ["filter_grad", "filter_value_and_grad"])
@same_under_both_imports
def test_has_aux(eqx, name):
    """`filter_grad` gives (grad, aux); `filter_value_and_grad` gives ((value, aux), grad)."""

    @getattr(eqx, name)(has_aux=True)
    def loss(x, y):
        return jnp.sum(x**2 * y), {"y": y, "name": "aux", "n": 3, "x": x + 1}

    return loss(ramp(2), 3.0)


@same_under_both_imports
def test_methods(eqx):
    """A decorated method differentiates by `self`; a bound method by its first argument."""

    class Layer(eqx.Module):
        weight: jax.Array
        count: jax.Array

        @eqx.filter_grad
        def slopes(self, x):
            return jnp.sum(self.weight**2 * x)

        @eqx.filter_value_and_grad(has_aux=True)
        def __call__(self, x):
            return jnp.sum(self.weight * x), "aux"

        def loss(self, x):
            return jnp.sum(self.weight * x**2)

    layer = Layer(ramp(2), jnp.int32(1))
    return layer.slopes(3.0), layer(2.0), eqx.filter_grad(layer.loss)(ramp(2))
