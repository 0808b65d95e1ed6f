"""The layers that normalize each example: `LayerNorm`, `RMSNorm`, `GroupNorm`, `InstanceNorm`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError, RngError, ShapeError
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


# ---- formulas


def test_layer_norm_is_the_formula_of_its_paper():
    """Over one axis or several, times the weight, and plus the bias."""
    x, weight, bias = wave(5, 2, 3), wave(2, 3, phase=1), wave(2, 3, phase=2)
    layer = nn.LayerNorm((2, 3), 1e-2).replace(weight=jnp.asarray(weight), bias=jnp.asarray(bias))

    assert_close(layer(jnp.asarray(x)), standardized(x, (1, 2), 1e-2) * weight + bias)
    assert_close(nn.LayerNorm(3)(jnp.asarray(x)), standardized(x, 2, 1e-5))


def test_over_no_axis_only_the_bias_is_left():
    """Each number is its own mean."""
    layer = nn.LayerNorm(()).replace(bias=jnp.asarray(0.5))

    assert_close(layer(X), np.full((4, 4), 0.5))


def test_rms_norm_is_the_formula_of_its_paper():
    """x / sqrt(mean of squares + eps), times the weight, and plus the bias."""
    x, weight, bias = wave(5, 8), wave(8, phase=1), wave(8, phase=2)
    layer = nn.RMSNorm(8, 1e-2).replace(weight=jnp.asarray(weight), bias=jnp.asarray(bias))

    expected = x / np.sqrt((x.astype("f8") ** 2).mean(1, keepdims=True) + 1e-2)
    assert_close(layer(jnp.asarray(x)), expected * weight + bias)
    assert_close(nn.RMSNorm(1)(jnp.full((1, 1), 1e-3)), [[1e-3 / np.sqrt(1.1e-5)]])


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_group_norm_is_the_formula_of_its_paper(groups):
    """Each group of channels by itself; with weights for each channel."""
    x, weight, bias = wave(2, 6, 5), wave(6, phase=1), wave(6, phase=2)
    layer = nn.GroupNorm(groups, 6, 1e-2, num_spatial_dims=1)
    layer = layer.replace(weight=jnp.asarray(weight), bias=jnp.asarray(bias))

    grouped = standardized(x.reshape(2, groups, -1), 2, 1e-2).reshape(2, 6, 5)
    expected = grouped * weight[:, None] + bias[:, None]
    assert_close(layer(jnp.asarray(x)), expected)
    assert_close(layer.replace(num_spatial_dims=None)(jnp.asarray(x[0])), expected[0])


@pytest.mark.parametrize("dims", [1, 2])
def test_instance_norm_normalizes_each_channel(dims):
    """By the rank of an example, or mapped; with weights if it is asked for them."""
    x, weight = wave(2, 3, *range(2, 2 + dims)), wave(3, phase=1)
    axes = tuple(range(2, 2 + dims))
    layer = nn.InstanceNorm(3, channelwise_affine=True, num_spatial_dims=dims)
    layer = layer.replace(weight=jnp.asarray(weight))

    expected = standardized(x, axes, 1e-5)
    assert_close(nn.InstanceNorm(3, num_spatial_dims=dims)(jnp.asarray(x)), expected)
    assert_close(jax.vmap(nn.InstanceNorm(3))(jnp.asarray(x)), expected)
    assert_close(layer(jnp.asarray(x)), expected * weight.reshape(3, *[1] * dims))
    assert nn.InstanceNorm(3).weight is None


def test_group_norm_without_weights_takes_any_number_of_channels():
    """Each group has mean zero and variance one."""
    layer = nn.GroupNorm(2, None, 0.0, channelwise_affine=False)

    out = np.asarray(layer(jnp.asarray(wave(4, 5)))).reshape(2, -1)

    assert (layer.weight, layer.bias) == (None, None)
    assert_close(out.mean(1), np.zeros(2))
    assert_close(out.var(1), np.ones(2))
    assert layer(jnp.ones((6, 5))).shape == (6, 5)


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
    """The squares of these numbers overflow float16; the result is rounded once."""
    layer = jax.tree.map(lambda leaf: leaf.astype(dtype), norm(*args))
    x = (300 * X).astype(dtype)

    out = layer(x)

    assert out.dtype == dtype
    expected = norm(*args)(x.astype(jnp.float32)).astype(dtype)
    assert_close(out.astype("f4"), expected.astype("f4"))


@each_norm
def test_little_is_stored_for_the_backward_pass(norm, args):
    """Two arrays of the size of x: a loop over layers stores them for each of its layers."""
    layer, x = norm(*args), jnp.ones((4, 4, 8, 4))
    layer = layer if norm in (nn.LayerNorm, nn.RMSNorm) else layer.replace(num_spatial_dims=2)

    stored = jax.eval_shape(lambda layer, x: jax.vjp(lambda m, x: m(x), layer, x)[1], layer, x)

    assert sum(each.size == x.size for each in jax.tree.leaves(stored)) <= 2


# ---- how they are made and called


@each_norm
def test_weight_and_bias_start_as_one_and_zero_or_as_told(norm, args, key):
    """With a separate key for each initializer, in the dtype that was asked for."""
    normal = jax.nn.initializers.normal()
    plain = norm(*args, dtype=jnp.bfloat16)
    layer = norm(*args, weight_init=normal, bias_init=normal, key=key)

    assert plain.weight.dtype == plain.bias.dtype == jnp.bfloat16
    assert (plain.weight.tolist(), plain.bias.tolist()) == ([1] * 4, [0] * 4)
    for values, own_key in zip((layer.weight, layer.bias), jax.random.split(key), strict=True):
        assert_close(values, normal(own_key, (4,), jnp.float32))
    with pytest.raises(RngError, match=norm.__name__):
        norm(*args, weight_init=normal)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize(("use_weight", "use_bias"), [(True, False), (False, True)])
def test_weight_and_bias_are_there_if_asked_for(norm, use_weight, use_bias):
    """Each by its own flag."""
    layer = norm((2, 3), use_weight=use_weight, use_bias=use_bias)

    assert (layer.weight is not None, layer.bias is not None) == (use_weight, use_bias)


@pytest.mark.parametrize("value", [True, False])
def test_an_older_name_of_two_arguments_is_taken_with_a_warning(value):
    """`elementwise_affine` sets both weight and bias, as in Equinox."""
    with pytest.warns(UserWarning, match="elementwise_affine"):
        layer = nn.LayerNorm(3, elementwise_affine=value)

    assert (layer.weight is None, layer.bias is None) == (not value, not value)


@each_norm
def test_a_state_is_handed_back(norm, args):
    """Beside the result; without one, the result is alone. A key is ignored."""
    layer = norm(*args)
    state = nn.State(layer)

    out, after = layer(X, state, key=jax.random.key(0))

    assert after is state
    assert_close(out, layer(X))
    with pytest.raises(ArgumentError, match="State"):
        layer(X, X)


@each_norm
def test_integers_and_negative_epsilons_are_refused(norm, args):
    """A mean of integers has no such dtype; a negative epsilon gives NaN at some inputs."""
    with pytest.raises(ArgumentError, match=norm.__name__):
        norm(*args)(jnp.ones((4, 4), int))
    with pytest.raises(ArgumentError, match="eps"):
        norm(*args).replace(eps=-1.0)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.GroupNorm(2, 4, num_spatial_dims=2), (2, 5, 4, 3)),
        (nn.GroupNorm(2, 4), (7, 4, 2)),
        (nn.GroupNorm(2, channelwise_affine=False), (3, 5)),
        (nn.InstanceNorm(3), (7, 3, 5)),
        (nn.InstanceNorm(3), (3,)),
        (nn.LayerNorm((2, 3)), (3,)),
    ],
    ids=label,
)
def test_channels_that_stand_elsewhere_are_refused(layer, shape):
    """Other axes would be normalized, silently."""
    with pytest.raises(ShapeError, match=type(layer).__name__):
        layer(jnp.ones(shape))


def test_sizes_that_change_together_are_compared_with_each_other():
    """Not the new number of channels with the old number of groups."""
    layer = nn.GroupNorm(2, 8)
    with pytest.raises(ArgumentError, match="9"):
        layer.replace(channels=9, weight=jnp.ones(9), bias=jnp.ones(9))

    assert layer.replace(groups=3, channels=9, weight=jnp.ones(9), bias=jnp.ones(9)).groups == 3
