"""`extend_cache`: the slots that it writes, and the positions that each query sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.nn.functional import empty_cache, extend_cache
from tests.nn.numbers_to_compare import wave

extend = jax.jit(extend_cache, static_argnames="window")


def numbered(first, count, *batch):
    """Keys with the number of their position, from 1; empty slots are 0."""
    places = jnp.arange(first + 1.0, first + count + 1)
    return jnp.broadcast_to(places[:, None, None], (*batch, count, 1, 1))


def held(cache):
    """The positions in the slots."""
    return cache[0][..., 0, :, 0].astype(int).tolist()


def test_places_follow_one_another_and_are_seen_by_later_ones():
    """Two positions, then one."""
    cache = empty_cache((), 4, 1, 1, 1)
    found = extend(cache, numbered(0, 2), numbered(0, 2))
    assert held(found.cache) == [1, 2, 0, 0]
    found = extend(found.cache, numbered(2, 1), numbered(2, 1))

    assert held(found.cache) == [1, 2, 3, 0]
    assert found.mask.tolist() == [[True, True, True, False]]
    assert (found.query_positions.tolist(), int(found.cache[2])) == ([2], 3)


def test_one_place_is_written_for_all_heads_in_its_slot():
    """As for several positions: keys and values of each head; other slots are unchanged."""
    keys, values = jnp.asarray(wave(3, 2, 4)), jnp.asarray(wave(3, 2, 5, phase=1))
    cache = extend(empty_cache((), 4, 2, 4, 5), keys[:2], values[:2]).cache
    one = extend(cache, keys[2:], values[2:])
    whole = extend(empty_cache((), 4, 2, 4, 5), keys, values)

    for found, expected in zip(one.cache, whole.cache, strict=True):
        assert found.tolist() == expected.tolist()
    assert one.keys[:3].tolist() == keys.tolist()
    assert one.values[:3].tolist() == values.tolist()


def test_what_is_beyond_the_slots_is_lost():
    """Of the new positions; earlier ones are unchanged."""
    found = extend(empty_cache((), 2, 1, 1, 1), numbered(0, 3), numbered(0, 3))

    assert held(found.cache) == [1, 2]


@pytest.mark.parametrize("counts", [(7,), (1, 5, 1), (2, 2, 3), (1,) * 7], ids=str)
@pytest.mark.slow
def test_a_ring_holds_the_last_places(counts):
    """However many arrive at once; each query sees its window, by the positions of the keys."""
    cache, first = empty_cache((), 3, 1, 1, 1), 0
    for count in counts:
        found = extend(cache, numbered(first, count), numbered(first, count), window=3)
        cache, first = found.cache, first + count
        for row, place in zip(found.mask, found.query_positions, strict=True):
            seen = np.asarray(found.keys[:, 0, 0])[np.asarray(row)].astype(int) - 1
            assert sorted(seen.tolist()) == list(range(max(0, int(place) - 2), int(place) + 1))

    assert held(cache) == [7, 5, 6]


@pytest.mark.parametrize("window", [None, 4])
def test_each_sequence_counts_its_own_places(window):
    """Positions beyond a length are neither written nor counted."""
    lengths = jnp.array([3, 1, 0])
    found = extend(empty_cache((3,), 4, 1, 1, 1), *[numbered(0, 3, 3)] * 2, lengths, window=window)
    assert held(found.cache) == [[1, 2, 3, 0], [1, 0, 0, 0], [0] * 4]
    found = extend(found.cache, *[numbered(8, 1, 3)] * 2, window=window)

    assert held(found.cache) == [[1, 2, 3, 9], [1, 9, 0, 0], [9, 0, 0, 0]]
    assert found.mask.sum(-1).ravel().tolist() == found.cache[2].tolist() == [4, 2, 1]


def test_gradients_reach_what_was_written():
    """They do not reach overwritten slots."""

    def total(keys):
        return (extend_cache(empty_cache((), 3, 1, 1, 1), keys, keys, window=3).cache[0] ** 2).sum()

    grads = jax.grad(total)(jnp.asarray(wave(5, 1, 1)))
    assert [bool(grad) for grad in grads.ravel()] == [False, False, True, True, True]
