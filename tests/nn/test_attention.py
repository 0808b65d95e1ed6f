"""`MultiheadAttention`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError, RngError, ShapeError
from tests.nn.numbers_to_compare import assert_close, wave

KEY = jax.random.key(0)


def make(*args, **options):
    """A layer of two heads for sequences of size four, if nothing else is said."""
    return nn.MultiheadAttention(*(args or (2, 4)), **options, key=KEY)


def biases(*, used):
    """The options that say whether there are biases."""
    return {f"use_{name}_bias": used for name in ("query", "key", "value", "output")}


def test_masks_for_all_for_heads_and_for_examples():
    """Each is the same as called example by example."""
    layer, x = make(), jnp.asarray(wave(3, 5, 4))
    mask = np.asarray(wave(3, 2, 5, 5) > -1) | np.eye(5, dtype=bool)

    each = jax.vmap(layer)(x, x, x, mask)
    assert_close(layer(x, x, x, mask), each)
    same = jnp.stack([layer(x[i], mask=mask[0]) for i in range(3)])
    assert_close(layer(x, mask=mask[:1]), same)
    assert_close(layer(x, mask=mask[0, 0])[1], layer(x[1], mask=jnp.asarray([mask[0, 0]] * 2)))


def test_what_is_left_out_is_what_came_before():
    """Keys are the queries, values the keys."""
    layer, x, y = make(), jnp.asarray(wave(5, 4)), jnp.asarray(wave(3, 4))

    assert layer(x).tolist() == layer(x, x, x).tolist()
    assert layer(x, y).tolist() == layer(x, y, y).tolist()


def test_heads_may_be_processed():
    """They are given and taken with the axes (..., seq, num_heads, size)."""
    layer = make(2, 4, qk_size=6, vo_size=1)
    rope, x = nn.RotaryPositionalEmbedding(6), jnp.asarray(wave(3, 5, 4))
    shapes = []

    def process_heads(query, key, value):
        shapes.extend([query.shape, key.shape, value.shape])
        return rope(query, axis=-3), rope(key, axis=-3), value

    found = layer(x, process_heads=process_heads)
    assert shapes == [(3, 5, 2, 6), (3, 5, 2, 6), (3, 5, 2, 1)]
    assert_close(found[1], layer(x[1], process_heads=process_heads))
    assert not np.allclose(found, layer(x))
    assert_close(found, layer.replace(rotary=rope)(x))


def test_dropout_is_by_the_key_and_off_in_inference():
    """The same key drops the same; a batch drops in each example otherwise; 1 drops everything."""
    layer, x = make(2, 4, dropout_p=0.5), jnp.broadcast_to(jnp.asarray(wave(5, 4)), (2, 5, 4))
    found = layer(x, key=KEY)

    assert found.tolist() == layer(x, key=KEY).tolist()
    assert not np.allclose(found[0], found[1])
    still = make()(x)
    assert_close(layer(x, inference=True), still)
    assert_close(nn.inference_mode(layer)(x), still)
    assert_close(nn.inference_mode(layer)(x, key=KEY, inference=False), found)
    assert layer.deterministic is False
    assert not np.any(make(2, 4, dropout_p=1)(x, key=KEY))


# ---- grouped heads, windows, bias, normalized queries and keys


def test_causal_and_window_are_masks():
    """By the field, by the argument, beside a mask, and by JAX's function."""
    x, places = jnp.asarray(wave(5, 4)), np.arange(5)
    band = (places[:, None] - places < 2) & (places[:, None] >= places)
    mask = np.asarray(wave(2, 5, 5) > 0) | np.eye(5, dtype=bool)
    layer = make(2, 4, is_causal=True, window=2)

    assert_close(layer(x), make()(x, mask=band))
    assert_close(layer(x, mask=mask), make()(x, mask=mask & band))
    assert_close(layer(x, is_causal=False), make()(x, mask=band | band.T))
    assert_close(make(2, 4, is_causal=True)(x), make()(x, is_causal=True))
    assert_close(layer.replace(implementation="xla")(x, mask=mask), layer(x, mask=mask))


def test_a_bias_is_added_to_the_products():
    """As an array or by positions; a very negative bias hides the same as a mask."""
    layer, x = make(), jnp.asarray(wave(3, 5, 4))
    hidden = np.triu(np.full((5, 5), -1e9, "f4"), 1)
    expected = layer(x, is_causal=True)

    def by_places(query, key):
        return jnp.where(key[None] > query[:, None], -1e9, 0.0)

    assert_close(layer(x, bias=hidden), expected)
    assert_close(layer(x, bias=by_places), expected)
    assert_close(layer(x, bias=np.broadcast_to(hidden, (3, 1, 5, 5))), expected)


