"""Attention: for each entry of a sequence, a weighted mean over another sequence or the same."""

from __future__ import annotations

import functools as ft
import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

from pytreemod.errors import ArgumentError, ShapeError, StateError, describe
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.module.ties import resolve
from pytreemod.nn.base import (
    AnyArray,
    Initializer,
    add_shared,
    check_shape,
    divide_key,
    key_for_call,
    layer_call,
    title,
    wide_dtype,
)
from pytreemod.nn.dropout import Dropout
from pytreemod.nn.kv_cache import Cache, extend_cache, is_valid, next_positions
from pytreemod.nn.linear import Linear
from pytreemod.nn.normalization import LayerNorm, RMSNorm
from pytreemod.nn.rotary import RotaryPositionalEmbedding
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.making import make_with_state
from pytreemod.state.tokens import RngStream, StateIndex, with_init
from pytreemod.state.values import State
from pytreemod.transform.call_rules import CallRule, rules_of
from pytreemod.typing import PyTree, Tracer, jtu

Heads: TypeAlias = Shaped[Array, "..."]
"""Of shape (..., seq, heads, size)."""
AllHeads: TypeAlias = tuple[Heads, Heads, Heads]
"""Those of queries, keys and values."""

Bias: TypeAlias = Shaped[Array, "..."] | Callable[[Array, Array], Array]
"""An array added to the products of queries and keys, or a function from both positions to it."""


