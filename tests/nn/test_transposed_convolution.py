"""`ConvTranspose`, `ConvTranspose1d`, `ConvTranspose2d` and `ConvTranspose3d`."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from tests.goldens import refusals
from tests.nn.numbers_to_compare import assert_close


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


def test_weights_in_reduced_precision(key):
    """Weights and output have the dtype asked for."""
    layer = nn.ConvTranspose1d(2, 3, 2, dtype=jnp.bfloat16, key=key)

    assert jax.eval_shape(layer, jnp.ones((2, 3), jnp.bfloat16)).dtype == jnp.bfloat16


test_refusals = refusals(globals())
