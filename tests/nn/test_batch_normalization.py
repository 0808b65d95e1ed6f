import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ShapeError
from tests.helpers.meshes import MESH, P
from tests.nn.numbers_to_compare import assert_close, wave


def over_batch(layer):
    return jax.vmap(layer, in_axes=(0, None), out_axes=(0, None), axis_name="batch")


def normalized(x, mean, var):
    """The formula without weights, by NumPy; channels are the second axis."""
    x = np.asarray(x, "f8")
    shape = (-1, *[1] * (x.ndim - 2))
    return (x - np.reshape(mean, shape)) / np.sqrt(np.reshape(var, shape) + 1e-5)


@pytest.mark.parametrize("axis_name", [None, "batch", ("batch",)])
@pytest.mark.parametrize(
    ("momentum", "affine", "shape"),
    [(0.0, True, (4, 3, 2)), (0.8, False, (4, 3, 2)), (1.0, True, (4, 3, 2)), (0.5, True, (2, 3))],
)
@pytest.mark.sampled(4)
def test_training_is_the_formula(momentum, affine, shape, axis_name):
    """Running statistics move by the batch's mean and its unbiased variance."""
    make = nn.make_with_state(nn.BatchNorm)
    layer, state = make(3, axis_name, momentum=momentum, channelwise_affine=affine)
    if affine:
        weight, bias = wave(3, phase=1), wave(3, phase=2)
        layer = layer.replace(weight=jnp.asarray(weight), bias=jnp.asarray(bias))
    call = layer if axis_name is None else over_batch(layer)
    mean, var, axes = np.zeros(3), np.ones(3), (0, *range(2, len(shape)))
    count = np.prod(shape) // 3

    for step in range(2):
        x = wave(*shape, phase=step) + step
        out, state = call(jnp.asarray(x), state)
        expected = normalized(x, x.mean(axes), x.var(axes))
        if affine:
            per_channel = (3, *[1] * (len(shape) - 2))
            expected = expected * weight.reshape(per_channel) + bias.reshape(per_channel)
        assert_close(out, expected, atol=1e-4)
        mean = momentum * mean + (1 - momentum) * x.mean(axes)
        var = momentum * var + (1 - momentum) * x.var(axes) * count / (count - 1)

    assert_close(jnp.stack(state.get(layer.state_index)), [mean, var])
    assert len(jax.tree.leaves(layer)) == (2 if affine else 0)
    quiet = layer.replace(inference=True, channelwise_affine=False, weight=None, bias=None)
    out, after = quiet(jnp.asarray(x[0] if axis_name else x), state)
    assert_close(out, normalized(x, mean, var)[0 if axis_name else ...], atol=1e-4)
    assert after is state


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_the_other_modes_are_their_formulas(mode):
    """Of "batch", inference divides by the sum of the weights; "ema" starts with the first batch.

    Both move by the biased variance, and "ema" also trains with its averages.
    """
    layer, state = nn.make_with_state(nn.BatchNorm)(3, mode=mode, momentum=0.75)
    mean, var = np.zeros(3), np.ones(3)
    x = wave(4, 3)
    assert_close(layer(jnp.asarray(x), state, inference=True)[0], normalized(x, mean, var))

    for step in range(2):
        x = wave(4, 3, phase=step) + step
        out, state = layer(jnp.asarray(x), state)
        own = x.mean(0), x.var(0)
        keep = 0 if mode == "ema" and step == 0 else 0.75
        mean, var = (keep * a + (1 - keep) * b for a, b in zip((mean, var), own, strict=True))
        used = (mean, var) if mode == "ema" else own
        assert_close(out, normalized(x, *used), atol=1e-4)

    names = {"batch": layer.batch_state_index, "ema": layer.ema_state_index}
    assert [kind for kind, index in names.items() if index is layer.state_index] == [mode]
    share = 1 if mode == "ema" else 1 - 0.75**2
    expected = normalized(x, mean / share, var / share)
    assert_close(layer(jnp.asarray(x), state, inference=True)[0], expected, atol=1e-4)


def test_the_variance_does_not_cancel():
    """A large mean costs no accuracy: 1e4 + (-1, 1) becomes (-1, 1)."""
    layer, state = nn.make_with_state(nn.BatchNorm)(1, eps=0.0)
    assert_close(layer(jnp.array([[1e4 - 1], [1e4 + 1]]), state)[0], [[-1], [1]])


def test_as_many_examples_on_a_device_as_channels():
    """A part of a batch was taken for one example, and was normalized along the wrong axis."""
    layer, state = nn.make_with_state(nn.BatchNorm)(3, "data")
    specs = {"in_specs": (P("data"), P()), "out_specs": (P("data"), P())}
    call = pm.filter_shard_map(lambda x, s: layer(x, s), mesh=MESH, **specs)
    with pytest.raises(ShapeError, match="channel_axis"):
        call(jnp.ones((3 * MESH.shape["data"], 3)), state)


def loss(call, x, state):
    """A number that depends on each output, and the result of the call."""
    out, state = call(x, state)
    return jnp.sum(jnp.sin(out)), (out, state)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["torch", "batch", "ema"])
def test_the_parts_of_a_batch_on_a_mesh_are_normalized_as_one(mode):
    """With channel_axis a layer takes a part and reduces over a mesh axis, under defaults.

    There are as many examples in a part as channels.
    """
    layer, state = nn.make_with_state(nn.BatchNorm)(2, "data", channel_axis=1, mode=mode)
    whole, whole_state = nn.make_with_state(nn.BatchNorm)(2, mode=mode)
    x = jnp.asarray(wave(8, 2, 3))
    specs = {"in_specs": (P("data"), P()), "out_specs": (P("data"), P())}
    call = pm.filter_shard_map(lambda x, s: layer(x, s), mesh=MESH, **specs)

    found = jax.grad(loss, 1, has_aux=True)(call, x, state)
    expected = jax.grad(loss, 1, has_aux=True)(whole, x, whole_state)

    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(own, other)


@pytest.mark.parametrize("axis", [0, 2, -1, -2])
@pytest.mark.sampled
def test_channels_may_stand_anywhere(axis):
    """Counted from the front or from the back; all other axes are the batch."""
    x = wave(4, 3, 2)
    size = x.shape[axis]
    layer, state = nn.make_with_state(nn.BatchNorm)(size, channel_axis=axis)
    whole, whole_state = nn.make_with_state(nn.BatchNorm)(size)

    out, state = layer(jnp.asarray(x), state)
    moved, after = whole(jnp.moveaxis(jnp.asarray(x), axis, 1), whole_state)

    assert_close(out, jnp.moveaxis(moved, 1, axis))
    assert_close(state.get(layer.state_index)[1], after.get(whole.state_index)[1])


def test_no_gradient_flows_into_running_statistics():
    """For autodiff they do not depend on the batch; the result does."""
    layer, state = nn.make_with_state(nn.BatchNorm)(3)

    def number(x, of):
        out, after = layer(x, state.restored())
        return sum(map(jnp.sum, after.get(layer.state_index))) if of else jnp.sum(jnp.sin(out))

    def by_hand(x):
        centered = x - x.mean(0, keepdims=True)
        return jnp.sum(jnp.sin(centered / jnp.sqrt(x.var(0, keepdims=True) + 1e-5)))

    x = jnp.asarray(wave(4, 3))
    assert not jax.grad(number)(x, True).any()
    assert_close(jax.grad(number)(x, False), jax.grad(by_hand)(x), atol=1e-5)