class MultiheadAttention(Module):
    r"""Multi-head attention: $\mathrm{softmax}(q k^\top / \sqrt{d} + b) \, v$ for each head.

    Projects queries, keys and values to num_heads vectors each. Each head computes, for every
    query, a mean of the values. The results of all heads are projected once more.

    Called with one sequence, the layer attends to the sequence itself: key_ defaults to query, and
    value to key_.

    Shapes:
        query: (..., q_seq, query_size)
        key_: (..., kv_seq, key_size)
        value: (..., kv_seq, value_size)
        mask: (q_seq, kv_seq) or (..., num_heads, q_seq, kv_seq), where any size may be 1; without
            batch axes the second one is (num_heads, q_seq, kv_seq)
        bias: the same, or (kv_seq,), or a number
        lengths: (...)
        return: (..., q_seq, output_size); a pair with the State if one was passed in

    With `cache_size`, a call with `state=` stores the keys and values in State, and continues the
    sequence from there: with many positions, to read a prompt, or with one, to generate the next
    token. Such calls return what one call without State returns for the whole sequence. Sequences
    of a batch may have different `lengths`. [`reset_cache`][pytreemod.nn.reset_cache] empties the
    cache, and sets the number of sequences. A call that drops weights is training: it neither
    reads nor writes the cache.

    With `window`, the cache is a ring of that many positions, which is never full. Otherwise, a
    position beyond the cache raises an error outside compiled code. In compiled code, the results
    from the first such position on are NaN.

    Fields:
        query_proj: Linear, its weight of shape (num_heads * qk_size, query_size)
        key_proj: Linear, its weight of shape (num_kv_heads * qk_size, key_size)
        value_proj: Linear, its weight of shape (num_kv_heads * vo_size, value_size)
        output_proj: Linear, its weight of shape (output_size, num_heads * vo_size)
        dropout: Dropout, of the attention weights; it has the stream
        query_norm: RMSNorm or LayerNorm of shape (qk_size,), for each head of a query
        key_norm: the same for keys
        rotary: rotates queries and keys by their positions
        cache: token of the keys, the values and the number of positions seen

    Args:
        num_heads: number of heads.
        query_size: size of a query.
        key_size: size of a key; query_size if None.
        value_size: size of a value; query_size if None.
        output_size: size of an output; query_size if None.
        qk_size: size of queries and keys in each head; query_size / num_heads if None, which must
            be an integer.
        vo_size: size of values in each head; query_size / num_heads if None, which must be an
            integer.
        use_query_bias: whether the projection of queries has a bias.
        use_key_bias: whether the projection of keys has a bias.
        use_value_bias: whether the projection of values has a bias.
        use_output_bias: whether the output projection has a bias.
        dropout_p: probability of dropping a weight while training, from 0 to 1.
        inference: whether to drop nothing, see `inference_mode`.
        dtype: of all weights and biases; JAX's default float if None.
        key: used once, for the initial weights and biases.
        weight_init: passed on to every `Linear`.
        bias_init: passed on to every `Linear`.
        num_kv_heads: number of heads of keys and values, a divisor of num_heads: several adjacent
            heads of queries share each; num_heads if None.
        is_causal: whether each query sees only its own and earlier positions.
        window: number of positions that a query sees, itself included: itself and those before
            it; if not causal, as many after it, too. All if None.
        qk_norm: how to normalize heads of queries and keys, before the rotation: "rms" or "layer",
            with a weight and no bias. Not normalized if None.
        rotary: a `RotaryPositionalEmbedding` of qk_size, which rotates heads of queries and keys;
            with a cache, by their positions in the cached sequence.
        implementation: "xla" or "cudnn", to use `jax.nn.dot_product_attention`, which may round
            differently. If None, and with dropout, a cache, or values of another size than keys,
            the formula is computed in float32 or wider.
        cache_size: number of positions in the cache of keys and values; no cache if None.
        stream: `RngStream()`, to take the keys for dropout from State, as in `Dropout`.

    State and randomness: uses one key when training, if dropout_p is not 0: `key` if given,
        otherwise the next one of its stream. Otherwise, with cache_size, reads and writes its cache
        if a State is passed in.

    Raises:
        ArgumentError: if query_size or num_kv_heads does not fit num_heads, or window is less than
            1; in the call if mask is not boolean, or an argument is not supported with a cache.
        ArgumentError: if training has neither a key, nor a stream and its State.
        ShapeError: if a sequence does not have the size above; keys and values, or batch axes,
            differ in number; mask, bias, lengths or the result of process_heads has another shape;
            or the cache is for other batch axes.
        StateError: if the cache has no room, where that can be known.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> layer = nn.MultiheadAttention(num_heads=2, query_size=4, key=jax.random.key(0))
        >>> x = jnp.ones((7, 5, 4))
        >>> layer(x, x, x).shape, layer(x).shape
        ((7, 5, 4), (7, 5, 4))

        Each position may see itself and those before it:

        >>> layer(x, x, x, mask=jnp.tril(jnp.ones((5, 5), bool))).shape
        (7, 5, 4)
        >>> layer(x, is_causal=True).shape
        (7, 5, 4)

        Two positions are read, then one at a time:

        >>> make = nn.make_with_state(nn.MultiheadAttention)
        >>> layer, state = make(2, 4, is_causal=True, cache_size=8, key=jax.random.key(0))
        >>> x = jnp.arange(16.0).reshape(4, 4)
        >>> y, state = layer(x[:2], state=state)
        >>> y, state = layer(x[2:3], state=state)
        >>> y, state = layer(x[3:], state=state)
        >>> bool(jnp.allclose(y, layer(x)[3:], atol=1e-5))
        True

    Source:
        Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, sec. 3.2.2; sizes and initial
        values as in Equinox. Heads in groups: Ainslie et al. 2023,
        https://arxiv.org/abs/2305.13245. Normalized queries and keys: Henry et al. 2020,
        https://arxiv.org/abs/2010.04245. Windows: Beltagy et al. 2020,
        https://arxiv.org/abs/2004.05150, sec. 3.1.
    """

    query_proj: Linear
    key_proj: Linear
    value_proj: Linear
    output_proj: Linear
    dropout: Dropout
    num_heads: int = field(static=True)
    query_size: int = field(static=True)
    key_size: int = field(static=True)
    value_size: int = field(static=True)
    output_size: int = field(static=True)
    qk_size: int = field(static=True)
    vo_size: int = field(static=True)
    use_query_bias: bool = field(static=True)
    use_key_bias: bool = field(static=True)
    use_value_bias: bool = field(static=True)
    use_output_bias: bool = field(static=True)
    # After Equinox's fields, because its files have no names. Defaults, although __init__ sets
    # them: a value equal to its default is not printed.
    num_kv_heads: int | None = field(static=True, default=None)
    is_causal: bool = field(static=True, default=False)
    window: int | None = field(static=True, default=None)
    implementation: Literal["xla", "cudnn"] | None = field(static=True, default=None)
    query_norm: RMSNorm | LayerNorm | None = None
    key_norm: RMSNorm | LayerNorm | None = None
    rotary: RotaryPositionalEmbedding | None = None
    cache: StateIndex[Cache] | None = None

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: int | float = 0.0,
        inference: bool = False,
        dtype: Any = None,
        *,
        key: KeyLike,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        num_kv_heads: int | None = None,
        is_causal: bool = False,
        window: int | None = None,
        qk_norm: Literal["rms", "layer"] | None = None,
        rotary: RotaryPositionalEmbedding | None = None,
        implementation: Literal["xla", "cudnn"] | None = None,
        cache_size: int | None = None,
        stream: RngStream | None = None,
    ):
        if None in (qk_size, vo_size) and query_size % num_heads != 0:
            expected = f"a multiple of num_heads={num_heads}, or qk_size and vo_size"
            raise ArgumentError("MultiheadAttention(query_size)", expected, str(query_size))
        if num_kv_heads is not None and num_heads % num_kv_heads != 0:
            expected = f"a divisor of num_heads={num_heads}"
            raise ArgumentError("MultiheadAttention(num_kv_heads)", expected, str(num_kv_heads))
        if window is not None and window < 1:
            raise ArgumentError("MultiheadAttention(window)", "a number >= 1", str(window))
        self.num_heads, self.num_kv_heads, self.query_size = num_heads, num_kv_heads, query_size
        self.key_size = query_size if key_size is None else key_size
        self.value_size = query_size if value_size is None else value_size
        self.output_size = query_size if output_size is None else output_size
        self.qk_size = query_size // num_heads if qk_size is None else qk_size
        self.vo_size = query_size // num_heads if vo_size is None else vo_size
        self.use_query_bias, self.use_key_bias = use_query_bias, use_key_bias
        self.use_value_bias, self.use_output_bias = use_value_bias, use_output_bias
        self.is_causal, self.window, self.implementation = is_causal, window, implementation

        keys = divide_key(key, 4)
        linear = ft.partial(Linear, dtype=dtype, weight_init=weight_init, bias_init=bias_init)
        kv_heads, inner_size = num_kv_heads or num_heads, num_heads * self.vo_size
        self.query_proj = linear(query_size, num_heads * self.qk_size, use_query_bias, key=keys[0])
        self.key_proj = linear(self.key_size, kv_heads * self.qk_size, use_key_bias, key=keys[1])
        self.value_proj = linear(
            self.value_size, kv_heads * self.vo_size, use_value_bias, key=keys[2]
        )
        self.output_proj = linear(inner_size, self.output_size, use_output_bias, key=keys[3])
        self.dropout = Dropout(dropout_p, inference, stream=stream)
        if qk_norm is not None:
            norm: Any = {"rms": RMSNorm, "layer": LayerNorm}[qk_norm]
            self.query_norm = norm(self.qk_size, use_bias=False, dtype=dtype)
            self.key_norm = norm(self.qk_size, use_bias=False, dtype=dtype)
        self.rotary = rotary
        if cache_size is not None:
            self.cache = StateIndex(self.empty_cache((), cache_size, dtype))

    @layer_call(features=("output_proj.weight", 0, -1))
    def __call__(
        self,
        query: AnyArray,
        key_: AnyArray | State | None = None,
        value: AnyArray | None = None,
        mask: Bool[Array, ...] | None = None,
        *,
        key: KeyLike | None = None,
        inference: bool | None = None,
        process_heads: Callable[..., AllHeads] | None = None,
        state: State | None = None,
        bias: Bias | None = None,
        lengths: AnyArray | None = None,
        is_causal: bool | None = None,
    ) -> Any:
        """Compute a mean of the values for each query.

        Args:
            query: the queries.
            key_: the keys; the queries if None. A State passed here is used as `state`, so that
                the layer works where layers are called as `layer(x, state)`.
            value: the values; the keys if None.
            mask: True where a query may look. A query that may look nowhere looks everywhere
                equally. (PyTorch's masks are the opposite: True where a query may not look.)
            key: decides which weights are dropped, instead of the stream.
            inference: overrides the `inference` of `dropout` if not None.
            process_heads: maps the projected queries, keys and values, each of shape
                (..., seq, num_heads, size), to new ones of the same shapes; see
                `RotaryPositionalEmbedding` for an example. Keys and values have num_kv_heads heads.
            state: has the cache, and the keys of the stream. With a cache, it continues the
                sequences: queries, keys and values have the same positions.
            bias: added to the products of queries and keys; or a function from the positions of
                queries, (..., q_seq), and of keys, (..., kv_seq), to such an array. Without a cache
                the positions have no batch axes.
            lengths: number of valid keys in each sequence; all if None. Negative lengths count as
                zero, and larger ones as all. Results at the positions after them are meaningless.
            is_causal: overrides the field of that name if not None.

        Returns:
            An output for each query; with `state`, the pair of it and the new State.
        """
        if isinstance(key_, State):
            key_, state = None, key_
        q: Any = check_shape(self, query, ..., "q_seq", self.query_size)
        batch = q.shape[:-2]
        k: Any = q if key_ is None else check_shape(self, key_, *batch, "kv_seq", self.key_size)
        v = check_shape(self, k if value is None else value, *k.shape[:-1], self.value_size)
        # In a small dtype, later positions would overflow.
        counts = None if lengths is None else check_shape(self, lengths, *batch).astype(int)
        is_causal = self.is_causal if is_causal is None else is_causal
        after, drop = state, None
        if self.dropout.p > 0 and not (self.dropout.inference if inference is None else inference):
            own_key, after = key_for_call(self, self.dropout.stream, key, state)
            drop = ft.partial(self._drop, own_key)

        heads = self._project(q, k, v)
        if process_heads is not None:
            heads = self._processed(heads, process_heads(*heads))
        if self.cache is None or after is None or drop is not None:
            found = self._attend(heads, mask, bias, counts, is_causal, drop)
        else:
            has_array = mask is not None or not (bias is None or callable(bias))
            if has_array or process_heads is not None or not is_causal:
                fact = (
                    "the cache is for is_causal=True, without mask, process_heads, or a bias array"
                )
                hint = "lengths=lengths, bias=function; nn.MultiheadAttention(..., rotary=rotary)"
                raise ArgumentError(f"{title(self)}: {fact}", hint=hint)
            found, after = self._attend_to_cache(heads, bias, counts, after)
        out = self.output_proj(found.reshape(*q.shape[:-1], self.num_heads * self.vo_size))
        return out if state is None else (out, after)

    # ---- from sequences to heads

    def _project(self, query: Array, key: Array, value: Array) -> AllHeads:
        heads, kv_heads = self.num_heads, self.num_kv_heads or self.num_heads
        layers, inputs = (self.query_proj, self.key_proj, self.value_proj), (query, key, value)
        is_one = query is key is value and _may_be_one(layers)
        each = (layer(x) for layer, x in zip(layers, inputs, strict=True))
        q, k, v = _as_one(layers, query) if is_one else each
        q = q.reshape(*query.shape[:-1], heads, self.qk_size)
        k = k.reshape(*key.shape[:-1], kv_heads, self.qk_size)
        v = v.reshape(*value.shape[:-1], kv_heads, self.vo_size)
        # Before the rotation: the weight of a norm would scale the two numbers of a pair apart.
        q = q if self.query_norm is None else self.query_norm(q)
        return q, k if self.key_norm is None else self.key_norm(k), v

    def _processed(self, heads: AllHeads, processed: AllHeads) -> AllHeads:
        if [jnp.shape(x) for x in processed] == [x.shape for x in heads]:
            return processed
        expected = f"process_heads to return {', '.join(map(describe, heads))}"
        raise ShapeError(title(self), expected, ", ".join(map(describe, processed)))

    def _rotate(self, x: Heads, positions: Array | None = None) -> Heads:
        return x if self.rotary is None else self.rotary(x, positions=positions, axis=-3)

    def _drop(self, key: Any, weights: Array) -> Array:
        """Drop weights (..., heads, q_seq, kv_seq); each head has its own key, as in Equinox."""

        def drop(weights: Array, key: Array) -> Array:
            return self.dropout(weights, key=key, inference=False)

        return jax.vmap(drop, (-3, 0), -3)(weights, jax.random.split(key, self.num_heads))

    # ---- attention within the arguments, and to the cache

    def _attend(
        self, heads: AllHeads, mask: Any, bias: Any, lengths: Any, is_causal: bool, drop: Any
    ) -> Heads:
        query, key, value = heads
        *batch, q_seq, _, _ = query.shape
        positions, key_positions = jnp.arange(q_seq), jnp.arange(key.shape[-3])
        shape = (*batch, self.num_heads, q_seq, key.shape[-3])
        bias = self._bias(bias, shape, positions, key_positions)
        if mask is not None:
            mask = jnp.asarray(mask)
            if mask.dtype != bool:
                hint = "Numbers to add, such as 0 and -inf, are bias=."
                raise ArgumentError(title(self), "mask of booleans", describe(mask), hint=hint)
            mask = self._spread("mask", mask, shape, (2,))
        if lengths is not None:
            # Hidden from all heads and all queries.
            mask = _both(mask, is_valid(lengths, shape[-1])[..., None, None, :])
        query, key = self._rotate(query), self._rotate(key)
        if self.implementation is not None and drop is None and self.qk_size == self.vo_size:
            options: Any = {"is_causal": is_causal, "window": self.window}
            return _attend_by_jax((query, key, value), mask, bias, self.implementation, **options)
        if is_causal or self.window is not None:
            visible = _visible(positions, key_positions, is_causal, self.window)
            mask = _both(mask, visible.reshape((1,) * (len(shape) - 2) + visible.shape))
        return _attend(query, key, value, mask, bias, drop)

    def _attend_to_cache(
        self, heads: AllHeads, bias: Any, lengths: Any, state: State
    ) -> tuple[Heads, State]:
        query, key, value = heads
        *batch, count, _, _ = query.shape
        token: Any = self.cache
        cache: Cache = state.get(token)
        slots, length = cache[0].shape[-2], cache[2]
        if length.shape != (*batch,):
            hint = f"state = nn.reset_cache(model, state, batch={(*batch,)})"
            expected, got = f"a cache for batch axes {(*batch,)}", f"one for {length.shape}"
            raise ShapeError(title(self), expected, got, hint=hint)
        # A query has the position of its own key.
        if key.shape[-3] != count:
            expected = "as many keys as queries, with a cache"
            raise ShapeError(title(self), expected, f"{key.shape[-3]} and {count}")
        # Rotated before they are cached: the angle of a position never changes.
        positions = next_positions(length, count)
        query, key = self._rotate(query, positions), self._rotate(key, positions)
        seen = extend_cache(cache, key, value, lengths, self.window)
        # The index of a slot in a ring differs from its position, which decides.
        mask = _visible(positions, seen.key_positions, True, self.window)
        if self.window is not None:
            mask &= (seen.key_positions >= 0)[..., None, :]
        shape = (*batch, self.num_heads, *mask.shape[-2:])
        bias = self._bias(bias, shape, positions, seen.key_positions)
        found = _attend(query, seen.keys, seen.values, mask[..., None, :, :], bias)
        if seen.is_lost is not None:
            is_known = not isinstance(seen.is_lost, Tracer)
            if (is_known and seen.is_lost.any()) or (lengths is None and count > slots):
                fact = f"{title(self)}: the cache has {slots} positions, too few for the sequence"
                raise StateError(fact, hint="state = nn.reset_cache(model, state, size=size)")
            # Compiled code cannot raise an error, and these results would be wrong.
            found = jnp.where(seen.is_lost[..., None, None], jnp.nan, found)
        return found, state.set(token, seen.cache)

    def _bias(self, bias: Any, shape: tuple[int, ...], queries: Array, keys: Array) -> Any:
        """The bias for queries and keys at these positions."""
        ranks = (0, 1, 2)
        if callable(bias):
            # The result has the axes of the positions; without a cache they have no batch axes.
            bias, ranks = bias(queries, keys), (*ranks, queries.ndim + 2)
        if bias is None:
            return None
        bias = jnp.asarray(bias)
        if bias.dtype == bool:
            raise ArgumentError(title(self), "bias of numbers, mask of booleans", describe(bias))
        return self._spread("bias", bias, shape, ranks)

    def _spread(self, name: str, x: Array, shape: tuple[int, ...], ranks: tuple[int, ...]) -> Array:
        """Give an array all axes of the products, (*batch, heads, q_seq, kv_seq).

        Only the number of axes decides their meaning, never sizes that happen to be equal: a batch
        with as many examples as heads is not a special case.
        """
        lead = (1,) * (len(shape) - x.ndim)
        sizes = zip(lead + x.shape, shape, strict=False)
        if x.ndim in (len(shape), *ranks) and all(n in (1, full) for n, full in sizes):
            return x.reshape(lead + x.shape)
        expected = f"{name} of shape {shape[-2:]} or {shape}, where any size may be 1"
        raise ShapeError(title(self), expected, describe(x))

    def empty_cache(self, batch: tuple[int, ...], size: int, dtype: Any = None) -> Cache:
        """Make an empty cache of this layer's sizes; see `reset_cache`.

        Args:
            batch: the batch axes of the sequences.
            size: number of positions in the cache; with a window, at most `window` are cached.
            dtype: of keys and values; JAX's default float if None.

        Returns:
            Keys, values and the number of positions seen.
        """
        # A ring: each new position overwrites the one that leaves the window.
        slots = size if self.window is None else min(size, self.window)
        lead = (*batch, self.num_kv_heads or self.num_heads, slots)
        keys, values = (jnp.zeros((*lead, n), dtype) for n in (self.qk_size, self.vo_size))
        return keys, values, jnp.zeros(batch, int)


