"""Attention that continues a sequence, with a cache in the State."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, CheckError, ShapeError, StateError
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


def by_parts(layer, state, x, counts, **options):
    """The output at all positions, for parts of a given length."""
    outs, first = [], 0
    for count in counts:
        out, state = go_on(layer, x[..., first : first + count, :], state, **options)
        outs.append(out)
        first += count
    return jnp.concatenate(outs, -2), state


def alibi(query, key):
    """Less the farther away."""
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
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("batch", [(), (2, 1)], ids=str)
@pytest.mark.sampled
def test_what_goes_on_finds_what_the_whole_finds(name, batch):
    """At every position: read at once, then one at a time; with a bias by positions."""
    layer, state = make(batch, **LAYERS[name])
    x = jnp.asarray(wave(*batch, 6, 8))
    bias = alibi if name == "plain" else None

    found, _ = by_parts(layer, state, x, (3, 1, 2), bias=bias)
    assert_close(found, layer(x, bias=bias))


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 2])
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
        assert_close(jnp.stack(row), layer(sequence[: len(row)]))


@pytest.mark.slow
def test_lengths_without_state_hide_what_fills_up():
    """The padding has no effect."""
    layer = nn.MultiheadAttention(4, 8, num_kv_heads=2, key=KEY)
    x = jnp.asarray(wave(2, 4, 8))
    found = layer(x, lengths=jnp.array([2, 4]))

    assert_close(found[0, :2], layer(x[0, :2]))
    assert_close(found[1], layer(x[1]))
    mask = jnp.ones((4, 4), bool)
    assert_close(layer(x, mask=mask, lengths=jnp.array([2, 4])), found)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8])
@pytest.mark.sampled
def test_lengths_may_be_of_any_integers(dtype):
    """Positions had the dtype of lengths: some after the end were seen, or 3 was refused."""
    layer = nn.MultiheadAttention(1, 2, key=KEY)
    x, lengths = jnp.asarray(wave(2, 300, 2)), jnp.array([3, 100])

    assert_close(layer(x, lengths=lengths.astype(dtype)), layer(x, lengths=lengths))


def by_hand(query, key, value, positions):
    """Heads that are turned by their positions."""
    rope = nn.RotaryPositionalEmbedding(2)
    turned = [rope(x, positions=positions, axis=-3) for x in (query, key)]
    return *turned, value


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.sampled
def test_processed_heads_know_their_positions(batch):
    """In each chunk, where they would start at 0; as `rotary` does it."""
    layer, state = make(batch)
    x = jnp.asarray(wave(*batch, 5, 8))
    whole = layer.replace(rotary=nn.RotaryPositionalEmbedding(2))(x)
    found = []
    for first, end in ((0, 3), (3, 4), (4, 5)):
        out, state = layer(x[..., first:end, :], state=state, process_heads=by_hand)
        found.append(out)

    assert_close(layer(x, process_heads=by_hand), whole)
    assert_close(jnp.concatenate(found, -2), whole)


@pytest.mark.parametrize("counts", [(4, 4, 1), (5, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.sampled
def test_a_full_cache_gives_nan_from_where_there_is_no_room(batch, counts):
    """In compiled code, which cannot raise an error; earlier positions are correct."""
    layer, state = make(batch, use_output_bias=True)
    x = jnp.asarray(wave(*batch, 9, 8))
    found, _ = by_parts(layer, state, x, counts)

    assert_close(found[..., :6, :], layer(x)[..., :6, :])
    assert np.isnan(found[..., 6:, :]).all()


def test_a_full_cache_gives_no_nan_where_nothing_counts():
    """Padding is not stored, so it cannot be out of range."""
    layer, state = make((2,))
    x = jnp.asarray(wave(2, 8, 8))
    _, state = go_on(layer, x[:, :5], state, jnp.array([5, 1]))
    found, state = go_on(layer, x[:, 5:], state, jnp.array([1, 3]))
    assert np.isfinite(found).all()

    found, _ = go_on(layer, x[:, 5:], state, jnp.array([1, 3]))
    assert np.isnan(found).all((1, 2)).tolist() == [False, False]
    assert np.isnan(found[:, :, 0]).tolist() == [[True, False, False], [False, False, True]]


@pytest.mark.parametrize(("lengths", "counted"), [(5, 2), (-2, 0), (-1, 0), (2, 2)])
def test_traced_lengths_beyond_the_chunk_count_as_its_ends(lengths, counted):
    """As if they were clipped; otherwise the cache counts positions that were never written."""
    layer, state = make()
    x = jnp.asarray(wave(6, 8))
    _, state = go_on(layer, x[:2], state, jnp.asarray(2))
    _, state = go_on(layer, x[2:4], state, jnp.asarray(lengths))
    assert int(state.get(layer.cache)[2]) == 2 + counted

    out, _ = go_on(layer, x[4:5], state, jnp.asarray(1))
    seen = jnp.concatenate([x[: 2 + counted], x[4:5]])
    assert_close(out[0], layer(seen)[-1])


def test_a_loop_of_steps_is_one_trace():
    """A scan over positions, with donated State."""
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
    assert_close(found, layer(x))
    assert len(traces) == 1


class Block(pm.Module):
    """Attention with or without State, and its arguments."""

    attention: nn.MultiheadAttention

    def __init__(self, *, key):
        self.attention = nn.MultiheadAttention(
            4, 8, num_kv_heads=2, is_causal=True, cache_size=6, key=key
        )

    def __call__(self, x, state=None):
        if state is None:
            return x + self.attention(x)
        out, state = self.attention(x, state=state)
        return x + out, state


@pytest.mark.slow
def test_each_layer_of_a_stack_has_a_cache():
    """With State it goes on, and without it is trained; both find the same."""
    stack, state = nn.make_with_state(nn.Stack)(Block, 3, key=KEY)
    x = jnp.asarray(wave(2, 5, 8))
    whole = stack(x)
    state = nn.reset_cache(stack, state, batch=2)
    out, state = stack(x[:, :4], state)
    assert_close(out, whole[:, :4], rtol=1e-4)
    out, state = stack(x[:, 4:], state)

    assert_close(out, whole[:, 4:], rtol=1e-4)
    assert state.get(stack.layer.attention.cache)[0].shape == (3, 2, 2, 6, 2)
    loop = x
    for block in stack:
        loop = block(loop)
    assert_close(loop, whole, rtol=1e-4)


def test_half_precision_is_kept_in_half_precision():
    """By default in the dtype of the weights; the output has the dtype of x."""
    layer, state = make(dtype=jnp.bfloat16)
    out, state = layer(jnp.ones((3, 8), jnp.bfloat16), state=state)
    assert out.dtype == state.get(layer.cache)[0].dtype == jnp.bfloat16

    layer, state = make()
    x, state = jnp.asarray(wave(3, 8)), nn.reset_cache(layer, state, dtype=jnp.bfloat16)
    out, state = layer(x, state=state)
    assert (out.dtype, state.get(layer.cache)[0].dtype) == (jnp.float32, jnp.bfloat16)
    assert_close(out, layer(x), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("counts", [(4, 4, 1), (9,), (1, 7, 1)], ids=str)
def test_a_window_never_is_full(counts):
    """The cache has the size of the window, however long the sequence is, and its parts."""
    layer, state = make(window=3)
    x = jnp.asarray(wave(9, 8))
    found, state = by_parts(layer, state, x, counts)

    assert_close(found, layer(x))
    assert state.get(layer.cache)[0].shape == (2, 3, 2)


def test_in_compiled_code_too_much_is_refused_if_asked():
    """While it runs, with check=True: positions beyond the cache, and lengths beyond the chunk."""
    layer, state = make()
    _, state = layer(jnp.ones((5, 8)), state=state)
    call = pm.filter_jit(lambda x, state, n: layer(x, state=state, lengths=n, check=True))

    with pytest.raises(CheckError, match="query"):
        call(jnp.ones((2, 8)), state.restored(), jnp.asarray(2))
    with pytest.raises(CheckError, match="lengths"):
        call(jnp.ones((1, 8)), state.restored(), jnp.asarray(3))
    out, _ = call(jnp.ones((2, 8)), state.restored(), jnp.asarray(1))
    assert out.shape == (2, 8)


X = jnp.ones((3, 8))
BATCH = X[None].repeat(4, 0)


def by_distance(query, key):
    """A bias without an axis of heads: of four examples, it would be taken for four heads."""
    return -jnp.abs(query[..., :, None] - key[..., None, :]).astype(float)


@pytest.mark.parametrize(
    ("x", "options", "error", "word"),
    [
        (jnp.ones((7, 8)), {}, StateError, "query"),
        (X, {"mask": jnp.ones((3, 3), bool)}, ArgumentError, "mask"),
        (X, {"bias": jnp.ones((3, 3))}, ArgumentError, "bias"),
        (X, {"is_causal": False}, ArgumentError, "is_causal"),
        (X, {"key_": jnp.ones((2, 8))}, ShapeError, "key_"),
        (X, {"lengths": jnp.asarray(4)}, ArgumentError, "lengths"),
        (X, {"process_heads": lambda q, k, v: (q, k, v)}, ArgumentError, "positions"),
        (BATCH, {}, ShapeError, r"\(4,\)"),
        (BATCH, {"bias": by_distance}, ShapeError, "bias"),
    ],
)
def test_what_does_not_go_with_a_cache_is_refused(x, options, error, word):
    """It would be ignored, would broadcast, or begin at position 0 again."""
    layer, state = make((4,) if "bias" in options and x.ndim == 3 else ())

    with pytest.raises(error, match=word):
        layer(x, state=state, **options)


@pytest.mark.parametrize("window", [3, 7])
def test_a_window_that_was_changed_on_a_cache_is_refused(window):
    """Its slots would hold other positions; with an empty cache it goes on."""
    layer, state = make()
    layer = nn.with_mode(layer, window=window)
    with pytest.raises(ShapeError, match="window"):
        layer(X, state=state.restored())

    state = nn.reset_cache(layer, state, size=window)
    assert_close(layer(X, state=state)[0], layer(X))


def test_a_cache_that_is_smaller_than_its_window_is_not_made():
    """It would be no ring, and fill up."""
    with pytest.raises(ArgumentError, match="window"):
        make(window=5, cache_size=3)
    with pytest.raises(ArgumentError, match="is_causal"):
        make(is_causal=False)
