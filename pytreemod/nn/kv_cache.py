"""Checks of the caches of keys and values that attention uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pytreemod.errors import ArgumentError, ShapeError, StateError, describe, explain
from pytreemod.nn.arguments import Title
from pytreemod.nn.functional.kv_caches import Cache, Extended
from pytreemod.transform.runtime_checks import error_if
from pytreemod.typing import Tracer


def check_ring(where: str, window: int | None, size: int, hint: Sequence[str]) -> None:
    """Require a cache that is at least as large as the window: a smaller one is no ring.

    Raises:
        ArgumentError: if the cache is smaller.
    """
    if window is not None and size < window:
        expected = f"a cache of at least window={window} positions"
        raise ArgumentError(where, expected, f"{size} positions", hint=hint)


def refuse_uncachable(
    where: Title, token: Any, mask: Any, bias: Any, is_causal: bool, query: Array, key_: Array
) -> None:
    """Refuse a State where there is no cache, and arguments that a cache does not support."""
    if token is None:
        hint = "pm.make_with_state(nn.MultiheadAttention)(..., cache_size=size, key=key)"
        raise StateError(f"{where} got a State, but has no cache", hint=hint)
    if mask is not None:
        fact = f"{where} takes no mask with a State: the cache masks by position"
        raise ArgumentError(fact, hint="lengths=lengths")
    if bias is not None and not callable(bias):
        hint = ("Pass a function of the positions of queries and keys:", "bias=lambda q, k: ...")
        expected = "a function as bias, with a State"
        raise ArgumentError(where, expected, describe(bias), hint=hint)
    if not is_causal:
        raise ArgumentError(where, "is_causal=True with a State", "False")
    # A query has the position of its own key: the number of positions seen determines both.
    if query.shape[-2] != key_.shape[-2]:
        expected = "queries and keys at the same positions, with a State"
        got = f"query {describe(query)} and key_ {describe(key_)}"
        raise ShapeError(where, expected, got)


def check_fits(
    where: Title,
    cache: Cache,
    make: Callable[..., Cache],
    batch: tuple[int, ...],
    window: int | None,
) -> None:
    """Require a cache for these sequences: of any size, or a ring of the size of the window."""
    keys, values, length = cache
    slots = keys.shape[-2]
    if length.shape != batch:
        expected, got = f"a cache for batch axes {batch}", f"one for {length.shape}"
    elif window not in (None, slots):
        expected, got = f"a cache of window={window} positions in the State", f"{slots} positions"
    else:
        # Only for its shapes: no second cache is allocated.
        wanted = jax.eval_shape(lambda: make(batch, slots))
        if [array.shape for array in cache] == [array.shape for array in wanted]:
            return
        expected = f"keys {describe(wanted[0])} and values {describe(wanted[1])} in the State"
        got = f"{describe(keys)} and {describe(values)}"
    size = f", size={window}" if window is not None and slots < window else ""
    hint = f"state = nn.reset_cache(model, state, batch={batch}{size})"
    raise ShapeError(where, expected, got, hint=hint)


def check_room(where: Title, cache: Cache, count: int, lengths: Array | None, check: bool) -> Cache:
    """Refuse more positions than the cache has room for; in compiled code only if asked."""
    keys, values, length = cache
    slots = keys.shape[-2]
    # The shapes alone show this, so it is known while tracing.
    if count > slots and lengths is None:
        raise StateError(_full(where, slots, f"{count} positions at once"))
    later = length + (count if lengths is None else lengths.astype(length.dtype))
    if not isinstance(later, Tracer):
        # An empty batch has no longest sequence.
        most = int(jnp.max(later, initial=0))
        if most > slots:
            raise StateError(_full(where, slots, f"a sequence of {most}"))
        return cache
    if not check:
        return cache
    text = _full(where, slots, "a longer sequence")
    # Attached to the length, which everything later depends on: a check of an unused value is lost.
    return keys, values, error_if(length, later > slots, text)


def nan_where_full(found: Array, seen: Extended, lengths: Array | None) -> Array:
    """Replace results by NaN where the cache had no room for the keys of a query.

    Compiled code cannot raise an error, and a result there would be meaningless. Results have the
    shape (..., seq, heads, size).
    """
    positions, slots = seen.query_positions, seen.cache[0].shape[-2]
    if not isinstance(positions, Tracer):
        return found
    full = positions >= slots
    if lengths is not None:
        # Positions beyond the lengths may be part of sums later, so they do not become NaN.
        index = jax.lax.broadcasted_iota(lengths.dtype, positions.shape, positions.ndim - 1)
        full &= index < jax.lax.broadcast_in_dim(lengths, positions.shape, range(lengths.ndim))
    return jnp.where(full[..., None, None], jnp.nan, found)


def _full(where: Title, slots: int, got: str) -> str:
    return explain(
        f"{where}: the cache has {slots} positions, too few for {got}",
        hint="state = nn.reset_cache(model, state, size=size)",
    )
