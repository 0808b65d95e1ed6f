"""`Conv`, `Conv1d`, `Conv2d` and `Conv3d`."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError
from tests.goldens import refusals
from tests.nn.numbers_to_compare import assert_close, wave

CASES = {
    "1d": (nn.Conv1d, {"kernel_size": 3, "padding": 1}, (7,)),
    "2d": (nn.Conv2d, {"kernel_size": (3, 2), "stride": 2, "groups": 2}, (5, 6)),
    "2d reflect": (nn.Conv2d, {"kernel_size": 3, "padding": 2, "padding_mode": "reflect"}, (5, 6)),
    "3d": (nn.Conv3d, {"kernel_size": 2, "dilation": (1, 2, 1)}, (3, 4, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_convolutions_are_pytorchs(torch, key, case):
    """With the weights copied over, PyTorch's layer gives the same output and gradients."""
    make, options, spatial = CASES[case]
    layer = make(4, 6, **options, key=key)
    reference = getattr(torch.nn, make.__name__)(4, 6, **options)
    reference.weight.data = torch.tensor(np.array(layer.weight))
    reference.bias.data = torch.tensor(np.array(layer.bias)).reshape(6)
    x = wave(2, 4, *spatial)

    out, backward = jax.vjp(lambda layer: jnp.sin(layer(jnp.asarray(x))), layer)
    (grads,) = backward(jnp.ones_like(out))
    expected = reference(torch.tensor(x)).sin()
    expected.sum().backward()

    assert_close(out, expected)
    assert_close(grads.weight, reference.weight.grad, atol=1e-4)
    assert_close(grads.bias.reshape(6), reference.bias.grad, atol=1e-4)


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


def test_weight_init_counts_inputs_as_jax_does(key):
    """lecun_normal() gives variance 1 / fan_in; the bias is drawn flat."""
    init = jax.nn.initializers.lecun_normal()
    layer = nn.Conv2d(
        32, 8, (3, 5), groups=2, key=key, weight_init=init, bias_init=jax.nn.initializers.ones
    )

    assert layer.weight.shape == (8, 16, 3, 5)
    assert abs(float(jnp.var(layer.weight)) * 16 * 15 - 1) < 0.1
    assert layer.bias.shape == (8, 1, 1)


def test_weight_init_keeps_the_axes_apart(key):
    """Entry (height, width, in, out) of the initializer is entry (out, in, height, width)."""

    def numbered(key, shape, dtype):
        return jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)

    weight = nn.Conv2d(4, 5, (2, 3), key=key, weight_init=numbered).weight

    assert_close(weight, np.arange(120).reshape(2, 3, 4, 5).transpose(3, 2, 0, 1))


def test_dtype(key):
    """Weights and output have the dtype asked for."""
    layer = nn.Conv1d(2, 3, 2, dtype=jnp.bfloat16, key=key)

    assert layer.weight.dtype == layer.bias.dtype == jnp.bfloat16
    assert jax.eval_shape(layer, jnp.ones((2, 4), jnp.bfloat16)).dtype == jnp.bfloat16


def test_groups_that_do_not_divide_the_output_are_refused_when_it_is_called(key):
    """A layer that is only held need not work; its weight has a shape, as in Equinox."""
    layer = nn.Conv2d(4, 3, 2, groups=2, key=key)

    assert layer.weight.shape == (3, 2, 2, 2)
    text = r"^Conv2d\(groups\): expected a divisor of out_channels=3, got 2\.$"
    with pytest.raises(ArgumentError, match=text):
        layer(jnp.ones((4, 5, 5)))


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_what_a_mode_changes_is_stored_as_the_constructor_stores_it(kind, key):
    """One stride becomes one for each axis; a value that contradicts the arrays is refused."""
    layer = kind(2, 4, 3, key=key)

    assert nn.with_mode(layer, stride=2) == layer.replace(stride=(2, 2))
    assert layer.replace(stride=2, padding="same").padding == "SAME"
    for changes in ({"groups": 2}, {"kernel_size": 5}, {"out_channels": 3}):
        with pytest.raises(ShapeError, match=r"expected values that fit its arrays"):
            nn.with_mode(layer, **changes)


test_refusals = refusals(globals())
