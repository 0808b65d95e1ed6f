"""Which State follows from which."""

import gc
from concurrent import futures

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import StateError
from pytreemod.state.history import History


def make():
    """A token and its State."""
    return pm.make_with_state(lambda: pm.StateIndex(jnp.zeros(())))()


def test_what_a_substate_took_is_known_to_whom_it_branched_from():
    """And to no other State."""
    whole, values = History(), {"a": 1}
    part = whole.branch(values)

    assert whole.taken_by(part) is values
    assert part.taken_by(whole) is None
    assert whole.taken_by(None) is None
    assert whole.taken_by(whole) is None


def test_states_that_follow_from_one_another_share_their_history():
    """From the first substate on; the result of a transform starts another one."""
    token, state = make()
    part = state.substate(token)
    for old in (state, part):
        history = old._history
        new = old.set(token, jnp.ones(()))
        assert new._history is history
        assert new.restored()._history is history
        assert jax.jit(lambda s: s)(new)._history is None
        assert pm.filter_jit(lambda s: s)(new)._history is None


def test_what_substates_took_is_not_kept():
    """Ten thousand of them leave nothing behind, whichever of both lives on."""
    token, state = make()
    part = state
    for _ in range(10_000):
        state.substate(token)
        part = part.substate(token)
    gc.collect()

    assert sum(type(thing) is History for thing in gc.get_objects()) < 20


def test_threads_may_take_substates_of_one_state():
    """Each is recognized, also if all are the first."""
    with futures.ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            token, state = make()
            parts = list(pool.map(state.substate, [token] * 8))
            state = state.set(token, jnp.ones(()))
            for part in parts:
                with pytest.raises(StateError, match=r"got an unchanged one"):
                    state.update(part)
