"""`embedding`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.nn.functional import embedding
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,)], ids=label)
def test_embedding_is_pytorchs(torch, shape):
    """The same rows as torch.nn.functional.embedding, for numbers of any shape."""
    table = wave(5, 2)
    rows = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5

    found = embedding(jnp.asarray(rows), jnp.asarray(table))

    assert_close(found, torch.nn.functional.embedding(torch.tensor(rows), torch.tensor(table)))


def test_gradient_adds_up_where_a_row_is_read_twice():
    """Each reading of a row contributes to its gradient."""
    table = jnp.ones((3, 1))

    grad = jax.grad(lambda table: embedding(jnp.array([2, 0, 2]), table).sum())(table)

    assert grad.tolist() == [[1], [0], [2]]


def test_a_number_out_of_range_is_not_read_as_another_row():
    """3 and -4 in a table of three rows give nan, also under jit; -1 is the last row."""
    table = jnp.arange(3.0)[:, None]

    rows = jax.jit(embedding)(jnp.array([0, -1, 3, -4]), table)

    assert_close(rows, [[0], [2], [np.nan], [np.nan]])
