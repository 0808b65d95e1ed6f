"""`RotaryPositionalEmbedding`."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError
from tests.nn.numbers_to_compare import assert_close, wave


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
    """From 0, from an offset, from an offset for each sequence, and at given positions."""
    layer = nn.RotaryPositionalEmbedding(4, interleaved=interleaved)
    x, places = jnp.asarray(wave(2, 3, 4)), np.array([[0, 1, 2], [7, 3, 3]])

    def by_hand(places):
        return of_pairs(x, places, interleaved=interleaved)

    call, starts = ft.partial(layer, axis=-2), np.array([4, 0])
    assert_close(call(x), by_hand(np.arange(3)))
    assert_close(call(x, offset=5), by_hand(np.arange(5, 8)))
    assert_close(call(x, offset=starts), by_hand(starts[:, None] + np.arange(3)))
    assert_close(call(x, positions=places), by_hand(places))
    halves = starts[:, None] + places[0] / 2
    assert_close(call(x, positions=places[0] / 2, offset=starts), by_hand(halves))
    assert call(x.astype(jnp.bfloat16), offset=5).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("shape", "options", "word"),
    [
        ((5, 2, 4), {}, "axis=-3"),
        ((5, 2, 4), {"axis": 0}, "from the end"),
        ((4,), {}, "seq_length"),
        ((5, 4), {"positions": np.zeros(1)}, r"\(5,\)"),
        ((2, 5, 4), {"axis": -2, "offset": np.zeros(5)}, r"\(2,\)"),
    ],
)
def test_what_has_no_clear_position_is_refused(shape, options, word):
    """Vectors would have the angle of a head, or all the same."""
    with pytest.raises(ShapeError, match=word):
        nn.RotaryPositionalEmbedding(4)(jnp.ones(shape), **options)


def test_products_depend_on_distances_alone():
    """The purpose of the angles."""
    layer, (query, key) = nn.RotaryPositionalEmbedding(4), jnp.asarray(wave(2, 1, 4))

    def product(m, n):
        return layer(query, offset=m)[0] @ layer(key, offset=n)[0]

    assert_close(product(5, 3), product(102, 100), rtol=1e-4)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
# Printed by transformers 5.24, from its `ROPE_INIT_FUNCTIONS`, for heads of 16.
PUBLISHED = {
    "linear": (
        10_000.0,
        LINEAR,
        [0.25, 0.07905694, 0.025, 0.0079056947, 0.0025, 0.00079056947, 0.00025, 7.9056947e-05],
    ),
    "llama3": (
        500.0,
        LLAMA3,
        [
            *(1.0, 0.45986328, 0.097616628, 0.012156156),
            *(0.0055901702, 0.0025707141, 0.0011821770, 0.00054363982),
        ],
    ),
}


def restated(size, theta, scaling):
    """The frequencies of pairs as transformers computes them, by wavelength, by NumPy."""
    plain = 1 / theta ** (np.arange(0, size, 2) / size)
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return plain / factor
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    known = scaling["original_max_position_embeddings"]
    waves = 2 * np.pi / plain
    smooth = (known / waves - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    found = np.where(waves > known / low, plain / factor, plain)
    return np.where((waves <= known / low) & (waves >= known / high), between, found)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_scaled_angles_are_those_of_transformers(kind):
    """The frequencies that it prints; and positions from 0, from an offset, and given ones."""
    theta, scaling, published = PUBLISHED[kind]
    frequencies = restated(16, theta, scaling)
    np.testing.assert_allclose(frequencies, published, rtol=1e-6)
    layer = nn.RotaryPositionalEmbedding(16, theta, scaling=scaling)
    x, places = jnp.asarray(wave(5, 16)), np.array([0, 3, 9, 40, 100])

    def by_hand(places):
        turned = (np.asarray(x)[:, :8] + 1j * np.asarray(x)[:, 8:]) * np.exp(
            1j * places[:, None] * frequencies
        )
        return np.concatenate([turned.real, turned.imag], -1)

    assert_close(layer(x), by_hand(np.arange(5)))
    assert_close(layer(x, offset=70), by_hand(np.arange(70, 75)), rtol=1e-4)
    assert_close(layer(x, positions=places), by_hand(places), rtol=1e-4)
    # All three ranges of it, of which the test of a single one would say nothing.
    ratios = published / restated(16, theta, LINEAR | {"factor": 1.0})
    assert (kind == "linear") == (len({*ratios.round(4)}) == 1)


def test_what_says_how_to_scale_is_stored_as_items():
    """So the layer is hashable configuration; "default" is no scaling."""
    layer = nn.RotaryPositionalEmbedding(4, scaling=LLAMA3)

    assert dict(layer.scaling) == LLAMA3
    assert layer.replace(scaling=[*layer.scaling]) == layer
    assert hash(jax.tree.structure(layer)) == hash(jax.tree.structure(layer))
    assert layer.replace(scaling={"rope_type": "default"}) == nn.RotaryPositionalEmbedding(4)
    with pytest.raises(ArgumentError, match="'yarn'"):
        nn.RotaryPositionalEmbedding(4, scaling={"rope_type": "yarn", "factor": 2.0})
