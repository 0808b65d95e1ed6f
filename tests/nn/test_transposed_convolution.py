"""`ConvTranspose`, `ConvTranspose1d`, `ConvTranspose2d` and `ConvTranspose3d`."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError, RngError, ShapeError
from tests.labels import label
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


@pytest.mark.parametrize("options", [{}, {"padding": "SAME"}, {"padding": 1, "dilation": 2}])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.sampled
def test_it_undoes_what_a_convolution_does_to_a_shape(key, stride, options):
    """The size that a convolution took is among those that output_padding can give."""
    down = nn.Conv1d(2, 3, 3, stride, key=key, **options)
    size = down(jnp.ones((2, 11))).shape[-1]
    ups = [
        nn.ConvTranspose1d(3, 2, 3, stride, more, key=key, **options)(jnp.ones((3, size)))
        for more in range(stride)
    ]

    assert 11 in [up.shape[-1] for up in ups]


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


def test_groups_need_only_divide_the_output_when_it_is_called(key):
    """As in `Conv`: a layer that is only held may have any."""
    layer = nn.ConvTranspose1d(4, 3, 2, groups=2, key=key)

    with pytest.raises(ArgumentError, match=r"\(groups\): expected a divisor of out_channels=3"):
        layer(jnp.ones((4, 5)))


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((2, 5), r"expected x of shape \(\.\.\., 3, length\), got f32\[2,5\]"),
        ((3,), r"expected x of shape \(\.\.\., 3, length\), got f32\[3\]"),
        ((3, 1), r"expected padding=\(\(1, 2\),\) to leave something of .*, got \(0,\) from f32"),
    ],
    ids=label,
)
def test_inputs_that_do_not_fit_are_refused(key, shape, text):
    """Channels, axes, and what padding cuts off altogether."""
    layer = nn.ConvTranspose1d(3, 2, 3, padding=((1, 2),), key=key)

    with pytest.raises(ShapeError, match=rf"^ConvTranspose1d\(in_channels=3, .*\): {text}"):
        layer(jnp.ones(shape))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"in_channels": 0}, r"\(in_channels\): expected an integer of at least 1, got 0"),
        ({"kernel_size": (3, 3)}, r"\(kernel_size\): expected an integer .*, or a sequence of 1"),
        ({"stride": 0}, r"\(stride\): expected an integer of at least 1"),
        ({"output_padding": 1}, r"\(output_padding\): expected less than stride=\(1,\), got \(1,"),
        ({"padding": "FULL"}, r"\(padding\): expected one of 'SAME', 'SAME_LOWER', 'VALID'"),
        ({"groups": 2}, r"\(groups\): expected a divisor of in_channels=3, got 2"),
        ({"use_bias": 1}, r"\(use_bias\): expected True or False"),
        ({"padding_mode": "CIRCULAR"}, r"\(padding_mode\): expected 'ZEROS', unless padding"),
        ({"dtype": int}, r"\(dtype\): expected a floating dtype"),
        ({"weight_init": 1.0}, r"\(weight_init\): expected a function"),
    ],
    ids=label,
)
def test_bad_arguments_are_refused(key, arguments, text):
    """Each by its name."""
    given = {"in_channels": 3, "out_channels": 2, "kernel_size": 3, "key": key} | arguments

    with pytest.raises(ArgumentError, match=rf"^ConvTranspose1d{text}"):
        nn.ConvTranspose1d(**given)


def test_what_is_no_key_is_refused():
    """As for every layer."""
    with pytest.raises(RngError, match=r"^ConvTranspose1d\(key\): expected a random key, got 0"):
        nn.ConvTranspose1d(1, 1, 1, key=0)


def test_weights_in_reduced_precision(key):
    """Weights and output have the dtype asked for."""
    layer = nn.ConvTranspose1d(2, 3, 2, dtype=jnp.bfloat16, key=key)

    assert layer(jnp.asarray(wave(2, 3), jnp.bfloat16)).dtype == jnp.bfloat16
