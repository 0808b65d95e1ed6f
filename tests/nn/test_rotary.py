import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from tests.nn.numbers_to_compare import assert_close, wave


def of_pairs(x, positions, frequencies, *, interleaved=False):
    """Each pair as a complex number, times exp(i angle), by NumPy in double precision."""
    x, half = np.asarray(x, "f8"), x.shape[-1] // 2
    angles = np.asarray(positions, "f8")[..., None] * np.asarray(frequencies)
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
        return of_pairs(x, places, [1.0, 0.01], interleaved=interleaved)

    call, starts = ft.partial(layer, axis=-2), np.array([4, 0])
    assert_close(call(x), by_hand(np.arange(3)))
    assert_close(call(x, offset=5), by_hand(np.arange(5, 8)))
    assert_close(call(x, offset=starts), by_hand(starts[:, None] + np.arange(3)))
    assert_close(call(x, positions=places), by_hand(places))
    halves = starts[:, None] + places[0] / 2
    assert_close(call(x, positions=places[0] / 2, offset=starts), by_hand(halves))
    assert call(x.astype(jnp.bfloat16), offset=5).dtype == jnp.bfloat16


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


@pytest.mark.parametrize("kind", PUBLISHED)
def test_scaled_angles_are_those_of_transformers(kind):
    """The frequencies that it prints; and positions from 0, from an offset, and given ones."""
    theta, scaling, frequencies = PUBLISHED[kind]
    layer = nn.RotaryPositionalEmbedding(16, theta, scaling=scaling)
    x, places = jnp.asarray(wave(5, 16)), np.array([0, 3, 9, 40, 100])

    assert_close(layer(x), of_pairs(x, np.arange(5), frequencies))
    assert_close(layer(x, offset=70), of_pairs(x, np.arange(70, 75), frequencies), rtol=1e-4)
    assert_close(layer(x, positions=places), of_pairs(x, places, frequencies), rtol=1e-4)


def test_what_says_how_to_scale_is_stored_as_items():
    """So the layer is hashable configuration; "default" is no scaling."""
    layer = nn.RotaryPositionalEmbedding(4, scaling=LLAMA3)

    assert dict(layer.scaling) == LLAMA3
    assert layer.replace(scaling=[*layer.scaling]) == layer
    assert hash(jax.tree.structure(layer)) == hash(jax.tree.structure(layer))
    assert layer.replace(scaling={"rope_type": "default"}) == nn.RotaryPositionalEmbedding(4)
