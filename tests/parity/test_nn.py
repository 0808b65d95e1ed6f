"""Layers: the same weights give the same numbers, under the same names and signatures."""

import warnings
from typing import Any

import equinox.nn._embedding as equinox_embedding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity.helpers import (
    array_paths,
    caught,
    ramp,
    same_under_both_imports,
    with_known_weights,
)

# Everything here compiles twice, so it is slow. The features have their own tests.
pytestmark = pytest.mark.slow


def key(seed=0):
    """A fixed key."""
    return jax.random.key(seed)


def described(layer, names):
    """The arrays of a layer by path and shape, and its public attributes."""
    arrays = [leaf for leaf in jax.tree.leaves(layer) if isinstance(leaf, jax.Array)]
    shapes = dict(zip(array_paths(layer), [a.shape for a in arrays], strict=True))
    return shapes, {name: getattr(layer, name) for name in names.split()}


LINEAR = {
    "plain": ((3, 2), {}),
    "no bias": ((3, 2), {"use_bias": False}),
    "bias by position": ((3, 2, False), {}),
    "scalar in": (("scalar", 2), {}),
    "scalar out": ((3, "scalar"), {}),
    "half": ((3, 2), {"dtype": jnp.float16}),
    "empty": ((0, 2), {}),
}


@pytest.mark.parametrize("case", LINEAR)
@same_under_both_imports
def test_linear(eqx, case):
    """`W x + b`, with "scalar" sizes, without bias, in other dtypes."""
    args, options = LINEAR[case]
    layer = with_known_weights(eqx.nn.Linear(*args, **options, key=key()))
    x = jnp.float32(2.0) if args[0] == "scalar" else ramp(args[0])
    x = x.astype(options.get("dtype", jnp.float32))
    names = "in_features out_features use_bias"
    return layer(x), layer(x, key=key()), layer.bias is None, described(layer, names)


CONV = {
    "plain": ("Conv2d", (2, 3, 3), {}, (2, 5, 6)),
    "1d": ("Conv1d", (2, 3, 2), {}, (2, 5)),
    "3d": ("Conv3d", (1, 2, 2), {}, (1, 3, 4, 3)),
    "sizes for each axis": ("Conv2d", (2, 3, (1, 3)), {"stride": (2, 1)}, (2, 5, 6)),
    "stride": ("Conv2d", (2, 3, 3), {"stride": 2}, (2, 5, 6)),
    "padding": ("Conv2d", (2, 3, 3), {"padding": 1}, (2, 5, 6)),
    "padding for each axis": ("Conv2d", (2, 3, 3), {"padding": (0, 2)}, (2, 5, 6)),
    "padding in pairs": ("Conv2d", (2, 3, 3), {"padding": ((0, 1), (2, 0))}, (2, 5, 6)),
    "same": ("Conv2d", (2, 3, 3), {"padding": "SAME", "stride": 2}, (2, 5, 6)),
    "same lower": ("Conv2d", (2, 3, 3), {"padding": "SAME_LOWER", "stride": 2}, (2, 5, 6)),
    "valid": ("Conv1d", (2, 3, 2), {"padding": "VALID"}, (2, 5)),
    "dilation": ("Conv2d", (2, 3, 3), {"dilation": 2}, (2, 5, 6)),
    "groups": ("Conv2d", (4, 6, 2), {"groups": 2}, (4, 4, 4)),
    "depthwise": ("Conv1d", (3, 3, 2), {"groups": 3}, (3, 5)),
    "no bias": ("Conv2d", (2, 3, 3), {"use_bias": False}, (2, 5, 6)),
    "reflect": ("Conv2d", (2, 3, 3), {"padding": 1, "padding_mode": "REFLECT"}, (2, 5, 6)),
    "replicate": ("Conv2d", (2, 3, 3), {"padding": 1, "padding_mode": "REPLICATE"}, (2, 5, 6)),
    "circular": ("Conv1d", (1, 2, 3), {"padding": 1, "padding_mode": "CIRCULAR"}, (1, 4)),
    "lower case mode": ("Conv1d", (1, 2, 3), {"padding": 1, "padding_mode": "reflect"}, (1, 4)),
    "by position": ("Conv2d", (2, 3, 3, 2, 1), {}, (2, 5, 6)),
}


