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


def mapped(model, x):
    """The loss by filter_vmap."""
    return jnp.sum(pm.filter_vmap(model)(x) ** 2)


def accumulated(model, xs):
    """The gradients for each row, added up."""

    def step(total, x):
        return jax.tree.map(jnp.add, total, pm.filter_grad(loss)(model, x)), None

    start = jax.tree.map(jnp.zeros_like, pm.filter(model, pm.is_inexact_array))
    return pm.filter_scan(step, start, xs)[0]


@pytest.mark.parametrize("fn", [pm.filter_grad(mapped), accumulated])
def test_members_and_steps_are_stacked_as_their_values_are(fn, shown):
    """A vmap inside of the gradient, a scan around it, as gradients are accumulated."""
    _, seen = jax.jit(pm.capture(fn, nn.Linear, cotangents=True))(NET, X)
    # Each row for itself: the rows of the batch are the same.
    check(seen, jax.tree.map(_by_row, shown[1]))


def _by_row(x):
    return jnp.moveaxis(x, -2, 0)


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


def test_each_of_several_calls_has_its_own():
    """A layer that is called twice, one branch of a cond, and a value that leads nowhere."""
    layer = nn.Linear(2, 2, key=KEY)

    def run(layer, x, flag):
        x = layer(layer(x))
        pm.sow("dead", 2 * x)
        x = pm.filter_cond(
            flag, lambda x: pm.sow("half", x * 3), lambda x: pm.sow("half", x * 5), x
        )
        return jnp.sum(x)

    weight = np.asarray(layer.weight)
    for flag, factor in ((True, 3.0), (False, 5.0)):
        grad = pm.capture(pm.filter_grad(run), nn.Linear, cotangents=True)
        _, seen = grad(layer, X[0], jnp.asarray(flag))
        last = np.full(2, factor, np.float32)
        expected = {"<root>": last @ weight, "<root>#2": last, "dead": 0, "half": np.ones(2)}
        check(seen, {name: np.broadcast_to(value, 2) for name, value in expected.items()})
