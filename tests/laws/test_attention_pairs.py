"""Attention with two things at a time: each pair gives what the formulas give without the library.

What goes wrong goes wrong where two features meet that each know only themselves.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.helpers.attending import attention

SIZE, HEADS, TIME, WINDOW, DEPTH, MEMBERS = 8, 2, 6, 3, 2, 2
FEATURES = (
    "cache",
    "window",
    "rotary",
    "precision",
    "Stack",
    "Ensemble",
    "LoRA",
    "capture",
    "checkpoint",
)
PROJECTIONS = ("query_proj", "key_proj", "value_proj", "output_proj")
# Neither has to do with the other, nor with how attention is computed.
RARE = {"precision", "LoRA", "capture", "checkpoint"}
PAIRS = [
    pytest.param(set(pair), id="-".join(pair), marks=[pytest.mark.slow] * RARE.issuperset(pair))
    for pair in itertools.combinations(FEATURES, 2)
]


# ---- by the library


def layer_with(features, *, key):
    """One layer."""
    layer = nn.MultiheadAttention(
        HEADS,
        SIZE,
        is_causal=True,
        window=WINDOW if "window" in features else None,
        rotary=nn.RotaryPositionalEmbedding(SIZE // HEADS) if "rotary" in features else None,
        cache_size=TIME if "cache" in features else None,
        key=key,
    )
    if "LoRA" not in features:
        return layer
    layer = pm.lora(layer, nn.Linear, 2, key=key, alpha=3.0)
    # As if it had been trained: a new one reads as its base.
    return pm.tree_at(
        "*.weight.b", layer, replace_fn=lambda b: 0.5 * jax.random.normal(key, b.shape)
    )


def model_with(features):
    """The layer, or several of it, of several models."""
    make = partial(layer_with, features)
    if "Stack" in features:
        make = partial(lambda make, *, key: nn.Stack(make, DEPTH, key=key), make)
    if "Ensemble" in features:
        make = partial(lambda make, *, key: nn.Ensemble(make, MEMBERS, key=key), make)
    model = make(key=jax.random.key(0))
    if "precision" in features:
        model = pm.with_precision(model, "params=float32,compute=bfloat16,output=float32")
    return model


def run(features, model, state, x):
    """What is found at all places; with a cache, half of them at a time."""
    call = pm.filter_checkpoint(model) if "checkpoint" in features else model
    if "cache" not in features:
        return call(x), state
    first, state = call(x[: TIME // 2], state)
    second, state = call(x[TIME // 2 :], state)
    return jnp.concatenate([first, second], -2), state


# ---- by hand


def weights_of(model, features):
    """The four matrices, with all leading axes, from nothing but the arrays by their names."""
    leaves = dict(pm.named_leaves(model))

    def matrix(name):
        (path,) = {
            path[: path.index(".weight")] for path in leaves if f"{name}.weight" in f".{path}"
        }
        if "LoRA" not in features:
            return leaves[f"{path}.weight"]
        base, a, b = (leaves[f"{path}.weight.{part}"] for part in ("base", "a", "b"))
        return base + 3.0 / 2 * jnp.einsum("...mr,...rn->...mn", b, a)

    return [matrix(name) for name in PROJECTIONS]


def one_layer(weights, x, features):
    """Of one layer."""
    window = WINDOW if "window" in features else None
    return attention(weights, x, HEADS, window=window, is_rotary="rotary" in features)


def by_hand(weights, x, features):
    """What each layer gives, one after the other, for each model."""
    if "Ensemble" in features:
        rest = features - {"Ensemble"}
        each = [by_hand([w[i] for w in weights], x, rest) for i in range(MEMBERS)]
        return [jnp.stack(outs) for outs in zip(*each, strict=True)]
    if "Stack" not in features:
        return [one_layer(weights, x, features)]
    outs = []
    for i in range(DEPTH):
        outs.append(one_layer([w[i] for w in weights], outs[-1] if outs else x, features))
    return outs


# ---- both


@pytest.mark.parametrize("features", PAIRS)
def test_two_features_of_attention_give_what_the_formulas_give(features):
    """Values and, by x, derivatives; what is captured is what each layer gives."""
    model, state = pm.make_with_state(model_with)(features)
    weights = weights_of(model, features)
    x = jnp.sin(jnp.arange(1.0, 1 + TIME * SIZE)).reshape(TIME, SIZE)
    tolerance = 6e-2 if "precision" in features else 2e-5

    @pm.filter_jit
    def ours(model, state, x):
        call = partial(run, features)

        def found(x):
            if "capture" not in features:
                out, after = call(model, state, x)
                return out, (after, {})
            (out, after), seen = pm.capture(call, nn.MultiheadAttention)(model, state, x)
            return out, (after, seen)

        out, pull, aux = jax.vjp(found, x, has_aux=True)
        return out, *pull(jnp.cos(out)), *aux

    out, slope, _, seen = ours(model, state, x)
    layers, pull = jax.vjp(lambda x: by_hand(weights, x, features), x)
    (expected_slope,) = pull([*map(jnp.zeros_like, layers[:-1]), jnp.cos(layers[-1])])
    if "precision" in features:
        assert out.dtype == jnp.float32
        assert np.abs(out - layers[-1]).max() > 0, "nothing was rounded"
    np.testing.assert_allclose(out, layers[-1], atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(slope, expected_slope, atol=5 * tolerance, rtol=tolerance)
    if "capture" in features:
        shown = jnp.concatenate(list(seen.values()), -2)
        expected = jnp.stack(layers) if "Stack" in features else layers[0]
        np.testing.assert_allclose(shown, expected, atol=tolerance, rtol=tolerance)


def test_the_formulas_tell_the_features_apart():
    """Each changes the numbers, or the test above would show nothing."""
    model = model_with({"LoRA"})
    x = jnp.sin(jnp.arange(1.0, 1 + TIME * SIZE)).reshape(TIME, SIZE)
    weights = weights_of(model, {"LoRA"})
    plain = by_hand(weights, x, set())[0]

    for other in ("window", "rotary"):
        assert np.abs(by_hand(weights, x, {other})[0] - plain).max() > 1e-2
    bases = [getattr(model, name).weight for name in PROJECTIONS]
    np.testing.assert_allclose(bases, weights, rtol=1e-5)
