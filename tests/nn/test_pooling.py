"""The pooling layers, with windows of a given size and of a given number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave

HALF = [jnp.bfloat16, jnp.float16]


@pytest.mark.parametrize(
    ("size", "window", "stride", "padding", "expected"),
    [
        (7, 2, 2, 0, [2, 4, 6, 7]),
        (6, 2, 2, 0, [2, 4, 6]),
        (4, 2, 1, 0, [2, 3, 4]),
        (7, 2, 2, 1, [1, 3, 5, 7]),
        (2, 3, 2, 0, [2]),
        (5, 3, 4, 1, [2, 5]),
    ],
)
def test_use_ceil_counts_what_overhangs(size, window, stride, padding, expected):
    """As PyTorch: a last window that is not whole, but none that starts beyond the input."""
    layer = nn.MaxPool1d(window, stride, padding, use_ceil=True)

    assert layer(jnp.arange(1.0, size + 1)[None]).tolist() == [expected]


def test_padding_and_overhang_count_as_zeros_in_an_average():
    """Also if a window is larger than the input; a maximum never takes the padding."""
    x = jnp.array([[-1.0, -2.0, -3.0]])

    assert_close(nn.AvgPool1d(2, 2, use_ceil=True)(x), [[-1.5, -1.5]])
    assert_close(nn.AvgPool1d(4, 4, use_ceil=True)(x), [[-1.5]])
    assert_close(nn.AvgPool1d(2, padding=[(1, 0)])(x), [[-0.5, -1.5, -2.5]])
    assert_close(nn.MaxPool1d(2, padding=[(1, 0)])(x), [[-1.0, -1.0, -2.0]])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.bfloat16, jnp.bool_], ids=label)
def test_a_maximum_and_a_minimum_keep_the_dtype(dtype):
    """Padding is the smallest, or the largest, value of whatever dtype x has."""
    greatest, least = nn.MaxPool1d(2, 2, 1), nn.Pool(np.inf, jax.lax.min, 1, 2, 2, 1)

    for layer, x, expected in [(greatest, [1, 0, 1], [1, 1]), (least, [1, 1, 0], [1, 0])]:
        found = layer(jnp.array([x]).astype(dtype))
        assert found.dtype == dtype
        assert found.astype(int).tolist() == [expected]


@pytest.mark.parametrize("dtype", HALF, ids=label)
def test_sums_of_half_precision_are_computed_in_single(dtype):
    """A long sum neither stops growing nor overflows, also in between; it is rounded once."""
    x = jnp.asarray(10 + wave(1, 32, 32)).astype(dtype)
    ones, twos = jnp.ones((1, 1024), dtype), jnp.array([[2.0] * 32 + [0.5] * 32], dtype)

    eps = float(jnp.finfo(dtype).eps)
    found = nn.AvgPool2d(30)(x)
    assert found.dtype == dtype
    expected = nn.AvgPool2d(30)(x.astype("f4"))
    assert_close(found.astype("f4"), expected, rtol=0.51 * eps, atol=0)
    assert nn.AvgPool2d(64)(jnp.full((1, 64, 64), 30, dtype)).tolist() == [[[30]]]
    assert nn.Pool(0, jax.lax.add, 1, 1024)(ones).tolist() == [[1024]]
    assert nn.Pool(1, jax.lax.mul, 1, 64)(twos).tolist() == [[1]]


@pytest.mark.parametrize("dtype", HALF, ids=label)
@pytest.mark.parametrize(("make", "expected"), [(nn.MaxPool1d, 1500), (nn.AvgPool1d, 1500 / 2000)])
def test_gradients_of_half_precision_are_added_up_in_single(make, expected, dtype):
    """An entry in 1500 windows gets the sum of their gradients."""
    x = jnp.zeros((1, 3499), dtype).at[0, 1499].set(1)

    def loss(x):
        return jnp.sum(make(2000)(x)[:, :1500].astype(jnp.float32))

    grad = jax.jit(jax.grad(loss))(x)

    assert grad.dtype == dtype
    assert_close(grad[0, 1499].astype(float), expected, rtol=float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize(
    ("dtype", "value"), [(jnp.int8, 100), (jnp.uint8, 255), (jnp.bool_, True), (complex, 2 + 3j)]
)
def test_the_mean_of_what_is_no_float(dtype, value):
    """Integers have a mean that is a float: their sum would not fit; complex numbers stay so."""
    found = nn.AvgPool2d(4)(jnp.full((1, 4, 4), value, dtype))

    assert jnp.issubdtype(found.dtype, jnp.inexact)
    assert found.tolist() == [[[value]]]


def test_given_windows_of_half_precision_are_reduced_in_single():
    """Rounded once, not after each axis; an index and a mean of integers keep their dtype."""
    x = jnp.asarray(wave(1, 8, 6), jnp.bfloat16)

    found = nn.AdaptiveAvgPool2d(1)(x)

    assert found.dtype == jnp.bfloat16
    assert float(found[0, 0, 0]) == float(jnp.mean(x.astype("f4")).astype(jnp.bfloat16))
    assert nn.AdaptivePool(2, 1, jnp.argmax)(x[0]).dtype == jnp.int32
    assert nn.AdaptiveAvgPool1d(2)(jnp.arange(4)[None]).tolist() == [[0.5, 2.5]]
