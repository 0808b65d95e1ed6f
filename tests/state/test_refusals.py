"""The texts of a State's refusals that no other test of this room spells out."""

import jax.numpy as jnp

import pytreemod as pm
from tests.goldens import refusals


def make(count=7):
    """A State with many entries."""
    return pm.make_with_state(lambda: [pm.StateIndex(jnp.zeros(1)) for _ in range(count)])()


test_refusals = refusals(globals())
