"""The texts of a State's refusals that no other test of this room spells out."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, StateError, TokenError


def make(count=7):
    """A State with many entries."""
    return pm.make_with_state(lambda: [pm.StateIndex(jnp.zeros(1)) for _ in range(count)])()


def test_a_long_listing_is_cut():
    """Five names, then dots."""
    _, state = make()
    with pytest.raises(TokenError, match=r"\(\[0\], \[1\], \[2\], \[3\], \[4\], \.\.\.\)"):
        state.get(pm.StateIndex(jnp.zeros(1)))


def test_an_old_state_names_the_token_and_what_replaced_it():
    """Which value was asked for, and whose update would be lost."""
    model, state = make()
    state.set(model[2], jnp.ones(1))
    with pytest.raises(
        StateError, match=r"one that set\(\[2\]\) has already replaced\. [^\n]*\n  at \[5\]"
    ):
        state.get(model[5])
    stream = pm.RngStream()
    state = pm.State([stream]).seed(jax.random.key(0))
    state.next_key(stream)
    with pytest.raises(
        StateError, match=r"next_key\(\[0\]\) has already replaced\. .*\n  at \[0\]"
    ):
        state.next_key(stream)


def test_update_names_what_does_not_fit():
    """A substate whose value was changed by a map is refused, by path."""
    model, state = make(2)
    part = jax.tree.map(lambda x: jnp.concatenate([x, x]), state.substate(model[1]))
    with pytest.raises(
        StateError, match=r"^State\.update for \[1\]: expected f32\[1\], as before, got f32\[2\]"
    ):
        state.update(part)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (
            "count",
            r"'count'\.\n  a value is known by its token, not by its name:\n"
            r"      value = state\.get\(model\.path\.to\.token\)$",
        ),
        (
            pm.RngStream(),
            r"a token of another kind: RngStream\.\n  .*\n"
            r"      key, state = state\.next_key\(stream\)$",
        ),
        (
            pm.nn.BatchNorm(2),
            r"a BatchNorm\.\n  a token in it is meant:\n      state\.get\(layer\.state_index\)$",
        ),
        (
            [pm.StateIndex(1)],
            r"a list\.\n  a token in it is meant:\n      state\.get\(layer\[0\]\)$",
        ),
        (3, r"3\.$"),
    ],
    ids=["name", "stream", "layer", "list", "number"],
)
def test_what_is_no_token_is_told_what_is_meant(item, text):
    """A name, a stream, a layer that holds one."""
    _, state = make(1)
    with pytest.raises(
        ArgumentError, match=rf"^State\.get\(item\): expected a StateIndex, got {text}"
    ):
        state.get(item)


def test_a_value_is_no_stream():
    """The other way round."""
    model, state = make(1)
    text = (
        r"^State\.next_key\(item\): expected an RngStream, got a token of another kind: "
        r"StateIndex\.\n  .*\n      value = state\.get\(token\)$"
    )
    with pytest.raises(ArgumentError, match=text):
        state.next_key(model[0])
