"""The layers that normalize each example: `LayerNorm`, `RMSNorm`, `GroupNorm`, `InstanceNorm`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave

NORMS = {
    nn.LayerNorm: (4,),
    nn.RMSNorm: (4,),
    nn.GroupNorm: (2, 4),
    nn.InstanceNorm: (4, 1e-5, True),
}
each_norm = pytest.mark.parametrize(("norm", "args"), NORMS.items(), ids=label)
X = jnp.asarray(wave(4, 4))


def standardized(x, axes, eps):
    """(x - mean) / sqrt(variance + eps) over some axes, by NumPy in double precision."""
    x = np.asarray(x, "f8")
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


def with_weights(layer, shape):
    """The layer with other weights, and these as NumPy arrays."""
    weight, bias = wave(*shape, phase=1), wave(*shape, phase=2)
    return layer.replace(weight=jnp.asarray(weight), bias=jnp.asarray(bias)), weight, bias


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_group_norm_is_the_formula_of_its_paper(groups):
    """Each group of channels by itself; with weights for each channel, or without."""
    x = wave(2, 6, 5)
    plain = nn.GroupNorm(groups, None, 1e-2, channelwise_affine=False)
    layer, weight, bias = with_weights(nn.GroupNorm(groups, 6, 1e-2, num_spatial_dims=1), (6,))

    grouped = standardized(x.reshape(2, groups, -1), 2, 1e-2).reshape(2, 6, 5)
    expected = grouped * weight[:, None] + bias[:, None]
    assert_close(layer(jnp.asarray(x)), expected)
    assert_close(layer.replace(num_spatial_dims=None)(jnp.asarray(x[0])), expected[0])
    assert_close(plain(jnp.asarray(x[0])), grouped[0])


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
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=label)
def test_half_precision_is_computed_in_single(norm, args, dtype):
    """The squares of these overflow float16; a State is handed back, and a key is ignored."""
    layer = jax.tree.map(lambda leaf: leaf.astype(dtype), norm(*args))
    x = (300 * X).astype(dtype)

    state = nn.State(layer)
    out, after = layer(x, state, key=jax.random.key(0))

    assert out.dtype == dtype
    assert after is state
    expected = norm(*args)(x.astype(jnp.float32)).astype(dtype)
    assert_close(out.astype("f4"), expected.astype("f4"))


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
    if norm in (nn.LayerNorm, nn.RMSNorm):
        assert norm((2, 3), use_bias=False).bias is norm((2, 3), use_weight=False).weight is None


@each_norm
@pytest.mark.parametrize("dtype", [int, complex])
def test_other_numbers_than_floats_are_refused(norm, args, dtype):
    """The result would be cut to whole, or to real numbers."""
    with pytest.raises(ArgumentError, match=norm.__name__):
        norm(*args)(jnp.ones((4, 4), dtype))


@pytest.mark.parametrize(
    ("layer", "shape", "word"),
    [
        (nn.GroupNorm(2, 4, num_spatial_dims=2), (2, 5, 4, 3), r"4, spatial, spatial\)"),
        (nn.GroupNorm(2, 4), (7, 4, 2), r"\(4, \.\.\.\)"),
        (nn.InstanceNorm(3), (7, 3, 5), "InstanceNorm"),
        (nn.InstanceNorm(3), (3,), "several values"),
        (nn.InstanceNorm(3, num_spatial_dims=1), (3, 3, 1), "several values"),
        (nn.LayerNorm((2, 3)), (3,), r"\(\.\.\., 2, 3\)"),
    ],
    ids=label,
)
def test_channels_that_stand_elsewhere_are_refused(layer, shape, word):
    """Other axes would be normalized, silently; or a single value, which is its own mean."""
    with pytest.raises(ShapeError, match=word):
        layer(jnp.ones(shape))
