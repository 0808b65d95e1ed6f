"""In what form a State holds a value."""

import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.errors import StateError
from pytreemod.state.forms import as_array, check_form, is_strong


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


def test_a_new_value_keeps_the_form():
    """Structure first; then each leaf, by its path."""
    old = {"count": jnp.zeros(()), "means": [jnp.ones(2), jnp.ones(3)]}
    check_form("State.set for", "norm", old, {"count": jnp.ones(()), "means": old["means"]})

    with pytest.raises(StateError, match=r"^State\.set for norm: expected a value of structure"):
        check_form("State.set for", "norm", old, {"count": jnp.zeros(())})
    other = {**old, "means": [jnp.ones(2), jnp.ones(4)]}
    with pytest.raises(
        StateError, match=r"norm\['means'\]\[1\]: expected f32\[3\], as before, got"
    ):
        check_form("State.set for", "norm", old, other)
