"""`flip_sequences`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytreemod.nn.functional import flip_sequences


@given(lengths=st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_each_sequence_is_turned_around_up_to_its_end(lengths):
    """As with slices; with features, too; twice is the identity."""
    x = np.arange(24).reshape(4, 3, 2)
    expected = x.copy()
    for i, length in enumerate(lengths):
        expected[:length, i] = x[:length, i][::-1]

    flipped = flip_sequences(x, jnp.array(lengths))

    assert flipped.tolist() == expected.tolist()
    assert flip_sequences(flipped, jnp.array(lengths)).tolist() == x.tolist()
    assert flip_sequences(x[..., 0], jnp.array(lengths)).tolist() == expected[..., 0].tolist()


@pytest.mark.parametrize(("length", "meant"), [(9, 3), (-2, 0)])
def test_a_length_beyond_the_ends_is_all_or_nothing(length, meant):
    """No other sequence, and no number of nowhere, comes in."""
    x = jnp.arange(3.0)

    found = jax.jit(flip_sequences)(x, jnp.array(length))

    assert found.tolist() == flip_sequences(x, jnp.array(meant)).tolist()