# ---- the formula


def _may_be_one(layers: tuple[Linear, ...]) -> bool:
    """Whether projections of one sequence are made by one product: on a mesh, to send less."""
    if jax.sharding.get_abstract_mesh().empty:
        return False
    # Each must be called for itself if something looks at its calls.
    plain = [isinstance(layer, Linear) and not rules_of(layer, CallRule) for layer in layers]  # pyright: ignore[reportUnnecessaryIsInstance]  (a user may put in another layer)
    return all(plain) and len({layer.weight.shape for layer in layers}) == 1


def _as_one(layers: tuple[Linear, ...], x: Array) -> list[Array]:
    """Project x for all, so that devices add up its gradient once, instead of once for each."""
    y = jnp.einsum("...i,poi->p...o", x, jnp.stack([layer.weight for layer in layers]))
    return [add_shared(y[i], layer.bias) for i, layer in enumerate(layers)]


def _visible(queries: Array, keys: Array, is_causal: bool, window: int | None) -> Array:
    """Where queries may look, from the positions of both: (..., q_seq, kv_seq)."""
    keys, queries = keys[..., None, :], queries[..., :, None]
    if window is None:
        return keys <= queries
    ahead = keys - queries
    return (ahead > -window) & (ahead <= (0 if is_causal else window - 1))