@pytest.mark.parametrize("name", ["rms", "layer"])
@pytest.mark.sampled
def test_queries_and_keys_are_normalized_by_heads(name):
    """Then rotated: the magnitude of the input makes no difference."""
    layer = make(2, 8, qk_norm=name, rotary=nn.RotaryPositionalEmbedding(4))
    assert [type(layer.query_norm).__name__, layer.key_norm.weight.shape] == [
        {"rms": "RMSNorm", "layer": "LayerNorm"}[name],
        (4,),
    ]
    x, value = jnp.asarray(wave(5, 8)), jnp.asarray(wave(5, 8, phase=1))
    found = []
    layer(x, process_heads=lambda *heads: (found.extend(heads), heads)[1])
    sizes = (found[0] ** 2).mean(-1)

    assert_close(sizes, np.ones((5, 2)), rtol=2e-2)
    assert_close(layer(100 * x, 100 * x, value), layer(10 * x, 10 * x, value), rtol=1e-2, atol=1e-3)
    assert not np.allclose(layer(x), layer.replace(rotary=None)(x))


X, KEYS = jnp.ones((3, 4)), jnp.ones((5, 4))


# ---- the formula


def by_hand(layer, x, allowed, bias):
    """softmax(q k^T / sqrt(d) + bias) v for each head, by NumPy in double precision."""
    x = np.asarray(x, "f8")

    def projected(linear, heads):
        return (x @ np.asarray(linear.weight, "f8").T).reshape(*x.shape[:-1], heads, -1)

    kv_heads = layer.num_kv_heads or layer.num_heads
    query = projected(layer.query_proj, layer.num_heads)
    key, value = (projected(linear, kv_heads) for linear in (layer.key_proj, layer.value_proj))
    out = np.empty((*query.shape[:-1], value.shape[-1]))
    for head in range(layer.num_heads):
        # Neighbouring heads of queries share a head of keys.
        shared = head * kv_heads // layer.num_heads
        k, v = key[..., shared, :], value[..., shared, :]
        products = query[..., head, :] @ k.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
        products = np.where(allowed, products + bias[head], -np.inf)
        powers = np.exp(products - products.max(-1, keepdims=True))
        out[..., head, :] = powers / powers.sum(-1, keepdims=True) @ v
    return out.reshape(*x.shape[:-1], -1) @ np.asarray(layer.output_proj.weight, "f8").T


def allowed_places(mask, causal, window):
    """Where 5 queries may see 5 keys, one by one."""
    allowed = np.array(mask)
    for q, k in np.ndindex(5, 5):
        too_far = window is not None and abs(q - k) >= window
        if too_far or (causal and k > q):
            allowed[q, k] = False
    return allowed


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 2), (True, 2)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.sampled
def test_it_is_the_formula_of_its_paper(kv_heads, causal, window, masked, implementation):
    """With groups of heads, masks, windows and a bias, also by JAX's own function."""
    layer = nn.MultiheadAttention(
        4, 8, num_kv_heads=kv_heads, is_causal=causal, window=window,
        implementation=implementation, key=KEY,
    )  # fmt: skip
    x, bias = wave(2, 5, 8), wave(4, 5, 5, phase=1)
    mask = wave(5, 5) > -1 if masked else np.ones((5, 5), bool)
    mask = mask | np.eye(5, dtype=bool)
    given = {"mask": jnp.asarray(mask)} if masked else {}

    found = layer(jnp.asarray(x), bias=jnp.asarray(bias)[None], **given)

    assert_close(found, by_hand(layer, x, allowed_places(mask, causal, window), bias))


def test_the_output_projection_and_biases_may_have_other_sizes():
    """Queries, keys and values of their own sizes, by plain JAX."""
    layer = make(2, 4, 3, 6, 5, qk_size=2, vo_size=3, **biases(used=True))
    q, k, v = (jnp.asarray(wave(n, size)) for n, size in ((5, 4), (7, 3), (7, 6)))

    heads = [
        getattr(layer, f"{name}_proj")(x).reshape(len(x), 2, -1)
        for name, x in (("query", q), ("key", k), ("value", v))
    ]
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", *heads[:2]) / jnp.sqrt(2.0), -1)
    expected = layer.output_proj(jnp.einsum("hqk,khd->qhd", weights, heads[2]).reshape(5, 6))

    assert_close(layer(q, k, v), expected)


def test_what_is_masked_makes_no_difference():
    """To the last bit, in the result and in the gradient."""
    layer, x = make(), jnp.asarray(wave(5, 4))
    mask = np.ones((5, 5), bool)
    mask[:, -1] = False

    def loss(keys):
        return jnp.sum(layer(x, keys, mask=mask))

    other = x.at[-1].add(9)
    assert loss(x) == loss(other)
    assert jax.grad(loss)(x).tolist() == jax.grad(loss)(other).tolist()
    assert not jax.grad(loss)(x)[-1].any()


