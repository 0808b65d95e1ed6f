"""The forms of values in a State."""

import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.state.forms import as_array, check_made_ranks, is_strong, ranks_of
from tests.goldens import refusals


@pytest.mark.parametrize("leaf", [1, 1.5, True, np.float32(2), np.ones(2, np.int8)])
def test_numbers_become_arrays_with_a_dtype_of_their_own(leaf):
    """A weak one would change in the first step."""
    array = as_array(leaf)

    assert not is_strong(leaf)
    assert is_strong(array)
    assert array.dtype == jnp.asarray(leaf).dtype


def test_what_is_no_number_stays_as_it_is():
    """And so does an array whose dtype is its own."""
    array = jnp.ones(2)

    assert as_array("a") == "a"
    assert as_array(array) is array


def test_a_value_has_no_more_axes_than_when_it_was_made():
    """Leaf by leaf: fewer axes on one do not allow more on another. A removed value has none."""
    old = {"count": jnp.zeros(()), "means": [np.ones(2), "text"]}
    ranks = ranks_of(old)
    assert (ranks, ranks_of(jnp.ones((2, 3))), ranks_of(None)) == ((0, 1, 0), (2,), ())
    for fitting in (
        old,
        {**old, "means": [jnp.ones(()), 1]},
        {"count": None, "means": jnp.ones(5)},
    ):
        check_made_ranks("State.set", "norm", ranks, fitting)


test_refusals = refusals(globals())