@pytest.mark.parametrize("case", CONV)
@same_under_both_imports
def test_convolution(eqx, case):
    """Channels first, one example, every option."""
    name, args, options, shape = CONV[case]
    layer = with_known_weights(getattr(eqx.nn, name)(*args, **options, key=key()))
    names = "num_spatial_dims in_channels out_channels kernel_size stride dilation groups use_bias"
    return layer(ramp(*shape)), layer(ramp(*shape), key=key()), described(layer, names)


@same_under_both_imports
def test_a_convolution_that_is_only_held(eqx):
    """It may have groups that no call could use."""
    layer = eqx.nn.Conv1d(4, 3, 2, groups=2, key=key())
    return layer.groups, layer.weight.shape, caught(lambda: layer(ramp(4, 5)))


@pytest.mark.parametrize("name", ["StateIndex", "SpectralNorm", "WeightNorm"])
@same_under_both_imports
def test_generic_classes_can_be_subscripted(eqx, name):
    """At run time too, as in an annotation that is evaluated, or a base class."""
    kind = getattr(eqx.nn, name)

    class Layer(eqx.Module):
        part: kind[jax.Array]  # pyright: ignore[reportInvalidTypeForm]

    return kind[jax.Array].__origin__ is kind, list(Layer.__dataclass_fields__)


POOL = {
    "plain": ((2,), {}, (2, 5, 6)),
    "stride": ((2,), {"stride": 2}, (2, 5, 6)),
    "for each axis": (((1, 3),), {"stride": (2, 1)}, (2, 5, 6)),
    "padding": ((3,), {"stride": 2, "padding": 1}, (1, 5, 5)),
    "padding in pairs": ((3,), {"padding": ((0, 1), (1, 0))}, (1, 5, 5)),
    "ceil": ((2,), {"stride": 2, "use_ceil": True}, (1, 5, 7)),
    "by position": ((3, 2, 1, True), {}, (1, 6, 6)),
}


@pytest.mark.parametrize("case", POOL)
@pytest.mark.parametrize("name", ["MaxPool2d", "AvgPool2d"])
@same_under_both_imports
def test_pooling(eqx, name, case):
    """Windows over the two last axes, with default stride 1."""
    args, options, shape = POOL[case]
    layer = getattr(eqx.nn, name)(*args, **options)
    return layer(jnp.sin(9 * ramp(*shape))), layer(ramp(*shape), key=key()), array_paths(layer)


CONV_TRANSPOSE = {
    "general": ("ConvTranspose", (2, 2, 3, 3, 2, 1, 1), {}, (2, 3, 2)),
    "1d": ("ConvTranspose1d", (2, 3, 2), {}, (2, 5)),
    "2d": ("ConvTranspose2d", (2, 3, (3, 2), 3, (2, 1), 1), {}, (2, 3, 2)),
    "3d": ("ConvTranspose3d", (1, 2, 2), {}, (1, 2, 3, 2)),
    "padding in pairs": ("ConvTranspose2d", (2, 3, 3), {"padding": ((0, 1), (2, 0))}, (2, 3, 4)),
    "same": ("ConvTranspose1d", (2, 3, 4, 2, 1), {"padding": "SAME"}, (2, 5)),
    "same lower": ("ConvTranspose1d", (2, 3, 4), {"padding": "SAME_LOWER", "stride": 3}, (2, 5)),
    "same, larger strides": ("ConvTranspose1d", (2, 3, 1, 3), {"padding": "SAME"}, (2, 5)),
    "valid": ("ConvTranspose1d", (2, 3, 2, 2, 1), {"padding": "VALID"}, (2, 5)),
    "dilation": ("ConvTranspose2d", (2, 3, 3), {"dilation": (2, 3)}, (2, 3, 2)),
    "groups": ("ConvTranspose2d", (4, 6, 2), {"groups": 2}, (4, 3, 2)),
    "no bias": ("ConvTranspose1d", (2, 3, 2), {"use_bias": False}, (2, 5)),
    "circular": (
        "ConvTranspose1d",
        (2, 3, 4, 2),
        {"padding": "SAME", "padding_mode": "circular"},
        (2, 3),
    ),
}


