"""`reset_cache`: empties the caches of a model, for any number of sequences."""

from __future__ import annotations

from typing import Any

import jax

from pytreemod.errors import ArgumentError
from pytreemod.module.field_kinds import as_sequence, check_size, check_sizes
from pytreemod.module.reading import is_computed
from pytreemod.module.resolving import resolve
from pytreemod.nn.attention import MultiheadAttention
from pytreemod.nn.kv_cache import check_ring
from pytreemod.state.making import make_with_state
from pytreemod.state.tokens import holding
from pytreemod.state.values import State
from pytreemod.typing import PyTree, jtu


def reset_cache(
    model: PyTree,
    state: State,
    *,
    batch: int | tuple[int, ...] = (),
    size: int | None = None,
    dtype: Any = None,
) -> State:
    """Empty every cache of keys and values in a State; other values are unchanged.

    Args:
        model: any tree of Modules that has a `MultiheadAttention` with `cache_size`; in a `Stack`,
            each layer has its own cache.
        state: its State, which is used up.
        batch: the batch axes of the next sequences.
        size: number of positions in each cache; unchanged if None. At least `window`, if the layer
            has one; then at most `window` are cached.
        dtype: of keys and values; that of the layer's weights if None.

    Returns:
        The new State.

    Raises:
        ArgumentError: if no layer of the model has a cache, or a number is invalid.
        StateError: if the State was used up.
        TokenError: if the State belongs to another model.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> make = nn.make_with_state(nn.MultiheadAttention)
        >>> layer, state = make(2, 4, is_causal=True, cache_size=8, key=jax.random.key(0))
        >>> state = nn.reset_cache(layer, state, batch=3, size=16)
        >>> y, state = layer(jnp.ones((3, 5, 4)), state=state)
        >>> keys, values, length = state.get(layer.cache)
        >>> keys.shape, length.tolist()
        ((3, 2, 16, 2), [5, 5, 5])
    """
    sizes = as_sequence(batch)
    lead = check_sizes("reset_cache(batch)", batch, 1 if sizes is None else len(sizes))
    slots = None if size is None else check_size("reset_cache(size)", size, 1)

    def renew(node: Any) -> Any:
        return _renewed(node, lead, slots, dtype) if _has_cache(node) else node

    def is_end(node: Any) -> bool:
        return isinstance(node, MultiheadAttention)

    if not any(map(_has_cache, jtu.tree_leaves(model, is_leaf=is_end))):
        hint = ("Create a layer with a cache:", "nn.MultiheadAttention(..., cache_size=size)")
        raise ArgumentError("reset_cache(model)", "attention with a cache", "none", hint=hint)
    whole = jtu.tree_map(renew, state.fill(model), is_leaf=is_end)
    return make_with_state(lambda: whole)()[1]


def _has_cache(node: Any) -> bool:
    return isinstance(node, MultiheadAttention) and node.cache is not None


def _renewed(
    layer: MultiheadAttention, batch: tuple[int, ...], size: int | None, dtype: Any
) -> MultiheadAttention:
    """Return a layer whose token has an empty cache."""
    weight, token = _readable(layer.key_proj).weight, layer.cache
    # In a Stack, the weights and the caches have an axis for the layers.
    outer = weight.shape[:-2]
    held: Any = token.init if token is not None else None
    slots = held[0].shape[-2] if size is None else size
    hint = ("pass at least the size of the window:", f"nn.reset_cache(..., size={layer.window})")
    check_ring("reset_cache(size)", layer.window, slots, hint)
    cache = layer.empty_cache((*outer, *batch), slots, weight.dtype if dtype is None else dtype)
    return layer.replace(cache=holding(token, cache))


def _readable(layer: Any) -> Any:
    """Return a layer, or its shapes: the value of a computed weight in a Stack cannot be read."""
    is_whole = not any(map(is_computed, jtu.tree_leaves(layer, is_leaf=is_computed)))
    return layer if is_whole else jax.eval_shape(lambda: resolve(layer))
