"""`ConvTranspose`, `ConvTranspose1d`, `ConvTranspose2d` and `ConvTranspose3d`."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError
from tests.nn.numbers_to_compare import assert_close, wave


def test_the_layers_for_each_dimension_are_the_general_one(key):
    """But for the order of two arguments, which is Equinox's."""
    general = nn.ConvTranspose(2, 3, 4, (3, 2), 2, 0, 1, key=key)
    special = nn.ConvTranspose2d(3, 4, (3, 2), 2, 1, 0, key=key)

    assert isinstance(special, nn.ConvTranspose)
    for field in dataclasses.fields(general):
        assert np.all(getattr(special, field.name) == getattr(general, field.name))
    names = list(inspect.signature(nn.ConvTranspose).parameters)
    assert names[5:7] == ["padding", "output_padding"]
    for layer in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
        own = list(inspect.signature(layer).parameters)
        assert own[4:6] == ["output_padding", "padding"]
        assert {*own} == {*names} - {"num_spatial_dims"}


def test_initial_values_are_uniform_within_one_over_root_fan_in(key):
    """fan_in is the input's channels of a group times the taps of the kernel."""
    layer = nn.ConvTranspose2d(8, 64, (2, 4), groups=2, key=key)
    bound = (4 * 8) ** -0.5

    assert layer.weight.shape == (64, 4, 2, 4)
    assert layer.bias.shape == (64, 1, 1)
    for values in (layer.weight, layer.bias):
        assert float(jnp.abs(values).max()) <= bound
        assert abs(float(jnp.std(values)) / bound - 3**-0.5) < 0.06


def test_weight_init_keeps_the_axes_apart(key):
    """Entry (height, width, in, out) of the initializer is entry (out, in, height, width)."""

    def numbered(key, shape, dtype):
        return jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)

    options = {"weight_init": numbered, "bias_init": jax.nn.initializers.ones}
    layer = nn.ConvTranspose2d(4, 5, (2, 3), key=key, **options)

    assert_close(layer.weight, np.arange(120).reshape(2, 3, 4, 5).transpose(3, 2, 0, 1))
    assert_close(layer.bias, np.ones((5, 1, 1)))


# ---- formulas


def spread_by_loops(x, kernel, stride, low, high, size):
    """One channel, restated with loops: every entry is spread over a window."""
    # Ours is a correlation over the spread entries: the first entry is the last tap.
    out = np.zeros((len(x) - 1) * stride + len(kernel))
    for i, value in enumerate(x):
        out[i * stride : i * stride + len(kernel)] += value * kernel[::-1]
    return np.pad(out[low : len(out) - high], (0, size))


@pytest.mark.parametrize(
    ("padding", "taps", "stride", "more", "by_hand"),
    [
        ("VALID", 4, 2, 1, (0, 0, 1)),
        ("SAME", 4, 1, 0, (1, 2, 0)),
        ("SAME_LOWER", 4, 1, 0, (2, 1, 0)),
        ("SAME", 5, 2, 1, (2, 2, 0)),
        ("SAME", 1, 3, 0, (0, 0, 2)),
        ([(0, 3)], 4, 2, 0, (0, 3, 0)),
    ],
)
def test_named_and_uneven_paddings(key, padding, taps, stride, more, by_hand):
    """ "SAME" gives size * stride outputs; odd amounts go above, or below for SAME_LOWER."""
    layer = nn.ConvTranspose1d(1, 1, taps, stride, more, padding, use_bias=False, key=key)
    x = wave(5)

    found = layer(jnp.asarray(x)[None])[0]

    assert_close(found, spread_by_loops(x, np.asarray(layer.weight)[0, 0], stride, *by_hand))
    if padding in ("SAME", "SAME_LOWER"):
        assert found.shape == (5 * stride - more,)


@pytest.mark.parametrize(("stride", "taps"), [(1, 4), (3, 1), (3, 9)])
@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER"])
def test_around_a_circle_nothing_is_cut_off(key, padding, stride, taps):
    """Entries beyond one end are added at the other, as often as needed."""
    layer = nn.ConvTranspose1d(
        1, 1, taps, stride, padding=padding, padding_mode="CIRCULAR", use_bias=False, key=key
    )
    x, size = wave(3), 3 * stride
    beyond = max(2 * stride + taps - size, 0)
    low = beyond // 2 if padding == "SAME" else -(-beyond // 2)
    expected = np.zeros(size)
    spread = spread_by_loops(x, np.asarray(layer.weight)[0, 0], stride, 0, 0, 0)
    for i, value in enumerate(spread):
        expected[(i - low) % size] += value

    assert_close(layer(jnp.asarray(x)[None])[0], expected)


@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER", "VALID", ((1, 2),)], ids=str)
def test_it_is_the_transpose_of_a_convolution(key, padding):
    """With channels and taps swapped, it equals JAX's transpose of the other layer."""
    down = nn.Conv1d(2, 3, 4, 2, padding, use_bias=False, key=key)
    up = nn.ConvTranspose1d(3, 2, 4, 2, padding=padding, use_bias=False, key=key)
    up = up.replace(weight=jnp.flip(jnp.swapaxes(down.weight, 0, 1), 2))
    size = 10 if "SAME" in padding else 12 if padding == "VALID" else 9
    y = jnp.asarray(wave(3, 5))

    transpose = jax.linear_transpose(down, jnp.zeros((2, size)))
    assert_close(up(y), transpose(y)[0])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"output_padding": 1}, "output_padding"),
        ({"padding_mode": "CIRCULAR"}, "padding_mode"),
        ({"groups": 2}, "groups"),
    ],
)
def test_options_that_do_not_go_together_are_refused(key, options, word):
    """They would compute something else than they say."""
    with pytest.raises(ArgumentError, match=word):
        nn.ConvTranspose1d(3, 2, 3, key=key, **options)
