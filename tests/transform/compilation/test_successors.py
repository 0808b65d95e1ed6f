"""Callers of a jitted function who drop the new State: a warning, or for a net an error."""

import weakref

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import LostUpdateWarning, StateError

X = jnp.arange(12.0).reshape(4, 3)


class Counter(pm.Module):
    """Counts its calls, unless a flag says otherwise."""

    count: pm.StateIndex
    inference: bool = False

    def __init__(self):
        self.count = pm.StateIndex(jnp.asarray(0.0))

    def __call__(self, x, state):
        """One more."""
        n = state.get(self.count)
        return x + n, state if self.inference else state.set(self.count, n + 1)


@pytest.fixture
def counter():
    """A model and its State."""
    return pm.make_with_state(Counter)()


@pm.filter_jit
def call(model, state, x):
    """A typical step."""
    return model(x, state)


@pm.filter_jit
def through_transforms(model, state, x):
    """These transforms do not use up the State of this trace."""
    state = jax.jit(lambda state: model(0.0, state)[1])(state)
    return pm.filter_vmap(model, in_axes=(0, None), out_axes=(0, None))(x, state)


@pytest.mark.parametrize("step", [call, through_transforms], ids=["alone", "transforms"])
def test_a_loop_that_forgets_the_state_is_told_once(step, counter):
    """In its second step, with the State's path and the tokens; then it is known."""
    model, state = counter
    _ = step(model, state, X)
    with pytest.warns(LostUpdateWarning, match=r"at state") as told:
        _ = step(model, state, X)

    assert told[0].filename == __file__
    for _ in range(3):
        _ = step(model, state, X)


def test_the_arrays_that_came_out_are_not_held(counter):
    """An old State knows that it has a successor, but does not hold it."""
    model, state = counter
    _, new = call(model, state, X)
    array = weakref.ref(new.get(model.count))
    del new

    assert array() is None


@pm.filter_jit
def step(net, x):
    """The step of a net."""
    return net(x)


def test_a_net_whose_successor_came_out_refuses():
    """New, and as it came from a call, which has not even built it."""
    new = pm.stateful(Counter())
    _, second = step(new, X)
    _, third = step(second, X)
    for old in (new, second):
        for use in (lambda old: step(old, X), jax.tree.leaves):
            with pytest.raises(StateError, match=r"old|replaced|newest"):
                use(old)
        with pytest.raises(StateError, match="net"):
            old(X)

    assert float(third.state.get(third.model.count)) == 2
    assert float(second.restored().state.get(second.model.count)) == 1


def test_a_net_that_is_the_function_refuses():
    """Its arrays are arguments, too."""
    jitted = pm.filter_jit(pm.stateful(Counter()))
    jitted(X)
    with pytest.raises(StateError, match=r"old|replaced|newest"):
        jitted(X)


def test_a_net_that_is_only_changed_is_not_replaced():
    """A net that was not called has no update to lose."""
    scaled = pm.filter_jit(lambda net: jax.tree.map(lambda x: x * 2, net))
    net = pm.stateful(Counter())

    assert scaled(net) == scaled(net)

    @pm.filter_jit
    def step(net, other, x):
        return net(x), jax.tree.map(lambda x: x * 2, other)

    other = pm.stateful(nn.BatchNorm(3))
    step(net, other, X)
    other(X)


def test_a_net_at_rest_is_called_again_and_again():
    """Nothing of it changes."""
    net = nn.inference_mode(pm.stateful(nn.BatchNorm(3)))
    for _ in range(3):
        step(net, X)
    net(X)