def _both(mask: Array | None, other: Array) -> Array:
    return other if mask is None else mask & other


def _attend(
    query: Heads, key: Heads, value: Heads, mask: Any, bias: Any, drop: Any = None
) -> Heads:
    """Compute attention in float32 or wider; mask and bias have all axes of the products."""
    dtype = jnp.result_type(query, key)
    wide = wide_dtype(dtype)
    *batch, q_seq, heads, size = query.shape
    kv_seq, kv_heads = key.shape[-3:-1]
    # Groups the queries instead of repeating the keys, which would copy them for each head.
    g, grouped = ("", (heads,)) if kv_heads == heads else ("g", (kv_heads, heads // kv_heads))
    # Scales the queries, not the products, of which there are more.
    scaled = (query.astype(wide) / math.sqrt(size)).reshape(*batch, q_seq, *grouped, size)
    logits = jnp.einsum(f"...qh{g}d,...khd->...h{g}qk", scaled, key.astype(wide))
    logits = logits.reshape(*batch, heads, q_seq, kv_seq)
    if bias is not None:
        logits = logits + bias.astype(wide)
    if mask is not None:
        # Not -inf: a row without other entries would become NaN, and its gradient, too.
        about: Any = jnp.finfo
        logits = jnp.where(mask, logits, about(wide).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(dtype)
    weights = weights if drop is None else drop(weights)
    weights = weights.reshape(*batch, *grouped, q_seq, kv_seq)
    # The sums are wide, not the summands: no copies of weights and values are made.
    equation = f"...h{g}qk,...khd->...qh{g}d"
    found = jnp.einsum(equation, weights, value, preferred_element_type=wide)
    return found.reshape(*batch, q_seq, heads, value.shape[-1]).astype(value.dtype)


def _attend_by_jax(
    heads: AllHeads, mask: Any, bias: Any, implementation: Any, *, is_causal: bool, window: Any
) -> Heads:
    """Call JAX's function, which requires one batch axis."""
    batch = heads[0].shape[:-3]
    size = math.prod(batch)

    def flat(x: Array | None) -> Any:
        if x is None:
            return None
        if math.prod(x.shape[:-3]) == 1:
            return x.reshape(1, *x.shape[-3:])
        return jnp.broadcast_to(x, (*batch, *x.shape[-3:])).reshape(size, *x.shape[-3:])

    # JAX's function does not support strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        found = jax.nn.dot_product_attention(
            *(x.reshape(size, *x.shape[-3:]) for x in heads),
            bias=flat(None if bias is None else bias.astype(heads[0].dtype)),
            mask=flat(mask),
            is_causal=is_causal,
            # JAX counts positions on each side of the query's own, without that one.
            local_window_size=window and (window - 1, 0 if is_causal else window - 1),
            implementation=implementation,
        )
    return found.reshape(*batch, *found.shape[1:])


# ---- the caches of a model


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
        size: number of positions in each cache; unchanged if None. If a layer has a `window`, at
            most that many are cached.
        dtype: of keys and values; that of the layer's weights if None.

    Returns:
        The new State.

    Raises:
        ArgumentError: if no layer of the model has a cache.
        StateError: if the State was used up.
        StateError: if the State belongs to another model.

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
    batch = (batch,) if isinstance(batch, int) else tuple(batch)

    def has_cache(node: Any) -> bool:
        return isinstance(node, MultiheadAttention) and node.cache is not None

    def emptied(node: Any) -> Any:
        if not has_cache(node):
            return node
        # Shapes are enough: a computed weight in a Stack cannot be read. In a Stack, weights and
        # caches have an axis for the layers.
        weight = jax.eval_shape(lambda: resolve(node).key_proj.weight)
        slots = node.cache.init[0].shape[-2] if size is None else size
        lead = (*weight.shape[:-2], *batch)
        cache = node.empty_cache(lead, slots, weight.dtype if dtype is None else dtype)
        return node.replace(cache=with_init(node.cache, cache))

    if not any(map(has_cache, jtu.tree_leaves(model, is_leaf=has_cache))):
        hint = ("Create a layer with a cache:", "nn.MultiheadAttention(..., cache_size=size)")
        raise ArgumentError("reset_cache(model)", "attention with a cache", "none", hint=hint)
    whole = jtu.tree_map(emptied, state.fill(model), is_leaf=has_cache)
    return make_with_state(lambda: whole)()[1]
