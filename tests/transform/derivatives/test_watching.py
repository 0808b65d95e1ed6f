"""capture(cotangents=True): each is the gradient by something added by hand to the value."""

import functools as ft
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.transform.boundary.sowing import watching
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
    "of other leaves": lambda f: pm.filter_grad(f, wrt="head.bias"),
    "value_and_grad in jit": lambda f: pm.filter_jit(pm.filter_value_and_grad(f)),
    "around jit": lambda f: pm.filter_grad(pm.filter_jit(f)),
    "around checkpoint": lambda f: pm.filter_grad(pm.filter_checkpoint(f)),
    "vjp": lambda f: lambda model, x: pm.filter_vjp(f, model, x)[1](jnp.float32(1)),
    "vjp in jit": lambda f: pm.filter_jit(
        lambda model, x: pm.filter_vjp(f, model, x)[1](jnp.float32(1))
    ),
    "has_aux": lambda f: pm.filter_grad(lambda model, x: (f(model, x), x), has_aux=True),
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


def test_layers_that_are_recomputed_have_their_cotangents(shown):
    """Stack(remat=True)."""
    model = Net(KEY, remat=True)
    _, seen = jax.jit(pm.capture(pm.filter_grad(loss), nn.Linear, cotangents=True))(model, X)
    check(seen, shown[1])


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


def test_what_is_no_floating_array_has_no_cotangent():
    """Integers, alone or in a tree; and calls outside of a gradient."""
    layer = nn.Linear(2, 2, key=KEY)

    def run(layer, x):
        pm.sow("index", jnp.argmax(x))
        pm.sow("both", {"index": jnp.argmax(x), "x": x})
        return jnp.sum(layer(x))

    def both(layer, x):
        return layer(x), pm.filter_grad(run)(layer, x)

    _, seen = pm.capture(both, nn.Linear, cotangents=True)(layer, X[0])
    assert list(seen) == ["<root>", "index", "both", "<root>#2"]
    assert seen["<root>"][1] is None
    assert seen["index"][1] is None
    assert seen["both"][1]["index"] is None
    close(seen["both"][1]["x"], 0)
    close(seen["<root>#2"][1], 1)


def test_a_layer_with_a_state_is_looked_at_without_it():
    """The State continues unchanged."""
    model, state = pm.make_with_state(
        lambda: nn.Sequential([nn.Linear(2, 3, key=KEY), nn.BatchNorm(3)])
    )()

    def run(model, x, state):
        out, state = model(x, state)
        return jnp.sum(out**3), state

    grad = pm.filter_grad(run, has_aux=True)
    plain, _ = grad(model, X, state)
    model, state = pm.make_with_state(
        lambda: nn.Sequential([nn.Linear(2, 3, key=KEY), nn.BatchNorm(3)])
    )()
    captured = pm.capture(grad, nn.BatchNorm, cotangents=True)
    (gradient, after), seen = captured(model, X, state)
    out, cotangent = seen["layers[1]"]
    close(cotangent, 3 * out**2)
    jax.tree.map(close, gradient, plain)
    assert isinstance(after, pm.State)


def test_of_nested_gradients_the_innermost_counts():
    """A gradient through a gradient, backwards and forwards."""
    layer = nn.Linear(2, 2, use_bias=False, key=KEY)

    def inner(layer, x):
        return jnp.sum(jnp.sin(layer(x)))

    def outer(x):
        return jnp.sum(pm.filter_grad(inner)(layer, x).weight ** 2)

    def run(layer, x):
        return jnp.sum(pm.filter_grad(inner)(layer, x).weight ** 2)

    _, seen = pm.capture(pm.filter_grad(run), nn.Linear, cotangents=True)(layer, X[0])
    close(seen["<root>"][1], np.cos(layer(X[0])))
    assert outer(X[0]).shape == ()
    moved = pm.capture(
        lambda layer: pm.filter_jvp(lambda w: run(w, X[0]), (layer,), (layer,)),
        nn.Linear,
        cotangents=True,
    )
    close(moved(layer)[1]["<root>"][1], np.cos(layer(X[0])))


