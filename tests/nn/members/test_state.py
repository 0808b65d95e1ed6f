"""How a State goes through members."""

import jax
import jax.numpy as jnp

import pytreemod as pm
from pytreemod.nn.members.checks import ENSEMBLE
from pytreemod.nn.members.state import MemberStates
from tests.goldens import refusals


class Counting(pm.Module):
    """Two members as one: a value with an entry for each, and one stream."""

    count: pm.StateIndex
    noise: pm.RngStream

    def __init__(self):
        self.count = pm.StateIndex(jnp.zeros(2))
        self.noise = pm.RngStream()


def made():
    """Members, a token outside of them, and the State of all."""
    (member, other), state = pm.make_with_state(lambda: (Counting(), pm.StateIndex(jnp.ones(3))))()
    return member, other, state.seed(jax.random.key(0))


def test_own_values_are_split_and_others_shared():
    """Returned values are joined to the State of all members."""
    member, other, state = made()
    states = MemberStates(ENSEMBLE, "nets", member, 2, {"other": other}, state)

    assert [leaf.shape for leaf in jax.tree.leaves(states.own)] == [(2,), (2,), (2,)]
    assert [leaf.shape for leaf in jax.tree.leaves(states.shared)] == [(3,)]
    first = states.form.state(jax.tree.map(lambda leaf: leaf[0], states.own), states.shared)
    assert first.get(member.count).shape == ()
    key, first = first.next_key(member.noise)
    out, own, shared = states.form.changed("nets", (key, first.set(member.count, jnp.ones(()))))
    # The continuation of a stream is known in advance.
    assert out is key
    assert [float(value) for value in own] == [1.0]
    assert shared[0] is states.shared[0]
    after = states.after([jnp.ones(2)], states.shared)
    assert after.get(member.count).tolist() == [1.0, 1.0]
    assert after.get(other).shape == (3,)


test_refusals = refusals(globals())
