"""In what form a State holds a value."""

import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.errors import StateError
from pytreemod.state.forms import as_array, check_form, check_made_ranks, is_strong, ranks_of


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


def test_a_value_has_no_more_axes_than_when_it_was_made():
    """Leaf by leaf: fewer on one do not make up for more on another. What was taken out is none."""
    old = {"count": jnp.zeros(()), "means": [np.ones(2), "text"]}
    ranks = ranks_of(old)
    assert (ranks, ranks_of(jnp.ones((2, 3))), ranks_of(None)) == ((0, 1, 0), (2,), ())
    for fitting in (
        old,
        {**old, "means": [jnp.ones(()), 1]},
        {"count": None, "means": jnp.ones(5)},
    ):
        check_made_ranks("State.set", "norm", ranks, fitting)

    other = {"count": jnp.zeros(3), "means": [jnp.ones(()), "text"]}
    with pytest.raises(
        StateError,
        match=r"(?s)^State\.set: .* got more.*at norm\['count'\]: f32\[3\], made with 0\n",
    ):
        check_made_ranks("State.set", "norm", ranks, other)
