"""`Embedding`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from tests.goldens import refusals
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("rows", [1, np.int32(1), jnp.array([[0, 4], [4, 1]])], ids=label)
def test_embedding_reads_rows(key, rows):
    """The rows with these numbers, for a number or an array of any shape."""
    layer = nn.Embedding(5, 3, key=key)

    assert_close(layer(rows), np.asarray(layer.weight)[np.asarray(rows)])


def test_initial_values_are_standard_normal(key):
    """Mean zero, variance one."""
    weight = nn.Embedding(100, 50, key=key).weight

    assert abs(float(weight.mean())) < 0.05
    assert abs(float(weight.std()) - 1) < 0.05


def test_weight_init_and_dtype(key):
    """An initializer is called with (num_embeddings, embedding_size) and the dtype."""
    ones = jax.nn.initializers.ones
    layer = nn.Embedding(5, 3, dtype=jnp.bfloat16, key=key, weight_init=ones)

    assert layer.weight.dtype == jnp.bfloat16
    assert layer.weight.tolist() == [[1] * 3] * 5


def test_a_table_can_be_given():
    """Sizes are then taken from it, and no key is needed."""
    layer = nn.Embedding(weight=wave(4, 2))

    assert (layer.num_embeddings, layer.embedding_size) == (4, 2)
    assert isinstance(layer.weight, jax.Array)
    assert_close(nn.Embedding(4, 2, wave(4, 2))(3), wave(4, 2)[3])


@pytest.mark.parametrize(
    "x",
    [
        jnp.array([-1, 44], jnp.int8),
        np.array([-1, 44], np.int8),
        np.array([-1, 44]),
        jnp.array([299, 44], jnp.uint16),
    ],
    ids=["int8", "NumPy's int8", "NumPy's int64", "uint16"],
)
def test_a_row_number_means_the_same_in_every_dtype(x):
    """-1 is the last of 300 rows, also as an int8; 2**32 + 1 is out of range."""
    layer = nn.Embedding(weight=jnp.arange(300.0)[:, None])

    assert layer(x).tolist() == jax.jit(lambda x: layer(x))(x).tolist() == [[299], [44]]
    assert np.isnan(layer(np.array([2**32 + 1]))).all()
    assert np.isnan(layer(np.int64(-(2**32) - 1))).all()


def test_attend_is_the_product_with_each_row(key):
    """Logits of tied weights: any number of axes before, a last one of that size."""
    layer, x = nn.Embedding(5, 3, key=key), wave(2, 4, 3)

    assert_close(layer.attend(jnp.asarray(x)), x @ np.asarray(layer.weight).T)


test_refusals = refusals(globals())
