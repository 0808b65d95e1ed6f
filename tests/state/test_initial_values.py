"""The initial values of a State."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import StateError
from pytreemod.state.initial_values import first_values, paths_by_marker
from pytreemod.state.tokens import tokens_of


def begun(tree):
    """The first values of the tokens in a tree, by markers that are counted."""
    found = tokens_of(tree)
    return first_values(found, range(len(found)))


def test_values_come_with_the_names_and_classes_of_their_tokens():
    """In the order of the tree."""
    values, register = begun({"b": pm.RngStream(), "a": [pm.StateIndex(jnp.ones(2))]})

    assert [tuple(row) for row in register] == [
        (0, "['a'][0]", pm.StateIndex, (1,)),
        (1, "['b']", pm.RngStream, ()),
    ]
    assert values[0].shape == (2,)
    assert values[1] == (None, None, ())


def test_none_is_a_value():
    """And no sign of one that is gone."""
    values, _ = begun([pm.StateIndex(None)])

    assert values == {0: None}


def test_a_value_that_is_in_a_state_already_is_refused():
    """With the path of its token."""
    model, _ = pm.make_with_state(lambda: {"n": pm.StateIndex(jnp.zeros(()))})()

    with pytest.raises(StateError, match=r"a token whose value was moved(.|\n)*\['n'\]"):
        begun(model)


def test_one_array_in_two_places_is_copied():
    """It could not be donated otherwise; an array at one path is not copied."""
    shared, own = jnp.ones(2), jnp.ones(2)
    values, _ = begun([pm.StateIndex((shared, own)), pm.StateIndex(shared)])

    assert values[0][0] is shared
    assert values[0][1] is own
    assert values[1] is not shared
    assert np.array_equal(values[1], shared)


def test_a_stream_in_two_places_begins_without_a_key_in_the_second():
    """For both would draw the same numbers; that of another seed keeps its key."""
    make = pm.make_with_state(pm.RngStream)
    model, state = make()
    filled = state.seed(jax.random.key(0)).fill(model)
    other_model, other_state = make()
    other = other_state.seed(jax.random.key(1)).fill(other_model)
    values, _ = begun([filled, filled, other])

    assert [values[i].key is None for i in range(3)] == [False, True, False]


def test_spots_are_all_places_of_a_marker():
    """A token may stand in several."""
    token = pm.StateIndex(jnp.ones(2))

    assert paths_by_marker(tokens_of({"a": token, "b": [token]})) == {
        token.marker: ["['a']", "['b'][0]"]
    }
