"""Initializers."""

import jax
import jax.numpy as jnp
import pytest

from pytreemod import nn
from pytreemod.nn.initializing import initialize, uniform_by_fan_in
from tests.goldens import refusals


def test_without_inputs_everything_is_zero(key):
    """fan_in = 0 has no bound to draw within."""
    assert uniform_by_fan_in(0)(key, (3,), jnp.float32).tolist() == [0, 0, 0]


@pytest.mark.parametrize("fan_in", [1, 2, 9])
def test_values_fill_the_range_of_one_over_root_fan_in(fan_in, key):
    """From one input on: on both sides of zero, and nearly to the bound."""
    values = uniform_by_fan_in(fan_in)(key, (500,), jnp.float32) * fan_in**0.5

    assert -1 <= float(values.min()) < -0.95
    assert 0.95 < float(values.max()) <= 1


def test_complex_parts_are_drawn_independently(key):
    """Real and imaginary part differ, each within the bound."""
    values = uniform_by_fan_in(4)(key, (50,), jnp.complex64)

    assert values.dtype == jnp.complex64
    assert (values.real != values.imag).all()
    assert float(jnp.abs(values.real).max()) <= 0.5 >= float(jnp.abs(values.imag).max())


def test_initialize_passes_everything_on(key):
    """The function gets the key, the shape and the dtype unchanged."""
    values = initialize("f(init)", jax.nn.initializers.normal(2.0), key, (2, 3), jnp.float16)

    assert (values == jax.nn.initializers.normal(2.0)(key, (2, 3), jnp.float16)).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: nn.LayerNorm((2, 3), **options),
        lambda **options: nn.RMSNorm(4, **options),
        lambda **options: nn.InstanceNorm(4, channelwise_affine=True, **options),
        lambda **options: nn.BatchNorm(4, **options),
    ],
    ids=["LayerNorm", "RMSNorm", "InstanceNorm", "BatchNorm"],
)
def test_layers_that_normalize_start_as_they_are_told(key, make):
    """With an initializer for each, and a separate key; ones and zeros need no key."""
    normal = jax.nn.initializers.normal()
    layer = make(weight_init=normal, bias_init=normal, key=key)
    weight_key, bias_key = jax.random.split(key)
    shape = layer.weight.shape

    assert (layer.weight == normal(weight_key, shape, jnp.float32)).all()
    assert (layer.bias == normal(bias_key, shape, jnp.float32)).all()
    assert (make(bias_init=normal, key=key).weight == 1).all()
    assert (make(weight_init=normal, key=key).bias == 0).all()


test_refusals = refusals(globals())