def test_a_query_that_may_see_nothing_sees_all_alike():
    """And nothing is NaN, the gradient neither."""
    layer, x = make(), jnp.asarray(wave(5, 4))

    def call(x):
        return layer(x, mask=jnp.zeros((5, 5), bool))

    mean = layer.output_proj(layer.value_proj(x).mean(0))
    assert_close(call(x), jnp.broadcast_to(mean, (5, 4)))
    assert np.isfinite(jax.grad(lambda x: call(x).sum())(x)).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_single(dtype):
    """Products of 150 overflow float16; sums over 600 keys stop in bfloat16."""
    layer = jax.tree.map(lambda leaf: leaf.astype(dtype), make())
    x = jnp.asarray(100 * wave(600, 4)).astype(dtype)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), layer)

    found, expected = layer(x), wide(x.astype(jnp.float32))

    assert found.dtype == dtype
    assert np.isfinite(found.astype("f4")).all()
    scale = float(jnp.abs(expected).max())
    # Large products make large differences of the weights; equal inputs have none.
    assert_close(found.astype("f4"), expected, rtol=0, atol=0.2 * scale)
    ones = jnp.ones((600, 4))
    assert_close(layer(ones.astype(dtype)).astype("f4"), wide(ones), rtol=0.02, atol=0.02)


# ---- refusals


def turned(query, key, value):
    """Heads turned as they come, or with the wrong axis mapped over."""
    rope = nn.RotaryPositionalEmbedding(2)
    turn = jax.vmap(rope, in_axes=1, out_axes=1) if query.ndim == 4 else rope
    return turn(query), turn(key), value


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8)], ids=str)
def test_the_axis_of_heads_is_not_taken_for_positions(shape):
    """They had the angle of a head; `axis=-3` says where the positions are."""
    with pytest.raises(ShapeError, match="axis=-3"):
        make(4, 8)(jnp.ones(shape), process_heads=turned)


def test_a_rotary_embedding_that_was_compiled_elsewhere_is_refused_too():
    """JAX would reuse its trace, which took the heads for positions."""
    rope = jax.jit(nn.RotaryPositionalEmbedding(4))
    rope(jnp.ones((6, 2, 4)))

    with pytest.raises(ShapeError, match="positions"):
        make(2, 8)(jnp.ones((6, 8)), process_heads=lambda q, k, v: (rope(q), rope(k), v))


X, BATCH, KEYS = jnp.ones((3, 4)), jnp.asarray(wave(2, 5, 4)), jnp.ones((5, 4))


@pytest.mark.parametrize(
    ("args", "options", "error", "word"),
    [
        # Of examples or of heads? With as many examples as heads, nobody knows.
        ((BATCH,), {"mask": jnp.ones((2, 5, 5), bool)}, ShapeError, "mask"),
        ((BATCH,), {"bias": jnp.ones((2, 5, 5))}, ShapeError, "bias"),
        ((BATCH,), {"mask": jnp.ones((2, 5), bool)}, ShapeError, "mask"),
        ((X,), {"mask": jnp.ones((3, 3))}, ArgumentError, "mask"),
        ((X,), {"bias": jnp.ones((3, 3), bool)}, ArgumentError, "bias"),
        ((X,), {"lengths": jnp.ones(2, int)}, ShapeError, "lengths"),
        ((X,), {"process_heads": lambda q, k, v: (q, k[:1], v)}, ShapeError, "process_heads"),
        ((X, X > 0), {}, ArgumentError, "key_"),
        ((X[None], KEYS), {}, ShapeError, "key_"),
        ((X, X, KEYS), {}, ShapeError, "value"),
    ],
)
def test_what_does_not_go_together_is_refused(args, options, error, word):
    """It would broadcast, or a mask would be added."""
    with pytest.raises(error, match=word):
        make()(*args, **options)


@pytest.mark.parametrize(
    "options", [{"num_kv_heads": 3}, {"rotary": nn.RotaryPositionalEmbedding(8)}, {"qk_norm": "x"}]
)
def test_what_it_cannot_be_made_of(options):
    """Heads that do not divide, angles of another size, a norm that it does not know."""
    with pytest.raises(ArgumentError, match=next(iter(options))):
        make(4, 8, **options)


def test_training_without_a_key_is_refused():
    """Dropout would be left out."""
    with pytest.raises(RngError, match="MultiheadAttention"):
        make(2, 4, dropout_p=0.5)(X)