def test_a_pullback_may_be_called_by_a_map_and_later():
    """The cotangents of each row of a Jacobian; two functions, the first one's last."""
    layer = nn.Linear(2, 2, key=KEY)

    def rows(layer, x):
        y, back = pm.filter_vjp(lambda layer: layer(x), layer)
        return pm.filter_vmap(back)(jnp.eye(len(y)))

    _, seen = pm.capture(rows, nn.Linear, cotangents=True)(layer, X[0])
    close(seen["<root>"][1], np.eye(2))

    def crossed(layer, x):
        one, back_one = pm.filter_vjp(lambda layer: jnp.sum(layer(x)), layer)
        two, back_two = pm.filter_vjp(lambda layer: jnp.sum(3 * layer(x)), layer)
        return back_two(jnp.ones_like(two)), back_one(2 * jnp.ones_like(one))

    _, seen = pm.capture(crossed, nn.Linear, cotangents=True)(layer, X[0])
    close(seen["<root>"][1], 2)
    close(seen["<root>#2"][1], 3)


def test_captures_around_each_other_see_their_own(shown):
    """One with cotangents and one without, either way."""
    model, grad = NET, pm.filter_grad(loss)
    inside = pm.capture(pm.capture(grad, "first", cotangents=True), "head")
    (_, first), head = inside(model, X)
    assert list(first) == ["first", "hidden"]
    assert list(head) == ["hidden", "head"]
    assert first["first"][1].shape == head["hidden"].shape
    outside = pm.capture(pm.capture(grad, "first"), "head", cotangents=True)
    (_, first), head = outside(model, X)
    close(head["head"][1], shown[1]["head"])
    assert first["first"].shape == head["hidden"][1].shape


def test_beside_an_intervention_the_cotangent_is_of_what_is_shown():
    """The outer of the two sees the result of the inner one."""
    layer, x = nn.Linear(2, 2, key=KEY), X[1]
    out = np.asarray(layer(x))
    change = pm.by({...: lambda out, at, value: 3 * out + value})
    values = {"<root>": jnp.ones(2)}
    grad = pm.filter_grad(lambda layer, x: jnp.sum(layer(x) ** 2))
    inside = pm.capture(pm.intervene(grad, change, values=values), nn.Linear, cotangents=True)
    value, cotangent = inside(layer, x)[1]["<root>"]
    close(value, 3 * out + 1)
    close(cotangent, 2 * (3 * out + 1))
    around = pm.intervene(pm.capture(grad, nn.Linear, cotangents=True), change, values=values)
    value, cotangent = around(layer, x)[1]["<root>"]
    close(value, out)
    close(cotangent, 6 * (3 * out + 1))


def test_a_plain_capture_and_none_are_traced_apart():
    """A compiled step returns the requested values, and is traced once for each capture."""
    calls = []

    @pm.filter_jit
    def step(model, x):
        calls.append(1)
        return pm.filter_grad(loss)(model, x)

    model = NET
    for _ in range(2):
        step(model, X)
        _, plain = pm.capture(step, "head")(model, X)
        _, pairs = pm.capture(step, "head", cotangents=True)(model, X)
        assert not isinstance(plain["head"], tuple)
        close(pairs["head"][0], plain["head"])
    assert len(calls) == 3


def test_nothing_is_left_behind_by_an_error_or_another_thread():
    """A capture that fails, and a gradient in another thread while one is active."""
    net = model = NET

    def fails(model, x):
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        pm.capture(pm.filter_grad(fails), "head", cotangents=True)(model, X)
    assert not watching
    found = []

    def elsewhere(model, x):
        thread = threading.Thread(target=lambda: found.append(pm.filter_grad(loss)(net, X)))
        thread.start()
        thread.join()
        return loss(model, x)

    _, seen = pm.capture(elsewhere, "head", cotangents=True)(model, X)
    jax.tree.map(close, found[0], pm.filter_grad(loss)(model, X))
    assert seen["head"][1] is None


def test_from_a_transform_of_plain_jax_nothing_comes_back():
    """As for values."""
    layer = nn.Linear(2, 2, key=KEY)
    run = pm.filter_grad(lambda layer, x: jnp.sum(jax.vmap(layer)(x)))
    with pytest.raises(pm.errors.CaptureError, match="filter_jit, filter_vmap"):
        pm.capture(run, nn.Linear, cotangents=True)(layer, X)
