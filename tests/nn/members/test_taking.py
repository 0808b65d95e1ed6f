"""Members one by one: taken out, and put in."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import StructureError
from pytreemod.nn.members.taking import merged, opened, renewed, taken
from pytreemod.state.tokens import Unnamed, tokens_of


class Drawing(pm.Module):
    """A layer with an array and a stream."""

    by: jax.Array
    stream: pm.RngStream

    def __init__(self, by):
        self.by = jnp.asarray(by)
        self.stream = pm.RngStream()


def filled(by, seed):
    """One whose stream holds its key."""
    layer, state = pm.make_with_state(Drawing)(by)
    return state.seed(jax.random.key(seed)).fill(layer)


def draws(layer):
    """The next key of a layer's stream, as numbers."""
    layer, state = pm.make_with_state(lambda: layer)()
    return jax.random.key_data(state.next_key(layer.stream)[0]).tolist()


def test_each_layer_that_is_taken_draws_its_own():
    """A stream without a key stays without."""
    layers = opened(filled([1.0, 2.0], seed=0), 2)
    first, second = (taken(layers, i) for i in range(2))

    assert [float(one.by) for one in (first, second)] == [1.0, 2.0]
    assert draws(first) != draws(second)
    # None of them is to be joined with the others.
    assert layers.stream.init.outer == ()
    assert opened(Drawing([1.0, 2.0]), 2).stream.init is None


def test_several_layers_keep_one_stream():
    """It has no axis that could be cut."""
    layer = filled([1.0, 2.0, 3.0], seed=0)
    part = taken(layer, slice(1, None))

    assert part.by.tolist() == [2.0, 3.0]
    assert draws(part) == draws(layer)


def test_tokens_are_renewed():
    """A name would say that some State has the value."""
    layer, _ = pm.make_with_state(Drawing)(1.0)
    new = renewed(layer)

    assert layer.stream.marker == "stream"
    assert isinstance(new.stream.marker, Unnamed)
    assert new.by is layer.by


def test_layers_are_merged_into_one():
    """Arrays are stacked, one token stands for all, and the first stream goes on."""
    layers = [filled(1.0, seed=0), filled(2.0, seed=1)]
    one = merged(layers)

    assert one.by.tolist() == [1.0, 2.0]
    assert len(tokens_of(one)) == 1
    assert draws(one) == draws(layers[0])


def test_layers_with_tokens_elsewhere_are_told_apart():
    """By what stacks them, which names the place."""
    with pytest.raises(StructureError, match=r"stream"):
        merged([{"stream": pm.RngStream()}, {"stream": jnp.ones(())}])