@pytest.mark.parametrize("case", CONV_TRANSPOSE)
@same_under_both_imports
def test_transposed_convolution(eqx, case):
    """Channels first, one example, every option; and the numbers that a key gives."""
    name, args, options, shape = CONV_TRANSPOSE[case]
    fresh = getattr(eqx.nn, name)(*args, **options, key=key())
    layer = with_known_weights(fresh)
    names = "num_spatial_dims in_channels out_channels kernel_size stride padding output_padding"
    names += " dilation groups use_bias padding_mode"
    return fresh.weight, fresh.bias, layer(ramp(*shape)), described(layer, names)


@pytest.mark.parametrize(
    "options",
    [
        {"output_padding": 1},
        {"groups": 3},
        {"padding_mode": "REFLECT"},
        {"padding_mode": "CIRCULAR"},
    ],
)
@same_under_both_imports
def test_transposed_convolution_that_cannot_be(eqx, options):
    """Refused by both, when it is made."""
    return caught(lambda: eqx.nn.ConvTranspose1d(2, 2, 3, **options, key=key())) is not None


@pytest.mark.parametrize("kind", ["AdaptiveAvgPool", "AdaptiveMaxPool"])
@pytest.mark.parametrize(("target", "shape"), [(2, (2, 4, 5)), ((3, 2), (1, 7, 2)), (1, (1, 3, 2))])
@same_under_both_imports
def test_adaptive_pooling(eqx, kind, target, shape):
    """Sizes that divide and sizes that do not; the general layer takes any function."""
    x = jnp.sin(9 * ramp(*shape))
    layer = getattr(eqx.nn, f"{kind}2d")(target)
    general = eqx.nn.AdaptivePool(target, 2, jnp.median)
    flat = getattr(eqx.nn, f"{kind}1d")(1)(x[:, 0])
    deep = getattr(eqx.nn, f"{kind}3d")(1)(x[None])
    return layer(x), layer(x, key=key()), general(x), flat, deep, tuple(layer.target_shape)


@pytest.mark.parametrize("alpha", [None, 0.1, "array"])
@same_under_both_imports
def test_prelu(eqx, alpha):
    """One slope, or one for each entry of the last axis."""
    layer = eqx.nn.PReLU(*() if alpha is None else (ramp(3) if alpha == "array" else alpha,))
    x = ramp(2, 3) - 0.4
    return layer(x), np.asarray(layer.negative_slope), array_paths(layer)


RMS_NORM = {
    "int": ((4,), {}, (4,)),
    "tuple": (((2, 3),), {}, (2, 3)),
    "eps": ((4,), {"eps": 0.1}, (4,)),
    "no weight": ((4,), {"use_weight": False}, (4,)),
    "neither": ((4, 1e-5, False, False), {}, (4,)),
}


@pytest.mark.parametrize("case", RMS_NORM)
@same_under_both_imports
def test_rms_norm(eqx, case):
    """Divided by the root mean square over the shape, then weight and bias; in half precision."""
    args, options, shape = RMS_NORM[case]
    fresh = eqx.nn.RMSNorm(*args, **options)
    layer = with_known_weights(fresh)
    x = jnp.sin(5 * ramp(*shape))
    names = "shape eps use_weight use_bias"
    half = fresh(100 * x.astype(jnp.float16)) if case == "neither" else None
    return fresh(x), layer(x), layer(x, key=key()), half, described(layer, names)


MLP: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 4, 2), {}),
    "no hidden layer": ((2, 3, 4, 0), {}),
    "one hidden layer": ((2, 3, 4, 1), {}),
    "tanh": ((2, 3, 4, 2), {"activation": jnp.tanh}),
    "final activation": ((2, 3, 4, 2), {"final_activation": jax.nn.softplus}),
    "no bias": ((2, 3, 4, 2), {"use_bias": False}),
    "no final bias": ((2, 3, 4, 2), {"use_final_bias": False}),
    "scalars": (("scalar", "scalar", 4, 1), {}),
    "half": ((2, 3, 4, 1), {"dtype": jnp.float16}),
    "lambda": ((2, 3, 4, 2), {"activation": lambda x: x**2}),
    "scan": ((2, 3, 4, 3), {"scan": True}),
    "scan of none": ((2, 3, 4, 1), {"scan": True}),
    "scan without hidden layers": ((2, 3, 4, 0), {"scan": True}),
}


