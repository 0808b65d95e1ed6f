"""The result of a call notes whether it is used; the rest is in `compilation.successors`."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import StateError
from pytreemod.tree.deliveries import (
    ReplacingCall,
    StatePath,
    deliver,
    passed,
    state_path_to,
    use_up_in,
)


class Holder(pm.Module):
    """Two States in one record."""

    a: pm.State
    b: pm.State


A, B = (StatePath((), (jax.tree_util.GetAttrKey(name),)) for name in "ab")


def made():
    """As it comes out of a call: pending."""
    states = (pm.State(pm.StateIndex(jnp.zeros(2))) for _ in range(2))
    return pm.filter_jit(lambda holder: holder)(Holder(*states))


def test_what_is_in_one_record_is_taken_with_it():
    """It is read as a whole."""
    holder = made()
    one, two = deliver(holder, [A], "step"), deliver(holder, [B], "step")

    assert one == ["step"]
    assert one is two
    assert holder.a is holder.a
    assert one == []


def test_what_was_read_already_counts_as_taken():
    """A second read would not be noticed."""
    holder = jax.tree.map(lambda x: x, made())

    assert deliver(holder, [A], "step") == []
    assert passed(holder, A) is passed(holder, A)


def test_states_of_a_pending_record_are_used_up_one_by_one():
    """The record is not built for it, and its other States remain usable."""
    holder = made()
    use_up_in(holder, A, ReplacingCall("step"))
    assert passed(holder, B) is passed(holder, B)

    assert repr(holder.a) == "State(<used up by step>)"
    assert holder.b.__usable__()
    with pytest.raises(StateError, match="step has already replaced"):
        use_up_in(holder, A, ReplacingCall("another"))
    use_up_in(holder, B, ReplacingCall("another"))
    assert [holder.a._user(), holder.b._user()] == ["step", "another"]


def test_only_what_python_can_enter_is_followed():
    """A dict's key is not an index of a list."""
    state, key, index = made().a, jax.tree_util.DictKey("a"), jax.tree_util.SequenceKey(0)

    assert state_path_to({"a": [state]}, (key, index), state) == StatePath(("a", 0), ())
    assert state_path_to((made(), state), (index, *A.rest), state) is None
    assert state_path_to(nn.Identity(), (key,), state) is None
