"""Layers with State, keys and functions; `tests/nn/test_beside_equinox.py` has all the others."""

from typing import Any

import equinox.nn._embedding as equinox_embedding
import jax
import jax.numpy as jnp
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
    return jax.random.key(seed)


def described(layer, names=""):
    """The arrays of a layer by path and shape, and these attributes."""
    arrays = [leaf for leaf in jax.tree.leaves(layer) if isinstance(leaf, jax.Array)]
    shapes = dict(zip(array_paths(layer), [a.shape for a in arrays], strict=True))
    return shapes, {name: getattr(layer, name) for name in names.split()}


@same_under_both_imports
def test_norms_hand_a_state_on(eqx):
    """A State that is passed comes back."""
    layer = eqx.nn.LayerNorm(4)
    state = eqx.nn.State(layer)
    y, after = layer(ramp(4), state)
    z, last = eqx.nn.GroupNorm(2, 4)(ramp(4, 3), after)
    return y, z, last is state


@pytest.mark.parametrize("out_size", [3, "scalar"])
@same_under_both_imports
def test_mlp_with_activations_that_are_learnt(eqx, out_size):
    """A copy for each neuron of each layer, which sees one number."""

    class Slope(eqx.Module):
        factor: jax.Array
        shape: Any = "leaky"

        def __call__(self, x):
            return jax.lax.cond(x > 0, lambda x: x, lambda x: self.factor * x, x)

    slopes = Slope(jnp.array(0.1)), eqx.Partial(jnp.multiply, jnp.float32(2.0))
    fresh = eqx.nn.MLP(2, out_size, 4, 3, *slopes, key=key())
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
        described(model),
        jax.tree.leaves(found),
    )


ROTARY = {
    "plain": ((4,), {}, (5, 4)),
    "base": ((6, 100.0), {}, (3, 6)),
    "half": ((4,), {"dtype": jnp.float16}, (5, 4)),
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


BATCH_NORM = {
    "vectors": ((4, 3), 3, {}),
    "images": ((3, 2, 4, 4), 2, {}),
    "momentum": ((4, 3), 3, {"momentum": 0.5, "eps": 0.1}),
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
