"""Derivatives other than the gradient: jvp, vjp and Jacobians."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity.helpers import ramp, same_under_both_imports

# Everything here compiles twice, so it is slow. The features have their own tests.
pytestmark = pytest.mark.slow


def make_net(eqx):
    """A Module with float, integer, numpy and plain leaves, nested."""

    class Layer(eqx.Module):
        weight: jax.Array
        bias: jax.Array
        count: jax.Array
        rate: float = 0.5

        def __call__(self, x):
            return self.rate * jnp.tanh(self.weight @ x + self.bias)

    class Net(eqx.Module):
        layers: tuple
        host: np.ndarray

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x + jnp.sum(self.host)

        def with_extras(self, x):
            return {"y": self(x), "n": self.layers[0].count, "s": "text", "f": 2.0}

    layers = tuple(Layer(ramp(2, 2) + i, ramp(2), jnp.arange(3)) for i in range(2))
    return Net(layers, np.ones(2, np.float32))


def tangent_of(eqx, tree):
    """Different numbers for each floating array, None elsewhere."""
    return jax.tree.map(lambda x: jnp.asarray(x) * 2 + 1, eqx.filter(tree, eqx.is_inexact_array))


@same_under_both_imports
def test_jvp(eqx):
    """Tangents like the primals, None for non-floating leaves; results of any kind."""
    net = make_net(eqx)
    call = lambda n, x: n.with_extras(x)  # noqa: E731
    return eqx.filter_jvp(call, (net, ramp(2)), (tangent_of(eqx, net), ramp(2)))


@same_under_both_imports
def test_vjp(eqx):
    """Cotangents for floating arrays of the result; None for leaves that are not differentiated."""
    net = make_net(eqx)
    out, vjp_fn = eqx.filter_vjp(lambda n, x, k: n.with_extras(x), net, ramp(2), "k")
    return out, vjp_fn({"y": ramp(2), "n": None, "s": None, "f": None})


@pytest.mark.parametrize("name", ["filter_jacfwd", "filter_jacrev"])
@same_under_both_imports
def test_jacobians(eqx, name):
    """By the floating arrays of the first argument; other arguments and keywords are passed on."""
    net = make_net(eqx)
    make = getattr(eqx, name)
    return [
        eqx.filter_jit(make(lambda n, x: n(x)))(net, ramp(2)),
        eqx.filter_jit(make(net))(ramp(2)),
        make(lambda x, k, *, power: {"y": x**power * k, "z": (jnp.sum(x), None)})(
            ramp(2), 2.0, power=3
        ),
        make(lambda d: d["x"] ** 2)({"x": ramp(2), "n": jnp.arange(2), "s": "a"}),
    ]
