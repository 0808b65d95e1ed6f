"""`MultiheadAttention` without a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError
from tests.nn.numbers_to_compare import assert_close, wave

KEY = jax.random.key(0)


def make(*args, **options):
    """A layer of two heads for sequences of size four, if nothing else is said."""
    return nn.MultiheadAttention(*(args or (2, 4)), **options, key=KEY)


@pm.filter_jit
def call(layer, *args, **options):
    """A call, compiled as one: operation by operation takes ten times as long."""
    return layer(*args, **options)


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
    layer = make(
        4, 8, num_kv_heads=kv_heads, is_causal=causal, window=window, implementation=implementation
    )  # fmt: skip
    x, bias = wave(2, 5, 8), wave(4, 5, 5, phase=1)
    mask = wave(5, 5) > -1 if masked else np.ones((5, 5), bool)
    mask = mask | np.eye(5, dtype=bool)
    given = {"mask": jnp.asarray(mask)} if masked else {}

    found = call(layer, jnp.asarray(x), bias=jnp.asarray(bias)[None], **given)

    assert_close(found, by_hand(layer, x, allowed_places(mask, causal, window), bias))


def test_masks_for_all_for_heads_and_for_examples():
    layer, x = make(), jnp.asarray(wave(3, 5, 4))
    mask = np.asarray(wave(3, 2, 5, 5) > -1) | np.eye(5, dtype=bool)

    assert_close(call(layer, x, x, x, mask), jax.vmap(layer)(x, x, x, mask))
    same = jnp.stack([call(layer, x[i], mask=mask[0]) for i in range(3)])
    assert_close(call(layer, x, mask=mask[:1]), same)
    assert_close(
        call(layer, x, mask=mask[0, 0])[1], call(layer, x[1], mask=jnp.asarray([mask[0, 0]] * 2))
    )
    narrow = make(2, 4, vo_size=3, implementation="xla")
    assert_close(call(narrow, x), call(narrow.replace(implementation=None), x))
    xla = layer.replace(implementation="xla")
    for part in (mask, mask[:, :1], mask[:1], mask[0, 0]):
        assert_close(
            call(xla, x, mask=part, is_causal=True), call(layer, x, mask=part, is_causal=True)
        )


def test_a_bias_is_an_array_or_a_function_of_positions():
    """A very negative one hides the same as a mask."""
    layer, x = make(), jnp.asarray(wave(3, 5, 4))
    hidden = np.triu(np.full((5, 5), -1e9, "f4"), 1)
    expected = call(make(2, 4, is_causal=True), x)

    def by_places(query, key):
        return jnp.where(key[None] > query[:, None], -1e9, 0.0)

    assert_close(call(layer, x, is_causal=True), expected)
    assert_close(call(layer, x, bias=hidden), expected)
    assert_close(call(layer, x, bias=by_places), expected)
    assert_close(call(layer, x, bias=lambda q, k: by_places(q, k)[None]), expected)
    assert_close(call(layer, x, bias=np.broadcast_to(hidden, (3, 1, 5, 5))), expected)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.int32])
@pytest.mark.sampled
def test_lengths_hide_what_fills_up(dtype):
    """Of any integers: positions had their dtype, and some after the end were seen."""
    layer, x = make(4, 8, num_kv_heads=2), jnp.asarray(wave(2, 300, 8))
    lengths = jnp.array([3, 100], dtype)
    found = call(layer, x, lengths=lengths)

    for i, n in enumerate((3, 100)):
        assert_close(found[i, :n], call(layer, x[i, :n]))
    assert_close(call(layer, x, mask=jnp.ones((300, 300), bool), lengths=lengths), found)
    assert_close(call(layer, x[:, :50], lengths=lengths)[1], call(layer, x[1, :50]))


def test_what_is_masked_makes_no_difference():
    """To the last bit, in the result and in the gradient."""
    layer, x = make(), jnp.asarray(wave(5, 4))
    mask = np.ones((5, 5), bool)
    mask[:, -1] = False

    @jax.jit
    def loss(keys):
        return jnp.sum(layer(x, keys, mask=mask))

    other = x.at[-1].add(9)
    assert loss(x) == loss(other)
    grad = jax.jit(jax.grad(loss))
    assert grad(x).tolist() == grad(other).tolist()
    assert not grad(x)[-1].any()


def test_a_query_that_may_see_nothing_sees_all_alike():
    """And nothing is NaN, the gradient neither."""
    layer, x = make(), jnp.asarray(wave(5, 4))

    @jax.jit
    def seen(x):
        return layer(x, mask=jnp.zeros((5, 5), bool))

    mean = layer.output_proj(layer.value_proj(x).mean(0))
    assert_close(seen(x), jnp.broadcast_to(mean, (5, 4)))
    assert np.isfinite(jax.jit(jax.grad(lambda x: seen(x).sum()))(x)).all()


@pytest.mark.parametrize("name", ["rms", "layer"])
@pytest.mark.sampled
def test_queries_and_keys_are_normalized_by_heads(name):
    """Then rotated: the magnitude of the input makes no difference."""
    layer = make(2, 8, qk_norm=name, rotary=nn.RotaryPositionalEmbedding(4))
    kinds = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
    assert (type(layer.query_norm), layer.key_norm.weight.shape) == (kinds[name], (4,))
    assert layer.query_norm.bias is layer.key_norm.bias is None
    x, value = jnp.asarray(wave(5, 8)), jnp.asarray(wave(5, 8, phase=1))
    found = []
    layer(x, process_heads=lambda *heads: (found.extend(heads), heads)[1])

    assert_close((found[0] ** 2).mean(-1), np.ones((5, 2)), rtol=2e-2)
    assert_close(
        call(layer, 100 * x, 100 * x, value),
        call(layer, 10 * x, 10 * x, value),
        rtol=1e-2,
        atol=1e-3,
    )
    assert not np.allclose(call(layer, x), call(layer.replace(rotary=None), x))


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
    assert not np.any(make(2, 4, dropout_p=1)(x, key=KEY))
    with pytest.raises(ArgumentError, match="MultiheadAttention"):
        layer(x)


def test_dropout_takes_its_keys_from_a_stream():
    """As `Dropout` does: the next one in each call; a given key has precedence."""
    layer, state = pm.make_with_state(make)(2, 4, dropout_p=0.5, stream=pm.RngStream())
    state, x = state.seed(KEY), jnp.asarray(wave(5, 4))
    key, _ = state.restored().next_key(layer.dropout.stream)

    first, state = layer(x, x, x, state=state)
    second, state = layer(x, state)
    third, state = layer(x, state, key=key)
    assert_close(first, layer(x, key=key))
    assert not np.allclose(first, second)
    assert_close(third, first)
    before = jax.tree.leaves(state)
    out, state = nn.inference_mode(layer)(x, state)
    assert_close(out, make()(x))
    assert all(a is b for a, b in zip(jax.tree.leaves(state), before, strict=True))
    with pytest.raises(ArgumentError, match="State with its stream"):
        layer(x)
