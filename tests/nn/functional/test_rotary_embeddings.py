"""`rotary_embedding`, and the angles that it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.nn.functional import rotary_embedding, rotary_tables, rotate_half
from tests.nn.numbers_to_compare import assert_close, wave


def by_complex_numbers(x, theta):
    """Each pair as a complex number, multiplied by one of absolute value one."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    frequencies = theta ** (-np.arange(half) / half)
    turned = pairs * np.exp(1j * np.outer(np.arange(x.shape[-2]), frequencies))
    return np.concatenate([turned.real, turned.imag], -1)


@pytest.mark.parametrize("theta", [10_000.0, 50.0])
def test_pairs_are_turned(theta):
    """A product of complex numbers, by NumPy in double precision; with batch axes."""
    x = wave(2, 7, 6)
    found = rotary_embedding(jnp.asarray(x), *rotary_tables(6, 7, theta))

    assert_close(found, by_complex_numbers(x.astype("f8"), theta))


def test_the_gradient_is_turned_back():
    """The transpose of a rotation is its inverse."""
    x, tables = jnp.asarray(wave(5, 4)), rotary_tables(4, 5)
    turned, pull = jax.vjp(lambda x: rotary_embedding(x, *tables), x)

    assert_close(pull(turned)[0], x)


def test_products_depend_on_the_distance_alone():
    """Of a query three positions after a key, wherever they are."""
    vector = jnp.asarray(wave(8))
    turned = rotary_embedding(jnp.broadcast_to(vector, (9, 8)), *rotary_tables(8, 9))
    products = [float(turned[i] @ turned[i + 3]) for i in range(6)]

    assert_close(products, [products[0]] * 6)


@pytest.mark.parametrize("kept", [jnp.bfloat16, jnp.float32])
def test_short_floats(kept):
    """Angles are computed before they are rounded; the result has the dtype of x."""
    x = jnp.asarray(wave(300, 4), jnp.bfloat16)
    cos, sin = rotary_tables(4, 300, dtype=kept)
    found = rotary_embedding(x, cos, sin)
    expected = by_complex_numbers(np.asarray(x, "f8"), 10_000.0)

    assert (cos.dtype, found.dtype) == (kept, jnp.bfloat16)
    assert_close(found.astype("f4"), expected, rtol=2e-2, atol=2e-2)


def test_a_base_may_be_an_array():
    """One that is learnt."""
    slope = jax.grad(lambda theta: rotary_tables(4, 3, theta)[1].sum())(100.0)
    step = (rotary_tables(4, 3, 101.0)[1] - rotary_tables(4, 3, 99.0)[1]).sum() / 2

    assert_close(slope, step, rtol=1e-3)


def test_halves_are_exchanged():
    """Twice is a change of sign."""
    x = jnp.asarray(wave(3, 4))

    assert rotate_half(rotate_half(x)).tolist() == (-x).tolist()
