"""How a layer is called: with State, with a key."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import StateError
from pytreemod.module.classes import Module
from pytreemod.nn.calling import (
    ABSENT,
    accepts_key,
    call_layer,
    ignores_key,
    in_scope,
    is_stateful,
    wants_key,
)
from pytreemod.transform.boundary.signatures import positions_of
from tests.nn.catalogue import CATALOGUE


class Plain(Module):
    """Takes no key."""

    def __call__(self, x):
        return x


class Noisy(Module):
    """Takes a key."""

    def __call__(self, x, *, key=None):
        return x, key


class Anything(Module):
    """Takes all there is."""

    def __call__(self, x, **options):
        return x, options["key"]


class Ignoring(Module):
    """Takes a key, and says that it ignores it."""

    @ignores_key
    def __call__(self, x, *, key=None):
        return x


class Overriding(Ignoring):
    """A layer that overrides `__call__`."""

    def __call__(self, x, *, key=None):
        return x, key


class Inheriting(Ignoring):
    """Has not."""


class Jitted(Module):
    """A transformed method as its call."""

    @pm.filter_jit
    def __call__(self, x):
        return x


KEY = jax.random.key(0)
LAYERS = [
    # The layer, whether key= may be passed, whether it makes a difference.
    (Plain(), False, False),
    (Noisy(), True, True),
    (Anything(), True, True),
    (Ignoring(), True, False),
    (Overriding(), True, True),
    (Inheriting(), True, False),
    (Jitted(), False, False),
    (abs, False, False),
    (ft.partial(Noisy(), 1), True, True),
    (Noisy().__call__, True, True),
    (nn.Linear(2, 2, key=KEY), True, False),
    (nn.Dropout(0.5), True, True),
    (nn.Dropout(0), True, False),
    (nn.Dropout(0.5, inference=True), True, False),
    (nn.Dropout(0.5, stream=pm.RngStream()), True, True),
    (nn.Sequential([nn.Identity(), nn.Dropout(0.5)]), True, True),
    (nn.Sequential([nn.Identity(), nn.Lambda(abs)]), True, False),
    (nn.SpectralNorm(nn.Linear(2, 2, key=KEY), "weight", key=KEY), True, False),
    (nn.WeightNorm(nn.Linear(2, 2, key=KEY)), True, False),
    (nn.MultiheadAttention(1, 2, key=KEY), True, False),
    (nn.MultiheadAttention(1, 2, dropout_p=0.5, key=KEY), True, True),
    (nn.MultiheadAttention(1, 2, dropout_p=0.5, inference=True, key=KEY), True, False),
]


@pytest.mark.parametrize(("layer", "accepts", "wants"), LAYERS)
def test_who_takes_a_key(layer, accepts, wants):
    """By signature and by mark; a subclass with its own call does not inherit the mark."""
    assert accepts_key(layer) is accepts
    assert wants_key(layer) is wants


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(2, 2, key=KEY),
        nn.MLP(2, 2, 2, 1, key=KEY),
        nn.Conv1d(1, 1, 1, key=KEY),
        nn.ConvTranspose1d(1, 1, 1, key=KEY),
        nn.MaxPool1d(1),
        nn.AvgPool2d(1),
        nn.AdaptivePool(1, 1, jnp.mean),
        nn.InstanceNorm(2),
        nn.Scale(2),
        nn.LinearGeneral(2, 2, key=KEY),
        nn.Einsum("...i,io->...o", (2, 2), key=KEY),
        nn.LayerNorm(2),
        nn.RMSNorm(2),
        nn.PReLU(),
        nn.GroupNorm(1, 2),
        nn.BatchNorm(2),
        nn.Embedding(2, 2, key=KEY),
        nn.GRUCell(2, 2, key=KEY),
        nn.LSTMCell(2, 2, key=KEY),
        nn.SimpleCell(2, 2, key=KEY),
        nn.RNN(nn.SimpleCell(2, 2, key=KEY)),
        nn.Bidirectional(*2 * [nn.RNN(nn.SimpleCell(2, 2, key=KEY))]),
        nn.RotaryPositionalEmbedding(2),
        nn.Identity(),
        nn.Lambda(jnp.tanh),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_without_randomness_say_so(layer):
    """So that a Sequential of them splits no key."""
    assert not wants_key(layer)


def test_a_layer_gets_what_it_takes():
    """State if it is stateful, a key if it accepts one; the State comes back in any case."""

    class Counting(nn.StatefulLayer):
        count: nn.StateIndex

        def __init__(self):
            self.count = nn.StateIndex(jnp.array(0))

        def __call__(self, x, state):
            return x, state.set(self.count, state.get(self.count) + 1)

    counting, state = nn.make_with_state(Counting)()

    assert call_layer(Plain(), 1, ABSENT, KEY) == (1, ABSENT)
    assert call_layer(Noisy(), 1, state, KEY) == ((1, KEY), state)
    out, after = call_layer(counting, 1, state, KEY)
    assert out == 1
    assert int(after.get(counting.count)) == 1


def test_who_is_stateful():
    """Stateful layers that do not deny it; no other class, whatever it is called with."""
    streaming = nn.Dropout(stream=pm.RngStream())

    assert [is_stateful(x) for x in (nn.BatchNorm(2), streaming, nn.Dropout(), Plain(), abs)] == [
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("result", [jnp.ones((2, 3)), (1, 2), nn.State(()), None])
def test_a_stateful_layer_that_does_not_give_back_its_state_is_refused(result):
    """An array of two rows would otherwise be taken for the output and the State."""

    class Forgetful(nn.StatefulLayer):
        def __call__(self, x, state):
            return result

    text = r"^Forgetful\(x, state\): expected \(out, state\) as the result, got (.|\n)*out, state$"
    with pytest.raises(StateError, match=text):
        nn.Sequential([Forgetful()])(jnp.ones(3), nn.State(()))


SECONDS = {
    "a mask": jnp.ones(3),
    "None": None,
    "a key": jax.random.key(0),
    "NumPy": np.ones(3, bool),
    "a tuple": (),
}


# Attention takes three sequences; its own tests refuse further positional arguments.
ONE_INPUT = [entry for entry in CATALOGUE if not entry.name.startswith("MultiheadAttention")]


@pytest.mark.parametrize("second", SECONDS)
@pytest.mark.parametrize("entry", ONE_INPUT, ids=lambda entry: entry.name)
@pytest.mark.sampled
def test_no_layer_takes_what_is_no_state_in_its_place(entry, second):
    """A mask or a key by position is refused by every layer: none hands it back as a State."""
    layer, _ = entry.build()

    # The layers that never take State are refused by Python itself.
    with pytest.raises(TypeError, match=r"expected a State, got|takes 2 positional arguments but"):
        layer(jnp.asarray(entry.x), SECONDS[second])


def test_what_does_not_say_what_it_takes_gets_no_key():
    """Its signature cannot be read."""

    class Mute:
        __signature__ = 3

        def __call__(self, x):
            return x

    assert not accepts_key(Mute())


ATTENTION = nn.MultiheadAttention(1, 2, key=jax.random.key(0))


def test_a_scope_is_seen_in_a_program_and_is_a_wrapper_as_jaxs():
    """The signature of a call is the layer's own."""

    @in_scope("pm.nn.Named")
    def call(x, *, key=None):
        """Doc."""
        return x * 2

    text = jax.jit(call).lower(1.0).as_text(debug_info=True)
    assert "pm.nn.Named" in text
    assert call.__doc__ == "Doc."
    assert accepts_key(call)
    assert positions_of(call) == (("x",), ("x",))
