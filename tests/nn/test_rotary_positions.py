"""`RotaryPositionalEmbedding`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from tests.goldens import refusals
from tests.nn.numbers_to_compare import assert_close, wave


def test_nothing_is_kept_between_calls():
    """Several bases, sizes and lengths in one program, in any order, as each of them alone."""
    x = jnp.asarray(wave(5, 8))
    layers = [nn.RotaryPositionalEmbedding(8, theta) for theta in (10.0, 1e4, 10.0)]
    inputs = [x[:2], x, x]
    together = jax.jit(lambda xs: [f(x) for f, x in zip(layers, xs, strict=True)])(inputs)

    for layer, x, found in zip(layers, inputs, together, strict=True):
        assert_close(found, nn.functional.rotary_embedding(x, *layer_tables(layer, len(x))))
    assert jnp.abs(together[1] - together[2]).max() > 0.1
    assert_close(together[0], together[2][:2])


def layer_tables(layer, length):
    """The angles by the static method."""
    return layer.precompute_freqs_cis(8, length, layer.theta, layer.dtype)


def test_heads_are_turned_under_vmap():
    """As `process_heads` does it, over the axis of heads."""
    layer, heads = nn.RotaryPositionalEmbedding(4), jnp.asarray(wave(3, 2, 4))
    turned = jax.vmap(layer, in_axes=1, out_axes=1)(heads)

    assert_close(turned[:, 1], layer(heads[:, 1]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_dtype_of_the_input_comes_back(dtype):
    """Whatever the angles have, also where promotion is strict."""
    layer = nn.RotaryPositionalEmbedding(4, dtype=dtype)

    assert layer.dtype == dtype
    assert [layer(jnp.ones((2, 4), d)).dtype for d in (jnp.float16, jnp.float32)] == [
        jnp.float16,
        jnp.float32,
    ]


def of_pairs(x, positions, theta=10_000.0, *, interleaved):
    """Each pair as a complex number, times exp(i angle), by NumPy in double precision."""
    x, half = np.asarray(x, "f8"), x.shape[-1] // 2
    angles = np.asarray(positions, "f8")[..., None] / theta ** (np.arange(half) / half)
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = (first + 1j * second) * np.exp(1j * angles)
    if interleaved:
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)
    return np.concatenate([turned.real, turned.imag], -1)


@pytest.mark.parametrize("interleaved", [True, False])
def test_any_places_by_either_convention(interleaved):
    """From 0, from an offset, from one for each sequence, and at places of their own."""
    layer = nn.RotaryPositionalEmbedding(4, interleaved=interleaved)
    x, places = jnp.asarray(wave(2, 3, 4)), np.array([[0, 1, 2], [7, 3, 3]])

    def by_hand(places):
        return of_pairs(x, places, interleaved=interleaved)

    assert_close(layer(x), by_hand(np.arange(3)))
    assert_close(layer(x, offset=5), by_hand(np.arange(5, 8)))
    starts = np.array([4, 0])
    assert_close(layer(x, offset=starts), by_hand(starts[:, None] + np.arange(3)))
    assert_close(layer(x, positions=places), by_hand(places))
    assert_close(
        layer(x, positions=places[0] / 2, offset=starts), by_hand(starts[:, None] + places[0] / 2)
    )
    assert layer(x.astype(jnp.bfloat16), offset=5).dtype == jnp.bfloat16


def test_axes_after_that_of_positions_share_them():
    """Heads, and whatever else; as if they came before."""
    layer, x = nn.RotaryPositionalEmbedding(4), jnp.asarray(wave(2, 3, 5, 2, 4))

    for positions in (None, np.array([4, 0, 9]), np.array([[0, 1, 2], [7, 3, 3]])):
        at = np.arange(3) if positions is None else positions
        by_hand = of_pairs(np.moveaxis(x, (2, 3), (0, 1)), at, interleaved=False)
        found = layer(x, positions=positions, axis=-4)
        assert_close(found, np.moveaxis(by_hand, (0, 1), (2, 3)))
    assert_close(layer(x, axis=-2), layer(x))


def test_products_depend_on_distances_alone():
    """What the angles are for."""
    layer, (query, key) = nn.RotaryPositionalEmbedding(4), jnp.asarray(wave(2, 1, 4))

    def product(m, n):
        return layer(query, offset=m)[0] @ layer(key, offset=n)[0]

    assert_close(product(5, 3), product(102, 100), rtol=1e-4)


test_refusals = refusals(globals())
