"""The layers that normalize each example: `LayerNorm`, `RMSNorm`, `GroupNorm`, `InstanceNorm`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave

NORMS = {
    nn.LayerNorm: (4,),
    nn.RMSNorm: (4,),
    nn.GroupNorm: (2, 4),
    nn.InstanceNorm: (4, 1e-5, True),
}
each_norm = pytest.mark.parametrize(("norm", "args"), NORMS.items(), ids=label)


def standardized(x, axes, eps):
    """(x - mean) / sqrt(variance + eps) over some axes, by NumPy in double precision."""
    x = np.asarray(x, "f8")
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


def with_weights(layer, shape):
    weight, bias = wave(*shape, phase=1), wave(*shape, phase=2)
    return layer.replace(weight=jnp.asarray(weight), bias=jnp.asarray(bias)), weight, bias


@pytest.mark.parametrize("dims", [1, 2])
def test_instance_norm_normalizes_each_channel(dims):
    """By the rank of an example, or mapped; with weights if it is asked for them."""
    x, axes = wave(2, 3, *range(2, 2 + dims)), tuple(range(2, 2 + dims))
    layer = nn.InstanceNorm(3, channelwise_affine=True, num_spatial_dims=dims)
    layer, weight, bias = with_weights(layer, (3,))

    expected, shape = standardized(x, axes, 1e-5), (3, *[1] * dims)
    assert_close(nn.InstanceNorm(3, num_spatial_dims=dims)(jnp.asarray(x)), expected)
    assert_close(jax.vmap(nn.InstanceNorm(3))(jnp.asarray(x)), expected)
    expected = expected * weight.reshape(shape) + bias.reshape(shape)
    assert_close(layer(jnp.asarray(x)), expected)


@pytest.mark.parametrize(
    "layer", [nn.LayerNorm(2, 0.0), nn.GroupNorm(1, 2, 0.0), nn.InstanceNorm(1, 0.0)], ids=label
)
def test_the_variance_does_not_cancel(layer):
    """A large mean costs no accuracy: 1e4 + (-1, 1) becomes (-1, 1)."""
    x = jnp.array([1e4 - 1, 1e4 + 1], jnp.float32)

    x = x[None] if isinstance(layer, nn.InstanceNorm) else x
    assert_close(layer(x).ravel(), [-1, 1])


@each_norm
def test_little_is_stored_for_the_backward_pass(norm, args):
    """Two arrays of the size of x: a loop over layers stores them for each of its layers."""
    layer, x = norm(*args), jnp.ones((4, 4, 8, 4))
    layer = layer if norm in (nn.LayerNorm, nn.RMSNorm) else layer.replace(num_spatial_dims=2)

    stored = jax.eval_shape(lambda layer, x: jax.vjp(lambda m, x: m(x), layer, x)[1], layer, x)

    assert sum(each.size == x.size for each in jax.tree.leaves(stored)) <= 2


@each_norm
def test_weight_and_bias_start_as_one_and_zero_or_as_told(norm, args, key):
    """With a separate key for each initializer, in the dtype that was asked for; or they lack."""
    normal = jax.nn.initializers.normal()
    plain = norm(*args, dtype=jnp.bfloat16)
    layer = norm(*args, weight_init=normal, bias_init=normal, key=key)

    assert plain.weight.dtype == plain.bias.dtype == jnp.bfloat16
    assert (plain.weight.tolist(), plain.bias.tolist()) == ([1] * 4, [0] * 4)
    for values, own_key in zip((layer.weight, layer.bias), jax.random.split(key), strict=True):
        assert_close(values, normal(own_key, (4,), jnp.float32))
    assert_close(norm(*args, weight_init=normal, key=key).weight, layer.weight)
    if norm in (nn.LayerNorm, nn.RMSNorm):
        assert norm((2, 3), use_bias=False).bias is norm((2, 3), use_weight=False).weight is None