@pytest.mark.parametrize("case", MLP)
@same_under_both_imports
def test_mlp(eqx, case):
    """Linear layers with an activation between them, at the same paths."""
    args, options = MLP[case]
    model = with_known_weights(eqx.nn.MLP(*args, **options, key=key()))
    x = jnp.float32(0.5) if args[0] == "scalar" else ramp(2)
    x = x.astype(options.get("dtype", jnp.float32))
    names = "in_size out_size width_size depth use_bias use_final_bias scan"
    return model(x), model(x, key=key()), described(model, names)


@pytest.mark.parametrize("out_size", [3, "scalar"])
@pytest.mark.parametrize("scan", [False, True])
@same_under_both_imports
def test_mlp_with_activations_that_are_learnt(eqx, scan, out_size):
    """A copy for each neuron of each layer, which sees one number."""

    class Slope(eqx.Module):
        factor: jax.Array
        shape: Any = "leaky"

        def __call__(self, x):
            return jax.lax.cond(x > 0, lambda x: x, lambda x: self.factor * x, x)

    slopes = Slope(jnp.array(0.1)), eqx.Partial(jnp.multiply, jnp.float32(2.0))
    fresh = eqx.nn.MLP(2, out_size, 4, 3, *slopes, scan=scan, key=key())
    model = with_known_weights(fresh)

    @eqx.filter_jit
    @eqx.filter_grad
    def grads(model, x):
        return jnp.sum(eqx.filter_vmap(model)(x) ** 2)

    found = eqx.filter(grads(model, ramp(5, 2)), eqx.is_array)
    return (
        model(ramp(2)),
        fresh.activation.factor,
        fresh.final_activation.args,
        described(model, ""),
        jax.tree.leaves(found),
    )


LAYER_NORM = {
    "int": ((4,), {}, (4,)),
    "tuple": (((2, 3),), {}, (2, 3)),
    "scalar": (((),), {}, ()),
    "eps": ((4,), {"eps": 0.1}, (4,)),
    "no weight": ((4,), {"use_weight": False}, (4,)),
    "no bias": ((4,), {"use_bias": False}, (4,)),
    "neither": ((4,), {"use_weight": False, "use_bias": False}, (4,)),
}


@pytest.mark.parametrize("case", LAYER_NORM)
@same_under_both_imports
def test_layer_norm(eqx, case):
    """Zero mean and unit variance over the shape, then weight and bias."""
    args, options, shape = LAYER_NORM[case]
    fresh = eqx.nn.LayerNorm(*args, **options)
    layer = with_known_weights(fresh)
    x = jnp.sin(5 * ramp(*shape))
    names = "shape eps use_weight use_bias"
    return fresh(x), layer(x), layer(x, key=key()), described(layer, names)


@same_under_both_imports
def test_layer_norm_in_half_precision_and_with_state(eqx):
    """Statistics are taken in float32, and a State that is passed comes back."""
    layer = eqx.nn.LayerNorm(4, dtype=jnp.float16)
    state = eqx.nn.State(layer)
    y, after = layer(ramp(4), state)
    return layer(100 * ramp(4).astype(jnp.float16)), y, after is state


GROUP_NORM = {
    "images": ((2, 4), {}, (4, 2, 3)),
    "one group": ((1, 3), {}, (3, 2)),
    "a group for each": ((3, 3), {}, (3, 2)),
    "no spatial axis": ((2, 4), {}, (4,)),
    "eps": ((2, 4, 0.1), {}, (4, 2)),
    "half": ((2, 4), {"dtype": jnp.float16}, (4, 2)),
    "any channels": ((2,), {"channelwise_affine": False}, (4, 3)),
    "no weights": ((2, 4), {"channelwise_affine": False}, (4, 3)),
}


@pytest.mark.parametrize("case", GROUP_NORM)
@same_under_both_imports
def test_group_norm(eqx, case):
    """Zero mean and unit variance in each group, then weight and bias; alone and with State."""
    args, options, shape = GROUP_NORM[case]
    fresh = eqx.nn.GroupNorm(*args, **options)
    layer, x = with_known_weights(fresh), jnp.sin(5 * ramp(*shape))
    state = eqx.nn.State(layer)
    y, after = layer(x, state)
    names = "groups channels eps channelwise_affine"
    return fresh(x), layer(x, key=key()), y, after is state, described(layer, names)


