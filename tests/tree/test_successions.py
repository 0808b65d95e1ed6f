"""Watching what happens to keepers."""

import jax.numpy as jnp

import pytreemod as pm
from pytreemod.tree.successions import advanced, keepers_in, outer_watch, watching

A, B = pm.StateIndex(jnp.asarray(1.0)), pm.StateIndex(jnp.asarray(2.0))


def test_a_watch_knows_what_came_in():
    """Not what was made meanwhile, however often each was used."""
    state = pm.State((A, B))
    with watching() as watch:
        new = state.set(A, jnp.asarray(3.0))
        newer = new.set(B, jnp.asarray(4.0))
        part = newer.substate(A)

    assert watch.came_in() == [state]
    assert watch.used == [state, new]
    assert watch.parts == [part]
    assert set(watch.made) == {id(new), id(newer), id(part)}


def test_watches_are_nested_and_end():
    """The innermost is told."""
    with watching() as outer:
        with watching() as inner:
            assert outer_watch() is inner
            pm.State(A).set(A, jnp.asarray(3.0))
        assert outer_watch() is outer

    assert outer_watch() is None
    assert outer.used == []
    assert len(inner.used) == 1


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
