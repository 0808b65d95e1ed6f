"""Watching what happens to keepers."""

import gc
import weakref

import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.tree.successions import Watch, advanced, keepers_in, outer_watch

A, B = pm.StateIndex(jnp.asarray(1.0)), pm.StateIndex(jnp.asarray(2.0))


def test_a_watch_knows_what_came_in():
    """Not what was made meanwhile, however often each was used."""
    state = pm.State((A, B))
    with Watch() as watch:
        new = state.set(A, jnp.asarray(3.0))
        newer = new.set(B, jnp.asarray(4.0))
        part = newer.substate(A)

    assert watch.came_in == [state]
    assert set(watch.made) == {id(new), id(newer), id(part)}
    assert set(watch.parts) == {id(part)}
    assert watch.advanced == set()


def test_a_part_that_is_used_up_has_advanced():
    """What follows from it has to be put back into the whole, which stays as it was."""
    state = pm.State((A, B))
    with Watch() as watch:
        state.substate(A).set(A, jnp.asarray(3.0))

    assert watch.advanced == {A.marker}
    assert watch.came_in == []


def test_what_is_watched_is_not_kept():
    """Transforms inside make States of what they trace, which must not outlive its trace."""
    state, other = pm.State((A, B)), pm.State(A)
    with Watch() as watch:
        new = state.set(A, jnp.asarray(3.0))
        made = [weakref.ref(kept) for kept in (new, new.substate(A), new.set(B, jnp.asarray(4.0)))]
        del new
        gc.collect()

        assert [ref() for ref in made] == [None] * 3
        # Where one of them was may be another one by now, which came from outside.
        watch.made[id(other)] = made[0]
        other.set(A, jnp.asarray(3.0))
        # Used up again, by a transform that it went into.
        watch.note_used(state)
    assert [id(keeper) for keeper in watch.came_in] == [id(state), id(other)]


def test_watches_are_nested_and_end():
    """The innermost is told."""
    with Watch() as outer:
        with Watch() as inner:
            assert outer_watch() is inner
            pm.State(A).set(A, jnp.asarray(3.0))
        assert outer_watch() is outer

    assert outer_watch() is None
    assert outer.made == {}
    assert len(inner.made) == 2


def test_a_watch_ends_with_an_exception():
    """Nobody watches afterwards."""
    with pytest.raises(ValueError, match="half-way"), Watch():
        raise ValueError("half-way")

    assert outer_watch() is None


def test_values_have_advanced_if_their_arrays_are_others():
    """By identity: a trace cannot compare values."""
    state = pm.State((A, B))
    same = pm.State((A, B)).substate((A, B))
    before = state.substate((A, B))
    after = before.set(A, jnp.asarray(1.0))

    assert advanced(before, after) == {A.marker}
    assert advanced(state, before) == set()
    assert advanced(before, same.substate(A)) <= {A.marker}


def test_keepers_are_found_also_when_they_were_used_up():
    """They cannot be flattened, but are still in the tree."""
    state = pm.State(A)
    state.set(A, jnp.asarray(3.0))

    assert keepers_in({"a": [state], "b": 1}) == [state]