RECURRENT = {
    "GRU": ("GRUCell", (3, 2), {}),
    "GRU without biases": ("GRUCell", (3, 2), {"use_bias": False}),
    "GRU in half precision": ("GRUCell", (3, 2), {"dtype": jnp.float16}),
    "GRU without input": ("GRUCell", (0, 2), {}),
    "LSTM": ("LSTMCell", (3, 2), {}),
    "LSTM without bias": ("LSTMCell", (3, 2, False), {}),
    "LSTM in half precision": ("LSTMCell", (3, 2), {"dtype": jnp.float16}),
}


@pytest.mark.parametrize("case", RECURRENT)
@same_under_both_imports
def test_recurrent_cells(eqx, case):
    """One step, and several by a scan, with the first values of the same key."""
    name, args, options = RECURRENT[case]
    fresh = getattr(eqx.nn, name)(*args, **options, key=key(3))
    dtype = options.get("dtype", jnp.float32)
    hidden = ramp(args[1]).astype(dtype)
    start = hidden if name == "GRUCell" else (hidden, hidden / 2)
    xs = jnp.sin(5 * ramp(4, args[0])).astype(dtype)

    def run(cell):
        return jax.lax.scan(lambda carry, x: (cell(x, carry),) * 2, start, xs)

    names = "input_size hidden_size use_bias"
    known = with_known_weights(fresh)
    return fresh(xs[0], start), known(xs[0], start, key=key()), run(known), described(fresh, names)


ROTARY = {
    "plain": ((4,), {}, (5, 4)),
    "base": ((6, 100.0), {}, (3, 6)),
    "half": ((4,), {"dtype": jnp.float16}, (5, 4)),
    "empty": ((0,), {}, (3, 0)),
}


@pytest.mark.parametrize("case", ROTARY)
@same_under_both_imports
def test_rotary_positional_embedding(eqx, case):
    """Pairs across the halves, rotated by their position; the angles alone."""
    args, options, shape = ROTARY[case]
    # Equinox keeps its angles in one table for all bases; of a size and dtype it has the first.
    equinox_embedding.internal_rope_embedding_cache.clear()
    layer = eqx.nn.RotaryPositionalEmbedding(*args, **options)
    x = jnp.sin(5 * ramp(*shape)).astype(options.get("dtype", jnp.float32))
    angles = layer.precompute_freqs_cis(args[0] + 2, 3, 500.0, jnp.float32)
    names = "embedding_size theta"
    return layer(x), layer(x, key=key()), angles, layer.rotate_half(x), described(layer, names)


ATTENTION: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "plain": ((2, 4), {}),
    "all sizes": ((2, 4, 6, 3, 5, 3, 2), {}),
    "biases": ((2, 4), {"use_query_bias": True, "use_output_bias": True}),
    "other biases": ((1, 4), {"use_key_bias": True, "use_value_bias": True}),
    "dropout": ((2, 4), {"dropout_p": 0.5}),
    "no dropout any more": ((2, 4), {"dropout_p": 0.5, "inference": True}),
}


@pytest.mark.parametrize("case", ATTENTION)
@same_under_both_imports
def test_multihead_attention(eqx, case):
    """One key for the same weights; masks, dropout by a key, and heads that are processed."""
    args, options = ATTENTION[case]
    layer = eqx.nn.MultiheadAttention(*args, **options, key=key())
    sizes = layer.query_size, layer.key_size, layer.value_size
    lengths = (5, 3, 3)
    given = [jnp.sin(3 * ramp(n, size)) for n, size in zip(lengths, sizes, strict=True)]
    heads = []

    def process_heads(query, key, value):
        heads.extend([query.shape, key.shape, value.shape])
        return 2 * query, key[::-1], value

    mask = jnp.arange(15).reshape(5, 3) % 4 != 0
    names = (
        "num_heads query_size key_size value_size output_size qk_size vo_size "
        "use_query_bias use_key_bias use_value_bias use_output_bias"
    )
    return (
        jax.tree.leaves(eqx.filter(layer, eqx.is_inexact_array)),
        layer(*given, key=key(1)),
        layer(*given, mask, inference=True),
        layer(*given, mask=jnp.stack([mask, ~mask][: args[0]]), key=key(1)),
        layer(*given, key=key(1), process_heads=process_heads),
        heads,
        described(layer, names),
        layer.dropout.p,
    )


