"""first_bad: which of all calls is named, in loops and maps, forward and backward."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import CaptureError

first_bad = pm.debug.first_bad


class Divide(pm.Module):
    """Not finite where its parameter is zero."""

    by: jax.Array

    def __call__(self, x):
        return x / self.by


class Root(pm.Module):
    """With a gradient that is not finite where its parameter is zero."""

    less: jax.Array

    def __call__(self, x):
        return x + jnp.sqrt(jnp.abs(x) * self.less)


class Pair(pm.Module):
    """A layer of two."""

    one: pm.Module
    two: pm.Module

    def __call__(self, x):
        return self.two(self.one(x))


def divides(n, *zeros):
    """Layers of two Divides, of which some have a zero."""
    by = jnp.ones((2, n))
    for which, i in zeros:
        by = by.at[which, i].set(0.0)
    return [Pair(Divide(by[0, i]), Divide(by[1, i])) for i in range(n)]


def stack(n, *zeros, remat=False):
    """The layers as a Stack."""
    return nn.Stack.from_layers(divides(n, *zeros), remat=remat)


X = jnp.asarray([1.0, 2.0])


def total(model, x):
    """A loss."""
    return jnp.sum(model(x))


def test_nothing_is_false_and_says_what_was_looked_at():
    """Forward, and backward."""
    for fn in (total, pm.filter_jit(pm.filter_value_and_grad(total))):
        found = first_bad(fn)(stack(3), X)
        assert not found
        # The Stack, and three layers of three Modules each.
        assert (found.kind, found.path, found.checked) == (None, "", 10)


@pytest.mark.parametrize("make", [stack, ft.partial(stack, remat=True)])
def test_in_a_stack_the_earlier_layer_counts_and_then_the_location(make):
    """The second Module of layer 1 comes before the first one of layer 2."""
    model = make(4, (1, 1), (0, 2))
    for fn in (total, pm.filter_jit(pm.filter_grad(total))):
        found = first_bad(fn)(model, X)
        assert (found.kind, found.path, found.layers) == ("output", "layer.two", (1,))
        assert (found.steps, found.members, found.call) == ((), (), 0)
        assert (found.low, found.high, found.was_bad) == (1.0, 2.0, False)
        assert found.after == "layer.one (layer 1)"


def over(model, xs, reverse=False):
    """A Pair in the steps of a scan, divided by the steps' numbers."""

    def step(carry, x):
        return model(carry / x), None

    return pm.filter_scan(step, X, xs, reverse=reverse)[0]


def test_steps_run_forwards_or_from_the_end():
    """A NaN in the carry is in the next step; the first Module that gets it is named."""
    model = divides(1)[0]
    found = first_bad(over)(model, jnp.asarray([1.0, 0.0, 1.0, 0.0]))
    assert (found.path, found.steps, found.was_bad) == ("one", (1,), True)
    assert found.after == "<root> (step 0)"
    found = first_bad(over)(model, jnp.asarray([1.0, 0.0, 1.0, 0.0]), reverse=True)
    assert (found.steps, found.after) == ((3,), None)


def test_members_of_a_map_are_named_and_loops_nest():
    """The earliest step of all members; a Stack in a Stack."""

    def mapped(model, xs):
        return pm.filter_vmap(lambda xs: over(model, xs))(xs)

    xs = jnp.asarray([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    found = first_bad(mapped)(divides(1)[0], xs)
    assert (found.path, found.steps, found.members) == ("one", (1,), (1,))

    found = first_bad(total)(nn.Stack.from_layers([stack(3), stack(3, (0, 1))]), X)
    assert (found.path, found.layers, found.steps) == ("layer.layer.one", (1, 1), ())


def roots(n, zero):
    """Layers that add a root to their input; one of them has no slope there."""
    less = jnp.ones(n).at[zero].set(0.0)
    return nn.Stack.from_layers([Pair(Root(less[i]), Divide(jnp.ones(()))) for i in range(n)])


@pytest.mark.parametrize("jit", [lambda f: f, pm.filter_jit])
def test_backwards_it_is_the_first_of_the_backward_pass(jit):
    """The cotangent of the input of the root, which is the output of the layer before."""
    found = first_bad(jit(pm.filter_grad(total, argnums=1)))(roots(4, 2), X)
    assert (found.kind, found.path, found.layers) == ("cotangent", "layer", (1,))
    gradient = pm.filter_grad(total, argnums=1)(roots(4, 2), X)
    assert not np.isfinite(gradient).any()
    vjp = jit(lambda model, x: pm.filter_vjp(total, model, x)[1](jnp.ones(())))
    assert first_bad(vjp)(roots(4, 2), X).layers == (1,)


def test_an_argument_is_named_first_and_the_result_last():
    """By path; keyword arguments, too; and values that no Module made."""
    model = divides(1, (0, 0))[0]
    found = first_bad(total)(model.replace(two=Divide(jnp.float32(jnp.nan))), X)
    assert (found.kind, found.path) == ("argument", "model.two.by")
    assert first_bad(total)(model, x=X / 0).path == "x"
    assert first_bad(model.replace(one=Divide(jnp.float32(jnp.inf))))(X).path == "Pair.one.by"
    found = first_bad(lambda model, x: {"y": model(x) / 0})(divides(1)[0], X)
    assert (found.kind, found.path, found.after) == ("result", "result['y']", "<root>")
    assert first_bad(jnp.log)(jnp.zeros(2)).path == "result"
    assert not first_bad(jnp.log)(jnp.ones(2))


def test_a_state_can_be_used_afterwards_and_integers_are_let_through():
    """The call is one more than the user's."""
    model, state = pm.make_with_state(
        lambda: nn.Sequential([Divide(jnp.ones(())), nn.BatchNorm(2)])
    )()

    def run(model, x, n, state):
        out, state = model(x, state)
        return jnp.sum(out) * n, state

    fn = pm.filter_jit(pm.filter_grad(run, has_aux=True))
    assert not first_bad(fn)(model, jnp.eye(2), jnp.asarray(3), state)
    _, after = fn(model, jnp.eye(2), jnp.asarray(3), state)
    assert isinstance(after, pm.State)


def test_it_prints_the_call_with_its_numbers():
    """And the range of what went in."""
    assert str(first_bad(total)(stack(3), X)) == "FirstBad: none in 10 calls of Modules"
    assert str(first_bad(total)(stack(3, (1, 1)), X)) == (
        "FirstBad: the output of layer.two, layer 1; its arguments ranged from 1 to 2; and 5 more"
    )


def test_a_call_inside_a_plain_transform_is_refused():
    """Its values cannot come out, and it would be reported as finite."""
    with pytest.raises(CaptureError, match="one"):
        first_bad(lambda model, x: jax.vmap(model)(x))(divides(1)[0], X)
