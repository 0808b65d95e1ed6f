"""`reset_cache`: empty caches for the attention of a model; and what is checked of a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pytreemod.errors import ArgumentError, ShapeError, StateError, describe, explain
from pytreemod.nn.arguments import Title, check_array
from pytreemod.nn.functional.kv_caches import Cache
from pytreemod.nn.functional.promotion import countable
from pytreemod.transform.host.runtime_checks import error_if
from pytreemod.typing import Tracer


def check_lengths(where: Title, lengths: Any, key_: Array) -> Array | None:
    """Require an integer for each sequence, if there are any."""
    if lengths is None:
        return None
    lengths = check_array(where, lengths, "lengths")
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ArgumentError(explain(str(where), "lengths of integers", describe(lengths)))
    if lengths.shape != key_.shape[:-2]:
        expected = f"lengths of shape {key_.shape[:-2]}, one for each sequence"
        raise ShapeError(explain(str(where), expected, describe(lengths)))
    lengths, most = countable(lengths), key_.shape[-2]
    if not isinstance(lengths, Tracer) and ((lengths < 0) | (lengths > most)).any():
        expected = f"lengths from 0 to {most}, the places that there are"
        raise ArgumentError(explain(str(where), expected, str(lengths.tolist())))
    return lengths


def refuse_uncachable(
    where: Title, token: Any, mask: Any, bias: Any, is_causal: bool, query: Array, key_: Array
) -> None:
    """Refuse a State where there is no cache, and what does not go with one."""
    if token is None:
        cure: Sequence[str] = (
            "Make the layer with a cache, together with its State:",
            "make = pm.make_with_state(nn.MultiheadAttention)",
            "layer, state = make(..., is_causal=True, cache_size=size, key=key)",
        )
        raise StateError(explain(str(where), "a layer with a cache", "none", cure=cure))
    if mask is not None:
        cure = ("Sequences of different lengths say how many places count:", "lengths=lengths")
        expected = "no mask with a State: the cache knows who sees whom"
        raise ArgumentError(explain(str(where), expected, describe(mask), cure=cure))
    if bias is not None and not callable(bias):
        cure = ("As a function it is told the places of queries and keys:", "bias=lambda q, k: ...")
        expected = "with a State a function as bias"
        raise ArgumentError(explain(str(where), expected, describe(bias), cure=cure))
    if not is_causal:
        raise ArgumentError(explain(str(where), "is_causal=True with a State", "False"))
    # The place of a query is that of its own key: how many were seen before says both.
    if query.shape[-2] != key_.shape[-2]:
        expected = "with a State, queries and keys of the same places"
        got = f"query {describe(query)} and key_ {describe(key_)}"
        raise ShapeError(explain(str(where), expected, got))


def check_fits(where: Title, cache: Cache, make: Callable[..., Cache], key: Array) -> None:
    """Require a cache for these sequences, whatever its size."""
    batch = key.shape[:-3]
    # Only for its shapes: no second cache is allocated.
    wanted = jax.eval_shape(lambda: make(batch, cache[0].shape[-2]))
    if [array.shape for array in cache] == [array.shape for array in wanted]:
        return
    cure = (
        "Begin with empty caches for as many sequences:",
        f"state = nn.reset_cache(model, state, batch={batch})",
    )
    expected = f"a cache for sequences of batch axes {batch} in the State"
    got = f"keys {describe(cache[0])} and values {describe(cache[1])}"
    raise ShapeError(explain(str(where), expected, got, cure=cure))


def check_room(where: Title, cache: Cache, count: int, lengths: Array | None, check: bool) -> Cache:
    """Refuse more places than there is room for, where that is known; in compiled code if asked."""
    keys, values, length = cache
    slots = keys.shape[-2]
    # Known from the shapes alone, and so while tracing, too.
    if count > slots and lengths is None:
        raise StateError(_full(where, slots, f"{count} places at once"))
    later = length + (count if lengths is None else lengths.astype(length.dtype))
    if not isinstance(later, Tracer):
        # Of an empty batch there is no longest.
        most = int(jnp.max(later, initial=0))
        if most > slots:
            raise StateError(_full(where, slots, f"a sequence of {most}"))
        return cache
    if not check:
        return cache
    text = _full(where, slots, "a longer sequence")
    # On the length, of which all that follows is made: a check of what is not used is dropped.
    return keys, values, error_if(length, later > slots, text)


def _full(where: Title, slots: int, got: str) -> str:
    cure = (
        "Begin anew with more room, or keep a window of what was seen:",
        "state = nn.reset_cache(model, state, size=size)",
        "nn.MultiheadAttention(..., window=window)",
    )
    return explain(
        str(where), f"a query for sequences of at most {slots} places, the cache's", got, cure=cure
    )