@same_under_both_imports(equinox_warns=".*deterministic")
def test_attention_takes_an_older_name(eqx):
    """`deterministic`, in a call."""
    layer = eqx.nn.MultiheadAttention(2, 4, dropout_p=0.5, key=key())
    x = ramp(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return layer(x, x, x, deterministic=True), layer(x, x, x, inference=True)


BATCH_NORM = {
    "vectors": ((4, 3), 3, {}),
    "images": ((3, 2, 4, 4), 2, {}),
    "momentum": ((4, 3), 3, {"momentum": 0.5}),
    "eps": ((4, 3), 1, {"eps": 0.1}),
    "no weights": ((4, 3), 2, {"channelwise_affine": False}),
}


@pytest.mark.parametrize("case", BATCH_NORM)
@same_under_both_imports
def test_batch_norm_in_training(eqx, case):
    """With `mode="batch"`: each batch by its own statistics, and then inference by the running."""
    shape, steps, options = BATCH_NORM[case]
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        shape[1], axis_name="batch", mode="batch", **options
    )
    layer, outputs = with_known_weights(layer), []
    over_batch = {"axis_name": "batch", "in_axes": (0, None), "out_axes": (0, None)}
    for step in range(steps):
        x = jnp.sin(7 * ramp(*shape) + step) + step
        y, state = eqx.filter_vmap(layer, **over_batch)(x, state)
        # A State of ours holds no weak types.
        count = jnp.asarray(state.get(layer.batch_counter), jnp.int32)
        outputs.append((y, state.get(layer.batch_state_index), count))
        quiet = eqx.nn.inference_mode(layer)
        outputs.append(jax.vmap(quiet, **over_batch)(x, state)[0])
    names = "axis_name input_size eps channelwise_affine momentum inference mode"
    return outputs, described(layer, names)


BATCH_NORM_EMA = {
    "vectors": ((4, 3), {}),
    "images": ((3, 2, 4, 4), {"momentum": 0.5, "eps": 0.1}),
    "one example": ((1, 2, 4), {}),
    "no weights": ((4, 3), {"momentum": 0.9, "channelwise_affine": False}),
}


@pytest.mark.parametrize("case", BATCH_NORM_EMA)
@same_under_both_imports
def test_batch_norm_by_running_statistics(eqx, case):
    """`mode="ema"`: outputs, gradients and statistics of each step, and then of inference."""
    shape, options = BATCH_NORM_EMA[case]
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        shape[1], axis_name="batch", mode="ema", **options
    )
    layer, found = with_known_weights(layer), []
    over_batch = {"axis_name": "batch", "in_axes": (0, None), "out_axes": (0, None)}

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def loss(x, layer, state):
        y, state = jax.vmap(layer, **over_batch)(x, state)
        # Twice, so that a gradient goes through the statistics of the first call, too.
        y, state = jax.vmap(layer, **over_batch)(y * y, state)
        return jnp.sum(y**3), (y, state)

    for step in range(3):
        (value, (y, state)), grads = loss(jnp.sin(7 * ramp(*shape) + step) + step, layer, state)
        found.append((value, y, grads, state.get(layer.ema_state_index)))
    quiet = eqx.nn.inference_mode(layer)
    y, after = jax.vmap(quiet, **over_batch)(ramp(*shape), state)
    first = after.get(layer.ema_first_time_index)
    return found, y, bool(first), layer.batch_state_index, layer.mode


@same_under_both_imports
def test_older_names_of_arguments(eqx):
    """`Dropout(deterministic=)` and `LayerNorm(elementwise_affine=)`, with a warning."""
    with pytest.warns(UserWarning, match="deterministic"):
        dropout = eqx.nn.Dropout(0.5, deterministic=True)
    with pytest.warns(UserWarning, match="deterministic"):
        y = eqx.nn.Dropout(0.5)(ramp(3), deterministic=True)
    with pytest.warns(UserWarning, match="elementwise_affine"):
        norm = eqx.nn.LayerNorm(3, elementwise_affine=False)
    return dropout.deterministic, dropout(ramp(3)), y, norm(ramp(3)), norm.weight, norm.bias


