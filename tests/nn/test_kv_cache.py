"""Attention that continues a sequence, with a cache in the State; and `reset_cache`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, StateError
from tests.nn.numbers_to_compare import assert_close, wave

KEY = jax.random.key(0)
SLOPES = jnp.asarray([0.5, 0.25, 0.125, 0.0625])


def make(batch=(), **options):
    """Four heads for sequences of size eight, two heads of keys, room for six positions."""
    options = {"num_kv_heads": 2, "is_causal": True, "cache_size": 6, **options}
    layer, state = nn.make_with_state(nn.MultiheadAttention)(4, 8, **options, key=KEY)
    return layer, nn.reset_cache(layer, state, batch=batch)


@pm.filter_jit
def go_on(layer, x, state, lengths=None, bias=None):
    """One call with State, compiled once for all of its shapes."""
    return layer(x, state=state, lengths=lengths, bias=bias)


@pm.filter_jit
def whole(layer, x, bias=None):
    return layer(x, bias=bias)


def by_parts(layer, state, x, counts, **options):
    outs, first = [], 0
    for count in counts:
        out, state = go_on(layer, x[..., first : first + count, :], state, **options)
        outs.append(out)
        first += count
    return jnp.concatenate(outs, -2), state


def alibi(query, key):
    away = (query[..., :, None] - key[..., None, :])[..., None, :, :].astype(float)
    return -away * SLOPES.reshape((1,) * (away.ndim - 3) + (4, 1, 1))


LAYERS = {
    "plain": {},
    "multi-query, turned, normalized": {
        "num_kv_heads": 1,
        "rotary": nn.RotaryPositionalEmbedding(2, interleaved=True),
        "qk_norm": "rms",
    },
    "window": {"window": 3, "rotary": nn.RotaryPositionalEmbedding(2)},
    "window of all that there is room for": {"window": 6},
    "window of more than there is room for": {"window": 8},
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("batch", [(), (2, 1)], ids=str)
@pytest.mark.parametrize("bias", [None, alibi], ids=["", "alibi"])
@pytest.mark.sampled
def test_what_goes_on_finds_what_the_whole_finds(name, batch, bias):
    """At every position: read at once, then one at a time; with a bias by positions."""
    layer, state = make(batch, **LAYERS[name])
    x = jnp.asarray(wave(*batch, 6, 8))

    found, _ = by_parts(layer, state, x, (3, 1, 2), bias=bias)
    assert_close(found, whole(layer, x, bias))


@pytest.mark.parametrize("window", [2, None])
@pytest.mark.sampled(2)
def test_sequences_of_different_lengths_go_on_each_by_itself(window):
    """Read together with padding; then one position of each at a time."""
    layer, state = make((3,), window=window, rotary=nn.RotaryPositionalEmbedding(2))
    x, lengths = jnp.asarray(wave(3, 6, 8)), np.array([3, 1, 2])
    out, state = go_on(layer, x[:, :3], state, jnp.asarray(lengths))
    found = [[*row[:n]] for row, n in zip(out, lengths, strict=True)]
    for step in range(3):
        each = x[np.arange(3), lengths + step][:, None]
        # The second sequence ends early: its later inputs do not count.
        counts = jnp.array([1, int(step < 1), 1])
        out, state = go_on(layer, each, state, counts)
        for row, new, count in zip(found, out, counts, strict=True):
            row.extend(new[:count])

    assert [len(row) for row in found] == [6, 2, 5]
    for row, sequence in zip(found, x, strict=True):
        assert_close(jnp.stack(row), whole(layer, sequence[: len(row)]))


@pytest.mark.parametrize("counts", [(4, 4, 1), (5, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.sampled
def test_a_full_cache_gives_nan_from_where_there_is_no_room(batch, counts, window):
    """In compiled code, which cannot raise an error; earlier positions are correct."""
    layer, state = make(batch, use_output_bias=True, window=window)
    x = jnp.asarray(wave(*batch, 9, 8))
    found, _ = by_parts(layer, state, x, counts)

    assert_close(found[..., :6, :], whole(layer, x)[..., :6, :])
    assert np.isnan(found[..., 6:, :]).all()


def test_a_full_cache_is_an_error_where_that_is_known():
    """Outside of compiled code, and for a chunk that is longer than any cache."""
    layer, state = make()
    _, state = go_on(layer, jnp.ones((5, 8)), state)
    with pytest.raises(StateError, match="6 positions"):
        layer(jnp.ones((2, 8)), state=state.restored())
    with pytest.raises(StateError, match="6 positions"):
        go_on(layer, jnp.ones((7, 8)), state.restored())
    layer(jnp.ones((2, 8)), state=state, lengths=jnp.asarray(1))


@pytest.mark.parametrize("counts", [(4, 4, 1), (9,), (1, 7, 1)], ids=str)
@pytest.mark.sampled
def test_a_window_never_is_full(counts):
    """The cache has the size of the window, however long the sequence is, and its parts."""
    layer, state = make(window=3)
    x = jnp.asarray(wave(9, 8))
    found, state = by_parts(layer, state, x, counts)

    assert_close(found, whole(layer, x))
    assert state.get(layer.cache)[0].shape == (2, 3, 2)


@pytest.mark.parametrize(("was", "window"), [(None, 3), (3, 2), (3, 7), (3, None)])
@pytest.mark.sampled(2)
def test_a_window_that_is_changed_on_a_cache_gives_no_wrong_answer(window, was):
    """What is cached goes on to be right, or there is no room."""
    layer, state = make(window=was)
    x = jnp.asarray(wave(9, 8))
    _, state = by_parts(layer, state, x[:2], (2,))
    layer = nn.with_mode(layer, window=window)
    found, _ = by_parts(layer, state, x[2:], (1,) * 7)
    right = ~np.isnan(found[:, 0])

    assert right.any()
    # The first two positions were seen as they are, so one layer is the whole of it.
    assert_close(found[right], whole(layer, x)[2:][right])


def test_a_loop_of_steps_is_one_trace():
    layer, state = make()
    x, traces = jnp.asarray(wave(6, 8)), []

    @pm.filter_jit(donate="all-except-first")
    def read(layer, x, state):
        def step(state, x):
            traces.append(1)
            out, state = layer(x[None], state=state)
            return state, out[0]

        return pm.filter_scan(step, state, x)

    _, found = read(layer, x + 0, state)
    assert_close(found, whole(layer, x))
    assert len(traces) == 1


@pytest.mark.parametrize("is_tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_layer_of_a_stack_has_a_cache(is_tied):
    """With State it goes on, without it is trained."""
    stack, state = nn.make_with_state(nn.Stack)(make_cached, 3, key=KEY)
    if is_tied:
        stack = pm.tie(stack, "layer.key_proj", to="layer.query_proj")
    x = jnp.asarray(wave(2, 5, 8))
    expected = jax.jit(lambda stack, x: stack(x))(stack, x)
    state = nn.reset_cache(stack, state, batch=2)
    call = pm.filter_jit(lambda stack, x, state: stack(x, state))
    first, state = call(stack, x[:, :4], state)
    second, state = call(stack, x[:, 4:], state)

    assert_close(jnp.concatenate([first, second], 1), expected, rtol=1e-4)
    assert state.get(stack.layer.cache)[0].shape == (3, 2, 4, 6, 2)


def make_cached(key):
    return nn.MultiheadAttention(4, 8, is_causal=True, cache_size=6, key=key)


def test_a_call_that_drops_weights_leaves_the_cache_alone():
    """It is training, with sequences of its own; in inference the layer goes on."""
    layer, state = make(dropout_p=0.5, stream=pm.RngStream())
    state, x = state.seed(KEY), jnp.asarray(wave(2, 5, 8))
    out, state = layer(x, state)
    assert out.shape == x.shape
    layer = nn.inference_mode(layer)

    found, state = by_parts(layer, state, x[0], (3, 2))
    assert_close(found, layer(x[0]))
    assert int(state.get(layer.cache)[2]) == 5


def test_caches_are_empty_and_the_rest_stays():
    """For other sequences, in another size and dtype; the model goes on with it."""
    net, state = pm.make_with_state(lambda: [make_cached(KEY), nn.BatchNorm(8)])()
    attention, norm = net
    _, state = attention(jnp.ones((5, 8)), state=state)
    state = nn.reset_cache(net, state)
    keys, _, length = state.get(attention.cache)
    assert (keys.shape, int(length), bool(keys.any())) == ((4, 6, 2), 0, False)

    state = state.set(norm.state_index, (jnp.ones(8), jnp.ones(8)))
    state = nn.reset_cache(net, state, batch=(3, 1), size=5, dtype=jnp.bfloat16)
    keys, values, length = state.get(attention.cache)
    assert keys.shape == values.shape == (3, 1, 4, 5, 2)
    assert (keys.dtype, length.tolist()) == (jnp.bfloat16, [[0]] * 3)
    assert state.get(norm.state_index)[0].all()
    with pytest.raises(ArgumentError, match="cache_size"):
        nn.reset_cache(nn.Identity(), state)
