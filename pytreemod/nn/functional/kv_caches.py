"""Keys and values that were seen, kept for the queries that come: written, and found again.

A cache is `(keys, values, length)`. Places come before heads in what a layer computes; here heads
come first, as the products with queries want them, so that a step copies nothing but what is new.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Int, Shaped

from pytreemod.nn.functional.attention import attention_mask
from pytreemod.nn.functional.explicit_meshes import entries, explicit_mesh, laid_out
from pytreemod.nn.functional.inlining import as_arrays, traced_once
from pytreemod.nn.functional.promotion import countable

Cache: TypeAlias = tuple[
    Shaped[Array, "*batch heads slots size"],
    Shaped[Array, "*batch heads slots v_size"],
    Int[Array, "*batch"],
]
"""Keys, values, and how many places were seen so far."""


class Extended(NamedTuple):
    """What queries at new places find, and the cache to go on with."""

    cache: Cache
    keys: Shaped[Array, "*batch kv_seq heads size"]
    values: Shaped[Array, "*batch kv_seq heads v_size"]
    mask: Bool[Array, "*batch q_seq kv_seq"]
    query_positions: Int[Array, "*batch q_seq"]
    key_positions: Int[Array, "*batch kv_seq"]


def empty_cache(
    batch: tuple[int, ...], slots: int, heads: int, size: int, v_size: int, dtype: Any = None
) -> Cache:
    """A cache in which nothing was written.

    Shapes:
        return: (*batch, heads, slots, size), (*batch, heads, slots, v_size), and batch

    Args:
        batch: a cache for each of so many sequences.
        slots: how many places it can hold.
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
    """Write keys and values at the places after those that were seen.

    A cache of as many slots as the window has places is a ring: each place takes the slot of the
    one that nobody sees any more, and so it never is full. In any other, what lies beyond the
    slots is lost: to ask for it costs a step of compiled code much, and is left to the caller.

    Shapes:
        cache: (..., heads, slots, size), (..., heads, slots, v_size), and (...)
        key: (..., seq, heads, size)
        value: (..., seq, heads, v_size)
        lengths: (...)

    Args:
        cache: what was seen.
        key: one key for each new place.
        value: one value for each of them.
        lengths: how many of the new places count, for each sequence; all if None. The others are
            not written. Less than none counts as none, more than there are as all.
        window: how many places a query sees, its own counted; all before it if None.

    Returns:
        The cache to go on with; the keys and values that queries at the new places are to attend
        to, a mask of where each may look, and the places of both.

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
    # A cache may be kept in fewer bits than are computed with.
    key, value = key.astype(keys.dtype), value.astype(values.dtype)
    (keys, values, length), key, value, lengths = _laid(cache, key, value, lengths)
    count, slots = key.shape[-3], keys.shape[-2]
    # As many slots as a query sees: what is overwritten no later query looks at.
    is_ring = window == slots
    places = after(length, count)
    counted: Any = count
    if lengths is not None:
        # What is beyond the end counts as the end, or the places after it were never written.
        counted = jnp.clip(countable(lengths), 0, count).astype(length.dtype)
    at = places % slots if is_ring else places
    # A single place of a single sequence, which surely is written, needs no look at each slot.
    is_slice = places.shape == (1,) and lengths is None
    if lengths is not None:
        # A slot that is not there, in which nothing is written.
        at = jnp.where(after(jnp.zeros_like(length), count) < counted[..., None], at, slots)
    if is_ring and count > slots:
        # Of several places with one slot only the last may be written: a scatter has no order.
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
        # All that a ring holds is within the window: what was not has just been overwritten.
        mask = (held >= 0)[..., None, :]
        return new_cache, *_found(written, dtypes), mask, places, held
    # What the first of these places see may be overwritten by the last of them.
    held = jnp.concatenate([_held(length - 1, slots), places], axis=-1)
    mask = attention_mask(places, held, is_causal=True, window=window)
    mask &= (held >= 0)[..., None, :]
    both = (
        jnp.concatenate([old, jnp.swapaxes(new, -2, -3)], axis=-2)
        for old, new in ((keys, key), (values, value))
    )
    return new_cache, *_found(both, dtypes), mask, places, held


def _laid(
    cache: Cache, key: Array, value: Array, lengths: Array | None
) -> tuple[Cache, Array, Array, Array | None]:
    """A cache, and what is written in it, which on a mesh with explicit axes lie alike.

    A cache that is on a mesh stays as it lies, so that a loop can hand it on; another one lies as
    the first keys and values do.
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
        new = laid_out(new, mesh, (*batch, (), heads, size))
        both.append((laid_out(old, mesh, (*batch, heads, seq, size)), new))
    length = laid_out(length, mesh, batch)
    lengths = None if lengths is None else laid_out(lengths, mesh, batch)
    return (both[0][0], both[1][0], length), both[0][1], both[1][1], lengths


def after(length: Array, count: int) -> Array:
    """The next places of each sequence: (..., count)."""
    shape = (*length.shape, count)
    start = lax.broadcast_in_dim(length, shape, range(length.ndim))
    return start + lax.broadcasted_iota(length.dtype, shape, length.ndim)


def _column(counted: Any, length: Array) -> Any:
    return counted if isinstance(counted, int) else counted.reshape((*length.shape, 1))


def _held(last: Array, slots: int) -> Array:
    """The place that each slot of a ring holds after the place `last`; negative if it is empty."""
    shape = (*last.shape, slots)
    last = lax.broadcast_in_dim(last, shape, range(last.ndim))
    # Of all places that have this slot, the latest that is not after `last`.
    return last - (last - lax.broadcasted_iota(last.dtype, shape, last.ndim - 1)) % slots


def _found(held: Iterable[Array], dtypes: Iterable[Any]) -> tuple[Array, ...]:
    """Keys and values as they were given, and not as they are kept: places before heads."""
    pairs = zip(held, dtypes, strict=True)
    return tuple(jnp.swapaxes(array, -2, -3).astype(dtype) for array, dtype in pairs)


def _write_slice(old: Array, new: Array, at: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(old, jnp.swapaxes(new, -2, -3), at[0], -2)


def _write(old: Array, new: Array, at: Array) -> Array:
    """Keys or values (heads, slots, size) with new ones (seq, heads, size); or batches of them."""
    write = _write_one
    for _ in range(at.ndim - 1):
        write = jax.vmap(write)
    return write(old, jnp.swapaxes(new, -2, -3), at)


def _write_one(old: Array, new: Array, at: Array) -> Array:
    # What does not count has a slot that is not there.
    return old.at[:, at].set(new, mode="drop")