@same_under_both_imports
def test_batch_norm_for_inference_leaves_the_state_alone(eqx):
    """By `inference_mode` or by argument, the same input gives the same output again."""
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name="batch", mode="batch")
    x, over_batch = jnp.sin(7 * ramp(4, 3)), {"in_axes": (0, None), "out_axes": (0, None)}
    _, state = eqx.filter_vmap(layer, axis_name="batch", **over_batch)(x, state)
    quiet = eqx.nn.inference_mode(layer)
    first, state = eqx.filter_vmap(quiet, **over_batch)(x, state)
    second, state = eqx.filter_vmap(quiet, **over_batch)(x, state)
    by_argument = lambda x, state: layer(x, state, inference=True)  # noqa: E731
    third, _ = eqx.filter_vmap(by_argument, **over_batch)(x, state)
    facts = [bool(jnp.array_equal(first, other)) for other in (second, third)]
    assert facts == [True, True]
    return facts, first, quiet.inference


@same_under_both_imports
def test_dropout(eqx):
    """About p are dropped, and the others scaled up; the same key drops the same."""
    layer, x = eqx.nn.Dropout(0.25), ramp(4000) + 2
    y = layer(x, key=key())
    kept = y != 0
    dropped = 1 - float(jnp.mean(kept.astype(jnp.float32)))
    facts = [
        abs(dropped - 0.25) < 0.05,
        bool(jnp.allclose(y[kept], x[kept] / 0.75)),
        bool(jnp.array_equal(y, layer(x, key=key()))),
        bool(jnp.array_equal(y, layer(x, key=key(1)))),
        bool(jnp.array_equal(eqx.filter_jit(layer)(x, key=key()), y)),
    ]
    assert facts == [True, True, True, False, True]
    return facts, layer.p, layer.inference


@same_under_both_imports
def test_dropout_that_drops_nothing_or_all(eqx):
    """p of 0 and 1, inference by constructor, by argument and by `inference_mode`."""
    x = ramp(3)
    return [
        eqx.nn.Dropout(0.0)(x, key=key()),
        eqx.nn.Dropout(0)(x),
        eqx.nn.Dropout(1.0)(x, key=key()),
        eqx.nn.Dropout(0.9, inference=True)(x),
        eqx.nn.Dropout(0.9)(x, inference=True),
        eqx.nn.Dropout(1.0, inference=True)(x, key=key(), inference=False),
        eqx.nn.inference_mode(eqx.nn.Dropout(0.9))(x),
        caught(lambda: eqx.nn.Dropout(0.5)(x), about="key"),
        eqx.nn.Dropout().p,
    ]


@same_under_both_imports
def test_embedding(eqx):
    """A row of the table, made at random or given."""
    layer = with_known_weights(eqx.nn.Embedding(5, 3, key=key()))
    given = eqx.nn.Embedding(weight=ramp(4, 2))
    names = "num_embeddings embedding_size"
    many = jax.vmap(layer)(jnp.array([0, 4, 4], jnp.int32))
    return (
        layer(jnp.int32(2)),
        many,
        given(jnp.int32(1)),
        [
            described(layer, names),
            described(given, names),
            layer(np.int32(3)),
        ],
    )


@same_under_both_imports
def test_identity_and_lambda(eqx):
    """`Identity` takes anything and returns its input; `Lambda` calls its function."""
    identity = eqx.nn.Identity(3, "anything", key=1)
    double = eqx.nn.Lambda(lambda x: 2 * x)
    return identity(ramp(2)), identity("text", key=key()), double(ramp(2)), double(1, key=key())


@same_under_both_imports
def test_sequential(eqx):
    """Layers in order, as a sequence: length, index, slice, iteration, and keys for each."""
    model = eqx.nn.Sequential(
        [
            eqx.nn.Linear(2, 4, key=key(0)),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Dropout(0.0),
            eqx.nn.Identity(),
            eqx.nn.Linear(4, 3, key=key(1)),
        ]
    )
    model = with_known_weights(model)
    inner = eqx.nn.Sequential([model[:2], model[2:]])
    return [
        model(ramp(2)),
        model(ramp(2), key=key()),
        inner(ramp(2)),
        len(model),
        type(model[1]).__name__,
        type(model[1:3]).__name__,
        [type(layer).__name__ for layer in model],
        type(model.layers).__name__,
        array_paths(model),
        array_paths(inner),
        model[:2](ramp(2)),
        eqx.nn.Sequential([])(ramp(2)),
    ]


