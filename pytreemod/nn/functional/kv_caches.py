"""Caches of keys and values for later queries: writing to them, and reading them.

A cache is `(keys, values, length)`. In a layer, positions come before heads. In a cache, heads come
first, as the products with queries need them, so that a step copies only new entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Int, Shaped

from pytreemod.nn.functional.attention import attention_mask
from pytreemod.nn.functional.explicit_meshes import entries, resharded
from pytreemod.nn.functional.inlining import as_arrays, traced_once
from pytreemod.nn.functional.promotion import countable
from pytreemod.tree.split_arrays import explicit_mesh

Cache: TypeAlias = tuple[
    Shaped[Array, "*batch heads slots size"],
    Shaped[Array, "*batch heads slots v_size"],
    Int[Array, "*batch"],
]
"""Keys, values, and the number of positions seen so far."""


class Extended(NamedTuple):
    """The keys and values for queries at new positions, and the new cache."""

    cache: Cache
    keys: Shaped[Array, "*batch kv_seq heads size"]
    values: Shaped[Array, "*batch kv_seq heads v_size"]
    mask: Bool[Array, "*batch q_seq kv_seq"]
    query_positions: Int[Array, "*batch q_seq"]
    key_positions: Int[Array, "*batch kv_seq"]


def empty_cache(
    batch: tuple[int, ...], slots: int, heads: int, size: int, v_size: int, dtype: Any = None
) -> Cache:
    """Make an empty cache.

    Shapes:
        return: (*batch, heads, slots, size), (*batch, heads, slots, v_size), and batch

    Args:
        batch: the batch axes of the sequences.
        slots: number of positions in the cache.
        heads: number of heads.
        size: size of a key.
        v_size: size of a value.
        dtype: of keys and values; JAX's default float if None.

    Returns:
        Keys, values and length.

    Examples:
        >>> from pytreemod import nn
        >>> [array.shape for array in nn.functional.empty_cache((3,), 8, 2, 4, 4)]
        [(3, 2, 8, 4), (3, 2, 8, 4), (3,)]
    """
    lead = (*batch, heads, slots)
    return jnp.zeros((*lead, size), dtype), jnp.zeros((*lead, v_size), dtype), jnp.zeros(batch, int)


def extend_cache(
    cache: Cache,
    key: Shaped[ArrayLike, "*batch seq heads size"],
    value: Shaped[ArrayLike, "*batch seq heads v_size"],
    lengths: Int[ArrayLike, "*batch"] | None = None,
    *,
    window: int | None = None,
) -> Extended:
    """Write keys and values at the positions after those in the cache.

    A cache with as many slots as the window is a ring: each position overwrites one that no later
    query sees, so it is never full. In any other cache, positions beyond the slots are lost. The
    caller has to check for that, because a check slows down compiled code.

    Shapes:
        cache: (..., heads, slots, size), (..., heads, slots, v_size), and (...)
        key: (..., seq, heads, size)
        value: (..., seq, heads, v_size)
        lengths: (...)

    Args:
        cache: keys and values of earlier positions.
        key: one key for each new position.
        value: one value for each new position.
        lengths: number of valid new positions in each sequence; all if None. The others are not
            written. Negative lengths count as zero, and larger ones as all.
        window: number of positions that a query sees, itself included; all before it if None.

    Returns:
        The new cache; the keys and values for queries at the new positions; a mask of where each
        query may look; and the positions of queries and keys.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> cache = nn.functional.empty_cache((), 4, heads=1, size=2, v_size=2)
        >>> found = nn.functional.extend_cache(cache, jnp.ones((2, 1, 2)), jnp.ones((2, 1, 2)))
        >>> int(found.cache[2]), found.mask.astype(int).tolist()
        (2, [[1, 0, 0, 0], [1, 1, 0, 0]])
    """
    return Extended(*_extend_cache(cache, *as_arrays(key, value, lengths), window=window))


@traced_once("window")
def _extend_cache(
    cache: Cache, key: Array, value: Array, lengths: Array | None, *, window: int | None
) -> tuple[Any, ...]:
    keys, values, length = cache
    dtypes = (key.dtype, value.dtype)
    # A cache may have a narrower dtype than the computation.
    key, value = key.astype(keys.dtype), value.astype(values.dtype)
    (keys, values, length), key, value, lengths = _resharded(cache, key, value, lengths)
    count, slots = key.shape[-3], keys.shape[-2]
    # As many slots as the window: no later query sees an overwritten position.
    is_ring = window == slots
    places = after(length, count)
    counted: Any = count
    if lengths is not None:
        # Lengths beyond the end count as the end: later calls write after them.
        counted = jnp.clip(countable(lengths), 0, count).astype(length.dtype)
    at = places % slots if is_ring else places
    # A single position of a single sequence is always written: it needs no scatter.
    is_slice = places.shape == (1,) and lengths is None
    if lengths is not None:
        # Invalid positions get a slot that does not exist, so they are not written.
        at = jnp.where(after(jnp.zeros_like(length), count) < counted[..., None], at, slots)
    if is_ring and count > slots:
        # If several positions share a slot, only the last is written: a scatter has no order.
        at = jnp.where(places >= length[..., None] + _column(counted, length) - slots, at, slots)
    write = _write_slice if is_slice else _write
    written = tuple(write(old, new, at) for old, new in ((keys, key), (values, value)))
    new_cache = (*written, length + counted)
    if not is_ring:
        held = lax.broadcasted_iota(length.dtype, (*length.shape, slots), length.ndim)
        mask = attention_mask(places, held, is_causal=True, window=window)
        return new_cache, *_found(written, dtypes), mask, places, held
    if count == 1:
        held = _held(places[..., 0], slots)
        # All positions in the ring are within the window: the write replaced the others.
        mask = (held >= 0)[..., None, :]
        return new_cache, *_found(written, dtypes), mask, places, held
    # The last new positions may overwrite positions that the first new queries see.
    held = jnp.concatenate([_held(length - 1, slots), places], axis=-1)
    mask = attention_mask(places, held, is_causal=True, window=window)
    mask &= (held >= 0)[..., None, :]
    both = (
        jnp.concatenate([old, jnp.swapaxes(new, -2, -3)], axis=-2)
        for old, new in ((keys, key), (values, value))
    )
    return new_cache, *_found(both, dtypes), mask, places, held


def _resharded(
    cache: Cache, key: Array, value: Array, lengths: Array | None
) -> tuple[Cache, Array, Array, Array | None]:
    """Shard a cache and new entries alike, on a mesh with explicit axes.

    The sharding of a cache on a mesh does not change, so that it can be the carry of a loop. A
    cache on no mesh is sharded like the first keys and values.
    """
    keys, values, length = cache
    mesh = explicit_mesh(keys, values, key, value)
    if mesh is None:
        return cache, key, value, lengths
    batch: Any = None
    both: list[tuple[Array, Array]] = []
    for old, new in ((keys, key), (values, value)):
        *lead, seq, heads, size = entries(new)
        if explicit_mesh(old) is not None:
            *lead, heads, seq, size = entries(old)
        batch = batch or lead
        new = resharded(new, mesh, (*batch, (), heads, size))
        both.append((resharded(old, mesh, (*batch, heads, seq, size)), new))
    length = resharded(length, mesh, batch)
    lengths = None if lengths is None else resharded(lengths, mesh, batch)
    return (both[0][0], both[1][0], length), both[0][1], both[1][1], lengths


def after(length: Array, count: int) -> Array:
    """Return the next positions of each sequence: (..., count)."""
    shape = (*length.shape, count)
    start = lax.broadcast_in_dim(length, shape, range(length.ndim))
    return start + lax.broadcasted_iota(length.dtype, shape, length.ndim)


def _column(counted: Any, length: Array) -> Any:
    return counted if isinstance(counted, int) else counted.reshape((*length.shape, 1))


def _held(last: Array, slots: int) -> Array:
    """Return the position in each slot of a ring after the position `last`; negative if empty."""
    shape = (*last.shape, slots)
    last = lax.broadcast_in_dim(last, shape, range(last.ndim))
    # The latest position that has this slot and is not after `last`.
    return last - (last - lax.broadcasted_iota(last.dtype, shape, last.ndim - 1)) % slots


def _found(held: Iterable[Array], dtypes: Iterable[Any]) -> tuple[Array, ...]:
    """Convert cached keys and values to these dtypes, with positions before heads."""
    pairs = zip(held, dtypes, strict=True)
    return tuple(jnp.swapaxes(array, -2, -3).astype(dtype) for array, dtype in pairs)


def _write_slice(old: Array, new: Array, at: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(old, jnp.swapaxes(new, -2, -3), at[0], -2)


def _write(old: Array, new: Array, at: Array) -> Array:
    """Write keys or values (seq, heads, size) into (heads, slots, size); or batches of them."""
    write = _write_one
    for _ in range(at.ndim - 1):
        write = jax.vmap(write)
    return write(old, jnp.swapaxes(new, -2, -3), at)


def _write_one(old: Array, new: Array, at: Array) -> Array:
    # Entries that are not valid have a slot that does not exist.
    return old.at[:, at].set(new, mode="drop")
