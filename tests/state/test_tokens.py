"""Tokens."""

import copy

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, StateError
from tests.helpers.comparing import assert_same
from tests.helpers.trees import Holder, affine, ramp


def test_a_token_holds_its_initial_value_as_data():
    """Until a State has it, the value is in the tree, so that it can be traced and mapped."""
    token = pm.StateIndex({"a": ramp(2), "m": affine()})

    assert len(jax.tree.leaves(token)) == 3
    assert_same(token.init["a"], ramp(2))
    assert_same(pm.filter_jit(lambda t: t.init["a"] * 2)(token), ramp(2) * 2)


def test_two_tokens_are_two_places():
    """Until they have names, tokens are distinguished by identity, also with equal values."""
    first, second = pm.StateIndex(ramp(1)), pm.StateIndex(ramp(1))
    state = pm.State([first, second])
    state = state.set(first, ramp(1, start=5.0))

    assert first != second
    assert_same(state.get(first), ramp(1, start=5.0))
    assert_same(state.get(second), ramp(1))


def test_a_token_keeps_its_identity_through_transforms():
    """After a transform, a token refers to the same value."""
    token = pm.StateIndex(ramp(1))
    state = pm.State(token)
    for same in (
        jax.tree.map(lambda x: x, token),
        pm.filter_jit(lambda t: t)(token),
        pm.tree_at(lambda t: t.init, token, None),
        copy.copy(token),
        token.replace(init=None),
    ):
        assert_same(state.get(same), ramp(1))


def test_none_is_a_value():
    """It is distinguished from a removed initial value, also after copies and transforms."""
    token = pm.StateIndex(None)
    for same in (token, copy.deepcopy(token), jax.tree.map(jnp.copy, token)):
        state = pm.State(same)
        assert state.get(same) is None
        assert state.set(same, None).get(same) is None


def test_named_tokens_are_configuration_alone():
    """After make_with_state a token has no leaf, and its name is its path."""
    model, _ = pm.make_with_state(lambda: Holder([pm.StateIndex(ramp(1))]))()

    assert jax.tree.leaves(model) == []
    assert model.content[0].marker == "content[0]"
    assert model.content[0].init is None


@pytest.mark.parametrize("again", [lambda token: token, copy.deepcopy])
def test_one_token_in_two_places_is_for_make_with_state(again):
    """State(model) leaves the model as it is, so that the two could not be told apart."""
    token = pm.StateIndex(ramp(1))
    with pytest.raises(StateError, match=r"\['a'\]\.content"):
        pm.State({"a": Holder(token), "b": [again(token)]})


def test_a_function_is_no_initial_value():
    """As in Equinox, where it once was what makes one."""
    with pytest.raises(ArgumentError, match="function"):
        pm.StateIndex(lambda: jnp.zeros(2))
