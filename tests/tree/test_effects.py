"""Watching states for changes."""

import gc
import weakref

import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.tree.effects import Effects, changed_values, outer_effects, states_in

A, B = pm.StateIndex(jnp.asarray(1.0)), pm.StateIndex(jnp.asarray(2.0))


def test_a_watch_knows_what_came_in():
    """States made inside do not count, however often each was used."""
    state = pm.State((A, B))
    with Effects() as effects:
        new = state.set(A, jnp.asarray(3.0))
        newer = new.set(B, jnp.asarray(4.0))
        part = newer.substate(A)

    assert effects.captured == [state]
    assert set(effects.made) == {id(new), id(newer), id(part)}
    assert set(effects.parts) == {id(part)}
    assert effects.changed == set()


def test_a_part_that_is_used_up_has_advanced():
    """Its successor must be put back into the parent, which is unchanged."""
    state = pm.State((A, B))
    with Effects() as effects:
        state.substate(A).set(A, jnp.asarray(3.0))

    assert effects.changed == {A.marker}
    assert effects.captured == []


def test_what_is_watched_is_not_kept():
    """Transforms inside make States of tracers, which must not outlive their trace."""
    state, other = pm.State((A, B)), pm.State(A)
    with Effects() as effects:
        new = state.set(A, jnp.asarray(3.0))
        made = [weakref.ref(kept) for kept in (new, new.substate(A), new.set(B, jnp.asarray(4.0)))]
        del new
        gc.collect()

        assert [ref() for ref in made] == [None] * 3
        # Where one of them was may be another one by now, which came from outside.
        effects.made[id(other)] = made[0]
        other.set(A, jnp.asarray(3.0))
        # Used up again, by a transform that it went into.
        effects.note_used(state)
    assert [id(state) for state in effects.captured] == [id(state), id(other)]


def test_watches_are_nested_and_end():
    """The innermost watch is notified."""
    with Effects() as outer:
        with Effects() as inner:
            assert outer_effects() is inner
            pm.State(A).set(A, jnp.asarray(3.0))
        assert outer_effects() is outer

    assert outer_effects() is None
    assert outer.made == {}
    assert len(inner.made) == 2


def test_a_watch_ends_with_an_exception():
    """No watch is active afterwards."""
    with pytest.raises(ValueError, match="half-way"), Effects():
        raise ValueError("half-way")

    assert outer_effects() is None


def test_values_have_advanced_if_their_arrays_are_others():
    """By identity: a trace cannot compare values."""
    state = pm.State((A, B))
    same = pm.State((A, B)).substate((A, B))
    before = state.substate((A, B))
    after = before.set(A, jnp.asarray(1.0))

    assert changed_values(before, after) == {A.marker}
    assert changed_values(state, before) == set()
    assert changed_values(before, same.substate(A)) <= {A.marker}


def test_states_are_found_also_when_they_were_used_up():
    """They cannot be flattened, but are still in the tree."""
    state = pm.State(A)
    state.set(A, jnp.asarray(3.0))

    assert states_in({"a": [state], "b": 1}) == [state]
