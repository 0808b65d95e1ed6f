"""`Conv`, `Conv1d`, `Conv2d` and `Conv3d`."""

import dataclasses
import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError
from tests.nn.numbers_to_compare import assert_close, wave


def test_the_layers_for_each_dimension_are_the_general_one(key):
    """Conv2d(...) has the fields and values of Conv(2, ...), and is one."""
    general, special = nn.Conv(2, 3, 4, (3, 2), key=key), nn.Conv2d(3, 4, (3, 2), key=key)

    assert isinstance(special, nn.Conv)
    assert special.num_spatial_dims == 2
    for field in dataclasses.fields(general):
        assert np.all(getattr(special, field.name) == getattr(general, field.name))


def test_signatures_lack_the_dimension_only():
    """help() and inspect show Conv's arguments without num_spatial_dims."""
    general = list(inspect.signature(nn.Conv).parameters.values())

    for layer in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        assert list(inspect.signature(layer).parameters.values()) == general[1:]


def test_four_spatial_axes_are_as_good_as_two(key):
    """JAX has convolutions over any number; restated for a kernel of one tap."""
    layer = nn.Conv(4, 2, 3, 1, use_bias=False, key=key)
    x = wave(2, 2, 1, 3, 2)

    expected = np.einsum("oi,iabcd->oabcd", np.array(layer.weight).reshape(3, 2), x)
    assert_close(layer(jnp.asarray(x)), expected)


def test_initial_values_are_uniform_within_one_over_root_fan_in(key):
    """fan_in is the channels of a group times the taps of the kernel."""
    layer = nn.Conv2d(8, 64, (2, 4), groups=2, key=key)
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

    weight = nn.Conv2d(4, 5, (2, 3), key=key, weight_init=numbered).weight

    assert_close(weight, np.arange(120).reshape(2, 3, 4, 5).transpose(3, 2, 0, 1))


def test_groups_that_do_not_divide_the_output_are_refused_when_it_is_called(key):
    """A layer that is only held need not work; its weight has a shape, as in Equinox."""
    layer = nn.Conv2d(4, 3, 2, groups=2, key=key)

    assert layer.weight.shape == (3, 2, 2, 2)
    with pytest.raises(ArgumentError, match=r"groups.*out_channels"):
        layer(jnp.ones((4, 5, 5)))


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_what_a_mode_changes_is_stored_as_the_constructor_stores_it(kind, key):
    """One stride becomes one for each axis; a value that contradicts the arrays is refused."""
    layer = kind(2, 4, 3, key=key)

    assert nn.with_mode(layer, stride=2) == layer.replace(stride=(2, 2))
    assert layer.replace(stride=2, padding="same").padding == "SAME"
    for changes in ({"groups": 2}, {"kernel_size": 5}, {"out_channels": 3}):
        with pytest.raises(ShapeError, match=next(iter(changes))):
            nn.with_mode(layer, **changes)


# ---- formulas


def by_loops(x, kernel, low, high, stride):
    """A convolution of one channel, restated with loops."""
    padded = np.concatenate([np.zeros(low), x, np.zeros(high)])
    starts = range(0, len(padded) - len(kernel) + 1, stride)
    return np.array([padded[start : start + len(kernel)] @ kernel for start in starts])


@pytest.mark.parametrize(
    ("padding", "size", "stride", "pads"),
    [
        ("VALID", 5, 1, (0, 0)),
        ("SAME", 5, 1, (1, 2)),
        ("SAME_LOWER", 5, 1, (2, 1)),
        ("SAME", 5, 2, (1, 2)),
        ("SAME", 6, 3, (0, 1)),
        ([(0, 3)], 5, 2, (0, 3)),
    ],
)
def test_named_and_uneven_paddings(key, padding, size, stride, pads):
    """ "SAME" gives ceil(size / stride) outputs; odd amounts go above, or below for SAME_LOWER."""
    layer = nn.Conv1d(1, 1, 4, stride, padding, use_bias=False, key=key)
    x = wave(size)

    found = layer(jnp.asarray(x)[None])[0]

    assert_close(found, by_loops(x, np.asarray(layer.weight)[0, 0], *pads, stride))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_modes_are_numpys(key, mode):
    """NumPy pads first, and the layer then needs no padding of its own."""
    options = {"stride": 2, "key": key}
    layer = nn.Conv2d(2, 3, (3, 2), padding=(2, 1), padding_mode=mode, **options)
    numpys = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}[mode]
    x = wave(2, 5, 6)

    padded = np.pad(x, ((0, 0), (2, 2), (1, 1)), mode=numpys)
    assert_close(layer(jnp.asarray(x)), nn.Conv2d(2, 3, (3, 2), **options)(jnp.asarray(padded)))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda key: nn.Conv2d(3, 4, 3, key=key), (9, 9, 3)),
        (lambda key: nn.Conv2d(1, 4, 3, key=key), (9, 9)),
        (lambda key: nn.ConvTranspose1d(3, 2, 3, key=key), (3,)),
    ],
)
def test_channels_that_stand_elsewhere_are_refused(key, layer, shape):
    """A missing axis of channels would be taken from the batch, or from the image."""
    with pytest.raises(ShapeError, match=r"Conv.*channels"):
        layer(key)(jnp.ones(shape))