@same_under_both_imports
def test_sequential_hands_state_to_stateful_layers_only(eqx):
    """A `StatefulLayer` gets `(x, state)` and gives both back; the others see x alone."""

    class Counter(eqx.nn.StatefulLayer):
        index: eqx.nn.StateIndex

        def __init__(self):
            self.index = eqx.nn.StateIndex(jnp.int32(0))

        def __call__(self, x, state, *, key=None):
            n = state.get(self.index)
            return x + n.astype(jnp.float32), state.set(self.index, n + 1)

    def build():
        counter = Counter()
        return eqx.nn.Sequential([eqx.nn.Lambda(lambda x: 10 * x), counter, eqx.nn.Identity()])

    model, state = eqx.nn.make_with_state(build)()
    outer, outer_state = eqx.nn.make_with_state(lambda: eqx.nn.Sequential([build(), build()]))()
    results = []
    for _ in range(2):
        y, state = model(ramp(2), state)
        z, outer_state = outer(ramp(2), outer_state, key=key())
        results.append((y, z))
    plain = eqx.nn.Sequential([eqx.nn.Identity()])
    return (
        results,
        state.get(model[1].index),
        [m.is_stateful() for m in (model, outer, plain, model[1])],
        plain(ramp(2), eqx.nn.State(plain))[0],
    )


@same_under_both_imports
def test_inference_mode_reaches_every_layer(eqx):
    """Every attribute of that name is set, in custom layers too, and set back."""

    class Own(eqx.Module):
        weight: jax.Array
        inference: bool = False
        training: bool = True

    model = {"a": [eqx.nn.Dropout(0.5), Own(ramp(2))], "b": eqx.nn.Sequential([eqx.nn.Dropout()])}
    on = eqx.nn.inference_mode(model)
    off = eqx.nn.inference_mode(on, value=False)
    flags = [
        (m["a"][0].inference, m["a"][1].inference, m["a"][1].training, m["b"][0].inference)
        for m in (model, on, off)
    ]
    return flags, on["a"][1].weight, eqx.tree_inference(model, True)["a"][0].inference


WEIGHT_NORM = {
    "rows": (),
    "by name": ("bias",),
    "columns": ("weight", 1),
    "from the end": ("weight", -2),
    "whole": ("weight", None),
}


@pytest.mark.parametrize("case", WEIGHT_NORM)
@same_under_both_imports
def test_weight_norm(eqx, case):
    """Lengths along an axis, beside the layer; numbers and gradients."""
    args = WEIGHT_NORM[case]
    layer = with_known_weights(eqx.nn.WeightNorm(eqx.nn.Linear(3, 2, key=key()), *args))
    grads = eqx.filter_grad(lambda layer: jnp.sum(jnp.sin(layer(ramp(3)))))(layer)
    numbers = [leaf for leaf in jax.tree.leaves(grads) if eqx.is_array(leaf)]
    return layer(ramp(3)), layer(ramp(3), key=key()), numbers, described(layer, "weight_name axis")


@same_under_both_imports
def test_weight_norm_of_a_convolution(eqx):
    """Each filter has a length; at first the layer computes the same."""
    conv = eqx.nn.Conv2d(2, 3, 2, key=key())
    layer = eqx.nn.WeightNorm(conv)
    same = bool(jnp.allclose(layer(ramp(2, 3, 3)), conv(ramp(2, 3, 3)), atol=1e-4))
    return same, layer.g, described(layer, "axis")


@same_under_both_imports
def test_shared(eqx):
    """One array for two paths; the source may be computed; a misfit is refused."""

    def get(pair):
        return pair[0].weight

    def where(pair):
        return pair[1].weight

    pair = eqx.nn.Embedding(5, 3, key=key()), eqx.nn.Linear(3, 5, key=key())
    shared = with_known_weights(eqx.nn.Shared(pair, where, get))
    embedding, linear = shared()
    grads = eqx.filter_grad(lambda s: sum(jnp.sum(jnp.sin(m.weight)) for m in s()))(shared)
    turned = eqx.nn.Shared(
        [linear, eqx.nn.Linear(5, 3, key=key())], where, lambda pair: jnp.transpose(pair[0].weight)
    )
    misfit = caught(lambda: eqx.nn.Shared(pair, where, lambda pair: pair[0].weight[0]))
    return (
        linear.weight is embedding.weight,
        linear(embedding(jnp.array(2))),
        get(grads.pytree),
        turned()[1](ramp(5)),
        array_paths(shared),
        misfit is None,
    )
