"""How a layer is called: with State, with a key, in a named scope."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import StateError
from tests.nn.catalogue import CATALOGUE


@pytest.mark.parametrize("result", [jnp.ones((2, 3)), (1, 2), nn.State(())], ids=type)
def test_a_stateful_layer_that_does_not_give_back_its_state_is_refused(result):
    """An array of two rows would otherwise be taken for the output and the State."""

    class Forgetful(nn.StatefulLayer):
        def __call__(self, x, state):
            return result

    with pytest.raises(StateError, match="Forgetful"):
        nn.Sequential([Forgetful()])(jnp.ones(3), nn.State(()))


def one_input_of_each_class():
    """The first entry of each class; attention takes three sequences by position."""
    met = {"MultiheadAttention"}
    for entry in CATALOGUE:
        kind = entry.name.split()[0].rstrip("123d")
        if kind not in met:
            met.add(kind)
            yield pytest.param(entry, id=entry.name)


@pytest.mark.parametrize("entry", [*one_input_of_each_class()])
def test_no_layer_takes_what_is_no_state_in_its_place(entry):
    """A mask or a key by position is refused: none hands it back as if it were a State."""
    layer, _ = entry.build()

    for second in (jnp.ones(3), None, jax.random.key(0)):
        # The layers that never take State are refused by Python itself.
        with pytest.raises(TypeError, match=r"State|positional"):
            layer(jnp.asarray(entry.x), second)


def test_who_is_stateful():
    """Stateful layers that do not deny it; no other class, whatever it is called with."""
    assert nn.BatchNorm(2).is_stateful()
    assert nn.Dropout(stream=pm.RngStream()).is_stateful()
    assert not nn.Dropout().is_stateful()


def test_a_layer_is_seen_in_a_program_by_its_name(key):
    """In a profile, and in the text of the program."""
    layer = nn.Linear(2, 2, key=key)
    text = jax.jit(lambda x: layer(x)).lower(jnp.ones(2)).as_text(debug_info=True)

    assert "pm.nn.Linear" in text
