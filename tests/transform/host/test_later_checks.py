"""Checks that no call waits for."""

import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import CheckError
from tests.helpers.comparing import assert_close
from tests.helpers.trees import ramp

GOOD, BAD = ramp(3, start=0.0), ramp(3, start=-2.0)


def test_a_call_returns_and_the_next_one_raises():
    """Instead of running; a raised failure is forgotten, and what is left can be asked for."""
    f = pm.filter_jit(lambda x: jnp.sqrt(pm.error_if(x, x < 0, "x is negative")), checks="later")
    assert_close(f(GOOD), jnp.sqrt(GOOD))
    f(BAD).block_until_ready()

    with pytest.raises(CheckError, match="x is negative"):
        f(GOOD)
    assert_close(f(GOOD), jnp.sqrt(GOOD))
    f(BAD).block_until_ready()
    with pytest.raises(CheckError, match="x is negative"):
        pm.debug.raise_errors()
    assert pm.debug.raise_errors() is None
