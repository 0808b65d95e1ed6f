"""`State` and `StateIndex`: values that go in and come out, and that are used once."""

import copy

import jax
import jax.numpy as jnp

from tests.parity.helpers import caught, ramp, same_under_both_imports


def make_counter(eqx):
    """The class of a layer that counts its calls and remembers its last input."""

    class Counter(eqx.Module):
        count: eqx.nn.StateIndex
        last: eqx.nn.StateIndex
        weight: jax.Array

        def __init__(self, size=2, start=0):
            self.count = eqx.nn.StateIndex(jnp.int32(start))
            self.last = eqx.nn.StateIndex({"x": jnp.zeros(size), "seen": jnp.array(False)})
            self.weight = ramp(size)

        def __call__(self, x, state):
            n = state.get(self.count)
            state = state.set(self.count, n + 1)
            state = state.set(self.last, {"x": x, "seen": jnp.array(True)})
            return self.weight * x + n.astype(jnp.float32), state

    return Counter


def make_pair(eqx):
    """The class of a Module that holds two of the layers above."""
    counter_class = make_counter(eqx)

    class Two(eqx.Module):
        first: counter_class
        second: counter_class

        def __init__(self):
            self.first = counter_class(2, start=1)
            self.second = counter_class(3, start=10)

        def __call__(self, x, state):
            y, state = self.first(x, state)
            y, state = self.first(y, state)
            z, state = self.second(jnp.ones(3), state)
            return (y, z), state

    return Two


@same_under_both_imports
def test_a_layer_in_two_places_is_two(eqx):
    """Each path has a separate value, for the same object as for a copy."""
    layer = make_counter(eqx)()
    copies = [layer, layer, copy.deepcopy(layer), jax.tree.map(jnp.copy, layer)]
    layers, state = eqx.nn.make_with_state(lambda: copies)()
    for number, layer in enumerate(layers):
        for _ in range(number):
            _, state = layer(ramp(2), state)
    return [state.get(layer.count) for layer in layers]


@same_under_both_imports
def test_substate_and_update(eqx):
    """A part of the State goes to a part of the model, and comes back."""
    model, state = eqx.nn.make_with_state(make_pair(eqx))()
    part = state.substate(model.first)
    _, part = model.first(ramp(2), part)
    missing = caught(lambda: part.get(model.second.count))
    state = state.update(part)
    return state.get(model.first.count), state.get(model.second.count), missing


@same_under_both_imports
def test_an_ensemble_with_state(eqx):
    """Mapping `make_with_state` gives stacked models with stacked State."""
    counter_class = make_counter(eqx)

    @eqx.filter_vmap
    def build(start):
        return eqx.nn.make_with_state(counter_class)(2, start)

    layers, states = build(jnp.arange(3, dtype=jnp.int32))
    y, states = eqx.filter_vmap(lambda layer, x, s: layer(x, s))(layers, ramp(3, 2), states)
    return y, states.get(layers.count)
