"""capture(cotangents=True): each is the gradient by something added by hand to the value."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.helpers.trees import ramp

close = ft.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
X = ramp(3, 2) / 4
KEY = jax.random.key(0)


class Net(pm.Module):
    """A layer whose output is sown, too, a Stack of pairs of layers, and a last layer."""

    first: nn.Linear
    stack: nn.Stack
    head: nn.Linear

    def __init__(self, key, remat=False):
        self.first = nn.Linear(2, 3, key=key)
        make = ft.partial(nn.MLP, 3, 3, 4, 1, activation=jnp.tanh)
        self.stack = nn.Stack(make, 4, key=key, remat=remat)
        self.head = nn.Linear(3, 1, key=key)

    def __call__(self, x):
        return self.head(self.stack(pm.sow("hidden", self.first(x))))


def loss(model, x):
    """Of a Net."""
    return jnp.sum(model(x) ** 2)


def added(model, x, more):
    """The loss of a Net, by hand, with a term added to the output of each layer."""
    h = model.first(x) + more["first"] + more["hidden"]
    for i, layer in enumerate(model.stack.unstack()):
        h = jnp.tanh(layer.layers[0](h) + more["stack.layer.layers[0]"][i])
        h = layer.layers[1](h) + more["stack.layer.layers[1]"][i]
    return jnp.sum((model.head(h) + more["head"]) ** 2)


@jax.jit
def by_hand(model, x, more):
    """The gradients with respect to the terms, from plain JAX."""
    return jax.grad(added, argnums=2)(model, x, more)


def check(seen, expected):
    """Every cotangent is the one expected."""
    assert seen.keys() == expected.keys()
    for name, (_, cotangent) in seen.items():
        close(cotangent, expected[name], err_msg=name)


NET = Net(KEY)
WAYS = {
    "grad": lambda f: pm.filter_grad(f),
    "value_and_grad in jit": lambda f: pm.filter_jit(pm.filter_value_and_grad(f)),
    "around checkpoint": lambda f: pm.filter_grad(pm.filter_checkpoint(f)),
    "vjp": lambda f: lambda model, x: pm.filter_vjp(f, model, x)[1](jnp.float32(1)),
}


@pytest.fixture(scope="module")
def shown():
    """The capture of the loss, the gradients of the terms, and those of the model."""
    _, values = pm.capture(loss, nn.Linear)(NET, X)
    more = jax.tree.map(jnp.zeros_like, values)
    return values, by_hand(NET, X, more), jax.jit(pm.filter_grad(loss))(NET, X)


@pytest.mark.parametrize("way", WAYS)
def test_cotangents_are_gradients_by_what_is_added(way, shown):
    """Through a Stack; whatever is differentiated, and inside of other transforms."""
    values, expected, gradient = shown
    out, seen = jax.jit(pm.capture(WAYS[way](loss), nn.Linear, cotangents=True))(NET, X)
    check(seen, expected)
    jax.tree.map(close, {name: value for name, (value, _) in seen.items()}, values)
    if way == "grad":
        jax.tree.map(close, out, gradient)


def test_steps_of_a_scan_inside_have_a_cotangent_each():
    """A layer that is called again and again, by filter_scan."""
    layer = nn.Linear(2, 2, key=KEY)

    def run(layer, x):
        def step(x, _):
            return jnp.tanh(layer(x)), None

        return jnp.sum(pm.filter_scan(step, x, length=3)[0])

    def more_added(more):
        x = X[0]
        for each in more:
            x = jnp.tanh(layer(x) + each)
        return jnp.sum(x)

    _, seen = pm.capture(pm.filter_grad(run), ..., cotangents=True)(layer, X[0])
    check(seen, {"<root>": jax.grad(more_added)(jnp.zeros((3, 2)))})
