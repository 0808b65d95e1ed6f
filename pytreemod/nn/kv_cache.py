"""Caches of keys and values for later queries: writing to them, and reading them.

A cache is `(keys, values, length)`. In a layer, positions come before heads. In a cache, heads come
first, as the products with queries need them, so that a step copies only new entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

Cache: TypeAlias = tuple[
    Shaped[Array, "*batch heads slots size"],
    Shaped[Array, "*batch heads slots v_size"],
    Int[Array, "*batch"],
]
"""Keys, values, and the number of positions seen so far."""


class Extended(NamedTuple):
    """A cache with new positions, and what queries at these positions may see."""

    cache: Cache
    keys: Shaped[Array, "*batch kv_seq heads size"]
    values: Shaped[Array, "*batch kv_seq heads v_size"]
    key_positions: Int[Array, "*batch kv_seq"]
    """Those of the keys; negative if there is none yet."""
    is_lost: Bool[Array, "*batch seq"] | None
    """Where a new position had no room; None for a ring."""


def next_positions(length: Int[Array, "*batch"], count: int) -> Int[Array, "*batch seq"]:
    """The next positions of each sequence."""
    return length[..., None] + _indices(length, count)


def is_valid(lengths: Int[Array, "*batch"], count: int) -> Bool[Array, "*batch seq"]:
    """Which of a number of positions are within the lengths."""
    return _indices(lengths, count) < lengths[..., None]


def extend_cache(
    cache: Cache,
    key: Shaped[Array, "*batch seq heads size"],
    value: Shaped[Array, "*batch seq heads v_size"],
    lengths: Int[Array, "*batch"] | None,
    window: int | None,
) -> Extended:
    """Write keys and values at the positions after those in the cache.

    A cache with as many slots as the window is a ring: each position overwrites one that no later
    query sees, so it is never full. In any other cache, positions beyond the slots are lost.

    Args:
        cache: keys and values of earlier positions.
        key: one key for each new position.
        value: one value for each new position.
        lengths: number of valid new positions in each sequence; all if None. The others are not
            written. Negative lengths count as zero, and larger ones as all.
        window: number of positions that a query sees, itself included; all before it if None.

    Returns:
        The new cache, and what the queries at the new positions may see.

    Examples:
        >>> cache = jnp.zeros((1, 4, 2)), jnp.zeros((1, 4, 2)), jnp.asarray(0)
        >>> seen = extend_cache(cache, jnp.ones((2, 1, 2)), jnp.ones((2, 1, 2)), None, None)
        >>> int(seen.cache[2]), seen.key_positions.tolist()
        (2, [0, 1, 2, 3])
    """
    keys, values, length = cache
    count, slots, is_ring = key.shape[-3], keys.shape[-2], window == keys.shape[-2]
    positions = next_positions(length, count)
    counted: Any = count if lengths is None else jnp.clip(lengths, 0, count).astype(length.dtype)
    slot = positions % slots if is_ring else positions
    is_lost = None if is_ring else positions >= slots
    # What gets a slot that does not exist is not written.
    if lengths is not None:
        valid = is_valid(counted, count)
        slot = jnp.where(valid, slot, slots)
        # Padding is not stored, so it cannot be lost.
        is_lost = None if is_lost is None else is_lost & valid
    if is_ring and count > slots:
        # If several positions share a slot, only the last is written: a scatter has no order.
        slot = jnp.where(positions >= (length + counted)[..., None] - slots, slot, slots)
    # A single position of a single sequence needs no scatter.
    write = _write_one if positions.shape == (1,) and lengths is None else _write
    # Heads before positions; a cache may have a narrower dtype than the computation.
    pairs = [
        (x, jnp.swapaxes(y, -2, -3).astype(x.dtype)) for x, y in ((keys, key), (values, value))
    ]
    new_keys, new_values = seen = [write(old, new, slot) for old, new in pairs]
    if not is_ring:
        key_positions = jnp.broadcast_to(_indices(length, slots), (*length.shape, slots))
    elif count == 1:
        key_positions = _ring_positions(length, slots)
    else:
        # The last new positions may overwrite positions that the first new queries see.
        key_positions = jnp.concatenate([_ring_positions(length - 1, slots), positions], axis=-1)
        seen = [jnp.concatenate(pair, axis=-2) for pair in pairs]
    dtypes = key.dtype, value.dtype
    seen = [jnp.swapaxes(x, -2, -3).astype(to) for x, to in zip(seen, dtypes, strict=True)]
    new_cache = new_keys, new_values, length + counted
    return Extended(new_cache, seen[0], seen[1], key_positions, is_lost)


def _write_one(old: Array, new: Array, slot: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(old, new, slot[0], -2)


def _write(old: Array, new: Array, slot: Array) -> Array:
    """Write (*batch, heads, seq, size) into the slots of (*batch, heads, slots, size)."""

    def write(old: Array, new: Array, slot: Array) -> Array:
        return old.at[:, slot].set(new, mode="drop")

    for _ in range(slot.ndim - 1):
        write = jax.vmap(write)
    return write(old, new, slot)


def _ring_positions(last: Array, slots: int) -> Array:
    """The position in each slot of a ring after the position `last`; negative if there is none."""
    # The latest position that has this slot and is not after `last`.
    return last[..., None] - (last[..., None] - _indices(last, slots)) % slots


def _indices(lengths: Array, count: int) -> Array:
    """From 0 to count - 1, for the axis after those of the lengths."""
    shape = (1,) * lengths.ndim + (count,)
    return lax.broadcasted_iota(lengths.dtype, shape, lengths.ndim)
