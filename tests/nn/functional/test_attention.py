"""`dot_product_attention` and its two halves."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.nn.functional import attention_weights, dot_product_attention, weighted_values
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


def sequences(*lead, heads=2, q_seq=3, kv_seq=5, size=4, v_size=3):
    """Queries, keys and values."""
    shapes = ((q_seq, heads, size), (kv_seq, heads, size), (kv_seq, heads, v_size))
    return [jnp.asarray(wave(*lead, *shape, phase=i)) for i, shape in enumerate(shapes)]


MASKS = {
    "none": None,
    "one for all": (3, 5),
    "for each head": (2, 3, 5),
    "for each example": (4, 1, 3, 5),
}


def mask_of(shape):
    """One that leaves each query something to see."""
    return None if shape is None else np.asarray(wave(*shape) > -1) | np.eye(3, 5, dtype=bool)


def of_torch(torch, given, mask):
    """The same by PyTorch, which has heads before places; and what to differentiate."""
    tensors = [torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in given]
    query, key, value = (x.transpose(-2, -3) for x in tensors)
    allowed = None if mask is None else torch.tensor(mask)
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed)
    return found.transpose(-2, -3), tensors


@pytest.mark.parametrize("mask", MASKS)
def test_attention_is_pytorchs(torch, mask):
    """Outputs and gradients of scaled_dot_product_attention, in double precision there."""
    given, mask = sequences(4), mask_of(MASKS[mask])
    found, pull = jax.vjp(lambda *given: dot_product_attention(*given, mask), *given)
    expected, tensors = of_torch(torch, given, mask)
    expected.backward(torch.tensor(wave(*found.shape)).double())

    assert_close(found, expected)
    for mine, other in zip(pull(jnp.asarray(wave(*found.shape))), tensors, strict=True):
        assert_close(mine, other.grad)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(jnp.bfloat16, 2e-2), (jnp.float16, 3e-3)], ids=label
)
def test_short_floats_are_computed_in_float32(torch, dtype, tolerance):
    """The result is off by its own rounding, and by that of the weights, also in a long sum."""
    given = [x.astype(dtype) for x in sequences(kv_seq=600)]
    expected, _ = of_torch(torch, given, None)
    found = dot_product_attention(*given)

    assert found.dtype == dtype
    assert_close(found.astype("f4"), expected.detach().float(), rtol=tolerance, atol=tolerance)
    sums = attention_weights(*given[:2]).astype("f4").sum(-1)
    assert_close(sums, np.ones((2, 3)), rtol=2 * tolerance)


def test_large_products_do_not_overflow():
    """In float16 a product of 70000 is none; in float32 it is."""
    query = jnp.full((1, 1, 4), 150, jnp.float16)
    key = jnp.asarray([[[150] * 4], [[0] * 4]], jnp.float16)

    assert attention_weights(query, key).tolist() == [[[1, 0]]]


def test_attention_is_the_formula_of_its_paper():
    """softmax(q k^T / sqrt(d)) v, by NumPy in double precision, one head after the other."""
    given = sequences(2, heads=3)
    query, key, value = (np.asarray(x, "f8") for x in given)
    expected = np.empty((2, 3, 3, 3))
    for i, head in itertools.product(range(2), range(3)):
        products = query[i, :, head] @ key[i, :, head].T / np.sqrt(4)
        powers = np.exp(products - products.max(1, keepdims=True))
        expected[i, :, head] = powers / powers.sum(1, keepdims=True) @ value[i, :, head]

    assert_close(dot_product_attention(*given), expected)


def test_a_query_that_may_see_nothing_sees_all_alike():
    """And nothing is nan, the gradient neither."""
    given, mask = sequences(), jnp.zeros((3, 5), bool)
    found, pull = jax.vjp(lambda *given: dot_product_attention(*given, mask), *given)

    assert_close(found, jnp.broadcast_to(given[2].mean(0), (3, 2, 3)))
    assert all(np.isfinite(grad).all() for grad in pull(found))


def test_what_is_masked_makes_no_difference():
    """To the last bit, in the outputs and in the gradient."""
    query, key, value = sequences()
    mask = jnp.asarray(mask_of((3, 5))).at[:, -1].set(False)

    def total(value, key):
        return dot_product_attention(query, key, value, mask).sum()

    other = jax.grad(total, (0, 1))(value.at[-1].add(9), key.at[-1].add(9))
    for mine, theirs in zip(jax.grad(total, (0, 1))(value, key), other, strict=True):
        assert mine.tolist() == theirs.tolist()
        assert not np.any(mine[-1])


def test_dropout_is_of_the_weights():
    """The function is given what sums to one, and what it gives is summed."""
    query, key, value = sequences()
    shapes = []

    def first_only(weights):
        shapes.append(weights.shape)
        return jnp.zeros_like(weights).at[..., 0].set(1)

    found = dot_product_attention(query, key, value, dropout=first_only)

    assert shapes == [(2, 3, 5)]
    assert_close(found, jnp.broadcast_to(value[0], (3, 2, 3)))
    assert_close(weighted_values(jnp.ones((2, 1, 5)), value)[0], value.sum(0))
