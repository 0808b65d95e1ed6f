"""`MultiheadAttention`: weighted means over a sequence, for each entry of another or the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.array_shapes import ArrayShapes
from pytreemod.module.field_kinds import (
    as_sequence,
    assign_fields,
    check_flag,
    check_number,
    check_size,
    checked,
    flag,
    size,
)
from pytreemod.module.fields import field
from pytreemod.module.unfinished import sizes_follow
from pytreemod.nn.arguments import (
    Title,
    check_array,
    check_dtype,
    check_lengths,
    check_state,
    divide_key,
    in_inference,
    named,
    renamed,
    required_key,
)
from pytreemod.nn.calling import (
    ABSENT,
    Absent,
    StatefulLayer,
    in_scope,
    takes,
    uses_key_if,
    wants_key,
)
from pytreemod.nn.dropout import Dropout
from pytreemod.nn.functional.attention import dot_product_attention
from pytreemod.nn.functional.explicit_meshes import divided, sharded_like, shared
from pytreemod.nn.functional.kv_caches import Cache, Extended, after, empty_cache, extend_cache
from pytreemod.nn.initializing import Initializer
from pytreemod.nn.kv_cache import (
    check_fits,
    check_ring,
    check_room,
    nan_where_full,
    refuse_uncachable,
)
from pytreemod.nn.layer_normalization import LayerNorm
from pytreemod.nn.linear import Linear
from pytreemod.nn.rms_normalization import RMSNorm
from pytreemod.nn.rotary_positions import IN_PROCESS_HEADS, RotaryPositionalEmbedding
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.tokens import StateIndex
from pytreemod.state.values import State
from pytreemod.tree.split_arrays import explicit_mesh
from pytreemod.tree.traces import traced_apart
from pytreemod.typing import AnyArray

Heads: TypeAlias = Shaped[Array, "*batch seq heads size"]
ProcessHeads: TypeAlias = Callable[..., tuple[Heads, Heads, Heads]]
"""Maps the heads of queries, keys and values, and positions, to the heads that are used."""

Bias: TypeAlias = Shaped[Array, "..."] | Callable[[Array, Array], Array]
"""An array added to the products of queries and keys, or a function from both positions to it."""

QK_NORMS = ("rms", "layer")
IMPLEMENTATIONS = ("xla", "cudnn")


def _check_divides(where: str, kv_heads: Any, layer: MultiheadAttention) -> int | None:
    if kv_heads is None:
        return None
    count = check_size(where, kv_heads, 1)
    if layer.num_heads % count != 0:
        raise ArgumentError(where, f"a divisor of num_heads={layer.num_heads}", str(count))
    return count


def _check_name(where: str, name: Any, names: Sequence[str]) -> Any:
    if name is None or (isinstance(name, str) and name in names):
        return name
    expected = f"one of {', '.join(map(repr, names))}, or None"
    raise ArgumentError(where, expected, describe(name))


def _check_rotary(where: str, rotary: Any, layer: MultiheadAttention) -> Any:
    if rotary is None:
        return None
    size = layer.qk_size
    hint = ("It rotates heads of size qk_size:", f"rotary=nn.RotaryPositionalEmbedding({size})")
    if not isinstance(rotary, RotaryPositionalEmbedding):
        expected = "a RotaryPositionalEmbedding"
        raise ArgumentError(where, expected, describe(rotary), hint=hint)
    if rotary.embedding_size != size:
        expected = f"an embedding with embedding_size={size}"
        got = f"embedding_size={rotary.embedding_size}"
        raise ArgumentError(where, expected, got, hint=hint)
    return rotary


class MultiheadAttention(StatefulLayer):
    r"""Multi-head attention: $\mathrm{softmax}(q k^\top / \sqrt{d}) \, v$ for each head.

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
    cache, and sets the number of sequences.

    With `window`, the cache is a ring of that many positions, which is never full. Otherwise, a
    position beyond the cache raises an error outside compiled code. In compiled code, the results
    from the first such position on are NaN, or with `check=True` an error.

    Fields:
        query_proj: Linear, its weight of shape (num_heads * qk_size, query_size)
        key_proj: Linear, its weight of shape (num_kv_heads * qk_size, key_size)
        value_proj: Linear, its weight of shape (num_kv_heads * vo_size, value_size)
        output_proj: Linear, its weight of shape (output_size, num_heads * vo_size)
        dropout: Dropout, of the attention weights
        query_norm: RMSNorm or LayerNorm of shape (qk_size,), for each head of a query
        key_norm: the same for keys
        rotary: rotates queries and keys by their positions
        cache: token of the keys, the values and the number of positions seen

    Args:
        num_heads: number of heads, >= 1.
        query_size: size of a query; None if it follows from query
            ([`materialize`][pytreemod.materialize]).
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
            half precision differently. If None, and with dropout or a cache, the formula is
            computed in float32.
        cache_size: number of positions in the cache of keys and values, >= 1, and not less than
            window; no cache if None.

    State and randomness: uses one key when training, if dropout_p is not 0. With cache_size, reads
        and writes its token if a State is passed in.

    Raises:
        ArgumentError: if an argument is invalid, a size is not divisible by the number of heads,
            mask is not boolean, or an argument is not supported with a State.
        RngError: if training has no key, or key is not a random key.
        ShapeError: if a sequence does not have the size above; keys and values, or batch axes,
            differ in number; mask, bias, lengths or the result of process_heads has another shape.
        StateError: if the cache has no room, where that can be known.
        CheckError: if the cache has no room, in compiled code with check=True.

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
        https://arxiv.org/abs/2010.04245.
    """

    query_proj: Linear
    key_proj: Linear
    value_proj: Linear
    output_proj: Linear
    dropout: Dropout
    num_heads: int = size(1)
    query_size: int = size()
    key_size: int = size()
    value_size: int = size()
    output_size: int = size()
    qk_size: int = size()
    vo_size: int = size()
    use_query_bias: bool = flag()
    use_key_bias: bool = flag()
    use_value_bias: bool = flag()
    use_output_bias: bool = flag()
    # After Equinox's fields, because its files have no names. Defaults, although __init__ sets
    # them: a value equal to its default is not printed.
    num_kv_heads: int | None = field(default=None, static=True, accepts=_check_divides)
    is_causal: bool = flag(default=False)
    window: int | None = size(1, optional=True, default=None)
    implementation: Literal["xla", "cudnn"] | None = checked(
        _check_name, IMPLEMENTATIONS, default=None
    )
    query_norm: RMSNorm | LayerNorm | None = field(default=None)
    key_norm: RMSNorm | LayerNorm | None = field(default=None)
    rotary: RotaryPositionalEmbedding | None = field(default=None, accepts=_check_rotary)
    cache: StateIndex[Cache] | None = field(default=None)

    @sizes_follow(query_size=lambda query: query.shape[-1])
    def __init__(
        self,
        num_heads: int,
        query_size: int | None,
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
    ):
        self.num_heads = num_heads
        assign_fields(self, query_size=query_size)
        heads, own_size = self.num_heads, self.query_size
        self.key_size = own_size if key_size is None else key_size
        self.value_size = own_size if value_size is None else value_size
        self.output_size = own_size if output_size is None else output_size
        self.qk_size = self._head_size("qk_size") if qk_size is None else qk_size
        self.vo_size = self._head_size("vo_size") if vo_size is None else vo_size
        self.use_query_bias, self.use_key_bias = use_query_bias, use_key_bias
        self.use_value_bias, self.use_output_bias = use_value_bias, use_output_bias
        self.num_kv_heads, self.is_causal, self.window = num_kv_heads, is_causal, window
        self.implementation, self.rotary = implementation, rotary
        kv_heads = self._kv_heads
        # Checked here, under its name in this layer; Dropout calls it `p`.
        p = check_number(named(self, "dropout_p"), dropout_p, 0.0, 1.0)
        self.dropout = Dropout(p, check_flag(named(self, "inference"), inference))

        dtype = check_dtype(named(self, "dtype"), dtype)
        # Split in one go: reading one key after the other takes as long as making a layer.
        for_query, for_key, for_value, for_output = divide_key(named(self, "key"), key, 4)
        linear = partial(Linear, dtype=dtype, weight_init=weight_init, bias_init=bias_init)
        sizes = (heads * self.qk_size, kv_heads * self.qk_size, kv_heads * self.vo_size)
        self.query_proj = linear(own_size, sizes[0], self.use_query_bias, key=for_query)
        self.key_proj = linear(self.key_size, sizes[1], self.use_key_bias, key=for_key)
        self.value_proj = linear(self.value_size, sizes[2], self.use_value_bias, key=for_value)
        found = heads * self.vo_size
        self.output_proj = linear(found, self.output_size, self.use_output_bias, key=for_output)
        name = _check_name(named(self, "qk_norm"), qk_norm, QK_NORMS)
        norms = [self._norm(name, dtype) for _ in ("query", "key")]
        self.query_norm, self.key_norm = norms
        self.cache = self._new_cache(cache_size, dtype)

    def __check_init__(self) -> None:
        if self.cache is not None and not self.is_causal:
            hint = (
                "Later positions attend to the cache, so it needs every position:",
                "is_causal=True",
            )
            expected = "is_causal=True with a cache"
            raise ArgumentError(named(self, "is_causal"), expected, "False", hint=hint)
        _check_rotary(named(self, "rotary"), self.rotary, self)
        # Only a cache in the layer; a cache in a State is checked at each call.
        if self.cache is not None and isinstance(self.cache.init, tuple):
            hint = ("Make the layer with both:", f"window={self.window}, cache_size={self.window}")
            check_ring(named(self, "window"), self.window, self.cache.init[0].shape[-2], hint)

    def __array_shapes__(self) -> ArrayShapes:
        kv_heads = self._kv_heads
        sizes = {
            "query_proj": (self.num_heads * self.qk_size, self.query_size, self.use_query_bias),
            "key_proj": (kv_heads * self.qk_size, self.key_size, self.use_key_bias),
            "value_proj": (kv_heads * self.vo_size, self.value_size, self.use_value_bias),
            "output_proj": (self.output_size, self.num_heads * self.vo_size, self.use_output_bias),
        }
        shapes: ArrayShapes = {}
        for name, (n_out, n_in, use_bias) in sizes.items():
            shapes |= {f"{name}.weight": (n_out, n_in)}
            shapes |= {f"{name}.bias": (n_out,) if use_bias else None}
        shapes |= {f"{name}_norm.weight": (self.qk_size,) for name in ("query", "key")}
        if self.cache is not None and isinstance(self.cache.init, tuple):
            slots = self.cache.init[0].shape[-2]
            shapes |= {"cache.init.0": (kv_heads, slots, self.qk_size)}
            shapes |= {"cache.init.1": (kv_heads, slots, self.vo_size)}
        return shapes

    @uses_key_if(lambda layer: wants_key(layer.dropout))
    @in_scope("pm.nn.MultiheadAttention")
    def __call__(
        self,
        query: AnyArray,
        key_: AnyArray | State | None = None,
        value: AnyArray | None = None,
        mask: Bool[Array, ...] | None = None,
        *,
        key: KeyLike | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: ProcessHeads | None = None,
        state: State | Absent = ABSENT,
        bias: Bias | None = None,
        lengths: AnyArray | None = None,
        is_causal: bool | None = None,
        check: bool = False,
    ) -> Any:
        """Compute a mean of the values for each query.

        Args:
            query: the queries.
            key_: the keys; the queries if None. A State passed here is used as `state`, so that
                the layer works where layers are called as `layer(x, state)`.
            value: the values; the keys if None.
            mask: True where a query may look. A query that may look nowhere looks everywhere
                equally. (PyTorch's masks are the opposite: True where a query may not look.)
            key: decides which weights are dropped.
            inference: overrides the `inference` of `dropout` if not None.
            deterministic: an older name of `inference`, with a warning.
            process_heads: maps the projected queries, keys and values, each of shape
                (..., seq, num_heads, size), to new ones of the same shapes; see
                `RotaryPositionalEmbedding` for an example. Keys and values have num_kv_heads heads.
                A parameter `positions` gets the positions of queries and keys, (..., seq) or
                (seq,); it is required with a State.
            state: continues the sequences in the cache; queries, keys and values have the same
                positions.
            bias: added to the products of queries and keys; or a function from the positions of
                queries, (..., q_seq), and of keys, (..., kv_seq), to such an array. Without a State
                the positions have no batch axes.
            lengths: number of valid keys in each sequence; all if None. Results at the positions
                after them are meaningless. In compiled code, negative lengths count as zero, and
                larger ones as all.
            is_causal: overrides the field of that name if not None.
            check: whether compiled code raises an error if the cache has no room, or lengths are
                wrong. This makes a step much slower: it waits for Python.

        Returns:
            An output for each query; with `state`, the pair of it and the new State.
        """
        where = Title(self, "num_heads", "query_size")
        if deterministic is not None:
            inference = renamed(str(where), "deterministic", deterministic, "inference")
        if isinstance(key_, State):
            key_, state = None, key_
        check_state(where, state)
        key_ = query if key_ is None else key_
        query, key_, value = self._sequences(where, query, key_, key_ if value is None else value)
        batch, count = key_.shape[:-2], key_.shape[-2]
        lengths = check_lengths(where, "lengths", lengths, batch, count, check)
        is_causal = self.is_causal if is_causal is None else check_flag(str(where), is_causal)
        looking, looked_at, found_there = self._shared(query, key_, value)
        heads = (
            self._projected(where, "query_proj", looking, self.num_heads, self.qk_size),
            self._projected(where, "key_proj", looked_at, self._kv_heads, self.qk_size),
            self._projected(where, "value_proj", found_there, self._kv_heads, self.vo_size),
        )
        # After the check of the layer's arrays: in several layers as one, the cache is stacked too.
        cache = None
        if isinstance(state, State):
            refuse_uncachable(where, self.cache, mask, bias, is_causal, query, key_)
            cache = self._extended(where, state, key_, lengths, check)
        # Before the rotation: the weight of a norm would scale the two numbers of a pair apart.
        if self.query_norm is not None and self.key_norm is not None:
            heads = (self.query_norm(heads[0]), self.key_norm(heads[1]), heads[2])
        if process_heads is not None:
            heads = _processed(where, process_heads, heads, cache)
        dropout = None
        if self.dropout.p > 0 and not in_inference(where, self.dropout.inference, inference):
            dropout = partial(self._dropped, where, key)
        lead = (*query.shape[:-2], self.num_heads)
        # With a cache the mask decides: the index of a slot in a ring differs from its position.
        if isinstance(state, State) and cache is not None:
            token: Any = self.cache
            seen = self._seen(heads, cache, lengths)
            turned, mask = self._turned(heads[0], seen.query_positions), seen.mask[..., None, :, :]
            heads = (turned, seen.keys, seen.values)
            bias = _check_bias(where, bias, (*lead, *seen.mask.shape[-2:]), *seen[-2:])
            found = dot_product_attention(*heads, mask, bias=bias, dropout=dropout)
            if self.window is None:
                found = nan_where_full(found, seen, lengths)
            state = state.set(token, seen.cache)
        else:
            wanted = (*lead, query.shape[-2], key_.shape[-2])
            mask = _check_mask(where, mask, wanted)
            mask = _within(mask, lengths, key_.shape[-2])
            heads = (self._turned(heads[0]), self._turned(heads[1]), heads[2])
            places = (jnp.arange(x.shape[-2]) for x in (query, key_))
            bias = _check_bias(where, bias, wanted, *places)
            found = dot_product_attention(
                *heads,
                mask,
                bias=bias,
                is_causal=is_causal,
                window=self.window,
                implementation=self.implementation,
                dropout=dropout,
            )
        found = found.reshape((*query.shape[:-1], self.num_heads * self.vo_size))
        out = self.output_proj(found)
        return (out, state) if isinstance(state, State) else out

    def is_stateful(self) -> bool:
        """Whether the layer has a cache.

        Returns:
            True or False.
        """
        return self.cache is not None

    def needs_state(self) -> bool:
        """Whether the layer must be called with a State; without one nothing is cached.

        Returns:
            False.
        """
        return False

    @property
    def deterministic(self) -> bool:
        """An older name of `dropout.inference`."""
        return self.dropout.inference

    def _head_size(self, name: str) -> int:
        """Return the default size of a head: query_size divided by num_heads."""
        where = named(self, name)
        share, rest = divmod(self.query_size, self.num_heads)
        if rest != 0:
            raise ArgumentError(
                f"{where}: num_heads={self.num_heads} does not divide query_size={self.query_size}"
            )
        return share

    def _sequences(self, where: Title, query: Any, key_: Any, value: Any) -> tuple[Array, ...]:
        """Check queries, keys and values, and that they fit together."""
        sizes = (self.query_size, self.key_size, self.value_size)
        names = ("query", "key_", "value")
        found = tuple(
            _check_sequence(where, name, x, size)
            for name, x, size in zip(names, (query, key_, value), sizes, strict=True)
        )
        query, key_, value = found
        if value.shape[:-1] != key_.shape[:-1]:
            expected = "a value for each key"
            got = f"key_ {describe(key_)} and value {describe(value)}"
            raise ShapeError(where, expected, got)
        if query.shape[:-2] != key_.shape[:-2]:
            hint: Sequence[str] = (
                "To use the same keys and values for all queries:",
                "jax.vmap(lambda query: layer(query, key_, value))(queries)",
            )
            expected = "equal batch axes of query and key_"
            got = f"query {describe(query)} and key_ {describe(key_)}"
            raise ShapeError(where, expected, got, hint=hint)
        return found

    @property
    def _kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def _norm(self, name: str | None, dtype: Any) -> RMSNorm | LayerNorm | None:
        """Make a normalization layer for heads of queries, or of keys."""
        if name is None:
            return None
        kind = RMSNorm if name == "rms" else LayerNorm
        return kind(self.qk_size, use_bias=False, dtype=dtype)

    def _new_cache(self, size: Any, dtype: Any) -> StateIndex[Cache] | None:
        """Make a token with an empty cache for one sequence."""
        if size is None:
            return None
        slots = check_size(named(self, "cache_size"), size, 1)
        return StateIndex(self.empty_cache((), slots, dtype))

    def empty_cache(self, batch: tuple[int, ...], size: int, dtype: Any = None) -> Cache:
        """Make an empty cache of this layer's sizes; see `reset_cache`.

        Args:
            batch: the batch axes of the sequences.
            size: number of positions in the cache; with a window, at most `window` are cached.
            dtype: of keys and values; JAX's default float if None.

        Returns:
            Keys, values and the number of positions seen.
        """
        hint = ("A window needs exactly this size:", f"cache_size={self.window}")
        check_ring(named(self, "cache_size"), self.window, size, hint)
        # A ring: each new position overwrites the one that leaves the window.
        slots = size if self.window is None else min(size, self.window)
        sizes = (self._kv_heads, self.qk_size, self.vo_size)
        return empty_cache(batch, slots, *sizes, dtype)

    def _turned(self, heads: Array, positions: Array | None = None) -> Array:
        """Rotate queries or keys (..., seq, heads, size) by their positions, if rotary is set."""
        if self.rotary is None:
            return heads
        return self.rotary(heads, positions=positions, axis=-3)

    def _extended(
        self, where: Title, state: State, key_: Array, lengths: Array | None, check: bool
    ) -> Cache:
        """Return the cache, after a check that it has room for these keys."""
        token: Any = self.cache
        cache: Cache = state.get(token)
        check_fits(where, cache, self.empty_cache, key_.shape[:-2], self.window)
        # A ring is never full.
        if self.window is not None:
            return cache
        return check_room(where, cache, key_.shape[-2], lengths, check)

    def _seen(
        self, heads: tuple[Array, Array, Array], cache: Cache, lengths: Array | None
    ) -> Extended:
        """Write the new keys and values, and return all that the queries may see."""
        _, key, value = heads
        # Rotated before they are cached: the angle of a position never changes.
        key = self._turned(key, after(cache[2], key.shape[-3]))
        return extend_cache(cache, key, value, lengths, window=self.window)

    def _shared(self, *sequences: Array) -> tuple[Array, ...]:
        """Mark sequences that are projected more than once, to sum their gradient once."""
        projections = (self.query_proj, self.key_proj, self.value_proj)
        # Other projections may use a sequence in any way.
        if explicit_mesh(*sequences) is None or not all(map(_is_linear, projections)):
            return sequences
        uses: dict[int, list[Array]] = {}
        for x, projection in zip(sequences, projections, strict=True):
            uses.setdefault(id(x), []).append(projection.weight)
        marked = {id(x): shared(x, uses[id(x)]) for x in sequences}
        return tuple(marked[id(x)] for x in sequences)

    def _projected(self, where: Title, name: str, x: Array, heads: int, size: int) -> Array:
        """Project a sequence to heads: (..., seq, heads, size)."""
        y = getattr(self, name)(x)
        wanted = (*x.shape[:-1], heads * size)
        if y.shape != wanted:
            expected = f"{name} to give shape {wanted}, for {heads} heads of {size}"
            hint = (
                "Replace the projections and their sizes in one call:",
                f"layer = layer.replace({name}={name}, num_heads=..., qk_size=..., vo_size=...)",
            )
            raise ShapeError(where, expected, describe(y), hint=hint)
        return divided(y, -1, (heads, size))

    def _dropped(self, where: Title, key: KeyLike | None, weights: Array) -> Array:
        """Drop weights; each head uses its own key, as in Equinox."""
        call = "layer(query, key_, value, key=jax.random.key(0))"
        keys = jax.random.split(required_key(where, key, call), self.num_heads)

        def drop(head: Array, key: Array) -> Array:
            # The caller has decided to drop.
            return self.dropout(head, key=key, inference=False)

        keys = sharded_like(keys, weights, weights.ndim - 3)
        return jax.vmap(drop, (-3, 0), -3)(weights, keys)


def _is_linear(projection: Any) -> bool:
    return isinstance(projection, Linear) and type(projection).__call__ is Linear.__call__


def _check_sequence(where: Title, name: str, x: Any, size: int) -> Array:
    """Require an array of real numbers (..., seq, size)."""
    x = check_array(where, x, name)
    if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        hint: Sequence[str] = ()
        if x.dtype == jnp.bool_:
            hint = ("Pass a mask by name:", "layer(x, x, x, mask=mask)")
        raise ArgumentError(where, f"{name} of real numbers", describe(x), hint=hint)
    if x.ndim >= 2 and x.shape[-1] == size:
        return x
    raise ShapeError(where, f"{name} of shape (..., seq, {size})", describe(x))


def _processed(
    where: Title, process_heads: Any, heads: tuple[Array, Array, Array], cache: Cache | None
) -> tuple[Array, Array, Array]:
    """Apply the user's function to the heads; with a cache it must take positions."""
    if not callable(process_heads):
        expected = "process_heads to be a function (query, key, value) -> (query, key, value)"
        raise ArgumentError(where, expected, describe(process_heads))
    options: dict[str, Any] = {}
    if takes(process_heads, "positions"):
        if heads[0].shape[-3] != heads[1].shape[-3]:
            expected = "queries and keys at the same positions, for process_heads with positions"
            got = f"{heads[0].shape[-3]} and {heads[1].shape[-3]}"
            raise ShapeError(where, expected, got)
        count = heads[0].shape[-3]
        options["positions"] = jnp.arange(count) if cache is None else after(cache[2], count)
    elif cache is not None:
        hint = (
            "With a cache, positions do not start at 0. Let the layer embed them, or take them:",
            "nn.MultiheadAttention(..., rotary=nn.RotaryPositionalEmbedding(qk_size))",
            "def process_heads(query, key, value, positions): ...",
        )
        expected = "a process_heads that takes positions, with a State"
        raise ArgumentError(where, expected, describe(process_heads), hint=hint)
    # A jitted embedding that was traced elsewhere has not looked where its heads are.
    with traced_apart(IN_PROCESS_HEADS):
        processed = process_heads(*heads, **options)
    found = as_sequence(processed) or [processed]
    shapes = [getattr(x, "shape", None) for x in found]
    if shapes != [x.shape for x in heads]:
        wanted = ", ".join(map(describe, heads))
        got = ", ".join(map(describe, found))
        raise ShapeError(where, f"process_heads to return {wanted}", got)
    query, key, value = found
    return query, key, value


def _check_mask(where: Title, mask: Any, wanted: tuple[int, ...]) -> Array | None:
    """Require booleans, with the two axes of the sequences or with all axes of the products."""
    if mask is None:
        return None
    mask = check_array(where, mask, "mask")
    if mask.dtype != jnp.bool_:
        hint: Sequence[str] = (
            "1 means attend, 0 means do not attend; convert it:",
            "mask.astype(bool)",
        )
        if jnp.issubdtype(mask.dtype, jnp.floating):
            hint = (
                "0 and -inf, as in PyTorch, are a bias; 1 and 0 are a mask:",
                "layer(x, bias=mask)",
                "layer(x, mask=mask.astype(bool))",
            )
        expected = "mask of booleans"
        raise ArgumentError(where, expected, describe(mask), hint=hint)
    return _check_spread(where, "mask", mask, wanted, (2,))


def _check_spread(
    where: Title, name: str, x: Array, wanted: tuple[int, ...], fewer: Sequence[int]
) -> Array:
    """Require all axes of the products (*batch, heads, q_seq, kv_seq), or one of fewer numbers.

    Only the number of axes decides their meaning, never sizes that happen to be equal. So a batch
    with as many examples as heads is not a special case.
    """
    if x.ndim in (len(wanted), *fewer) and _spreads(x.shape, wanted):
        return x
    batch, heads, places = wanted[:-3], wanted[-3:-2], wanted[-2:]
    lines: list[str] = []
    if len(x.shape) == len(batch) + 2 and _spreads(x.shape, (*batch, *places)):
        lines.append(f"{name} = {name}[..., None, :, :]  # one for each example, for all heads")
    if len(x.shape) == 3 and _spreads(x.shape, (*heads, *places)):
        new = ", ".join(["None"] * len(batch))
        lines.append(f"{name} = {name}[{new}]  # one for each head, for all examples")
    if not lines and x.shape == (*batch, places[1]):
        lines.append(f"{name} = {name}[..., None, None, :]  # keys of each example")
        if name == "mask":
            lines.append("lengths=mask.sum(-1)  # if the valid keys are first")
    hint = ("Add the missing axes, of size 1:", *lines) if lines else ()
    expected = f"{name} of shape {places} or {wanted}, where any size may be 1"
    raise ShapeError(where, expected, describe(x), hint=hint)


def _spreads(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    pairs = zip(shape[::-1], wanted[::-1], strict=False)
    return len(shape) <= len(wanted) and all(size in (1, full) for size, full in pairs)


def _within(mask: Array | None, lengths: Array | None, count: int) -> Array | None:
    """Return a mask that also hides keys beyond the lengths."""
    if lengths is None:
        return mask
    shape = (*lengths.shape, count)
    limits = jax.lax.broadcast_in_dim(lengths, shape, range(lengths.ndim))
    here = jax.lax.broadcasted_iota(lengths.dtype, shape, lengths.ndim) < limits
    # Hidden from all heads and all queries.
    here = here[..., None, None, :]
    if mask is None:
        return here
    whole = jnp.broadcast_shapes(here.shape, mask.shape)
    return jnp.broadcast_to(here, whole) & jnp.broadcast_to(mask, whole)


def _check_bias(
    where: Title, bias: Any, wanted: tuple[int, ...], places: Array, others: Array
) -> Array | None:
    """Compute and check the bias for queries and keys at these positions."""
    if bias is None:
        return None
    by_places: tuple[int, ...] = ()
    if callable(bias):
        # The result has the axes of the positions; without a cache they have no batch axes.
        bias, by_places = bias(places, others), (places.ndim + 2,)
    bias = check_array(where, bias, "bias")
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        hint: Sequence[str] = ()
        if bias.dtype == jnp.bool_:
            hint = ("Pass booleans as the mask:", "layer(x, x, x, mask=mask)")
        raise ArgumentError(where, "bias of a floating dtype", describe(bias), hint=hint)
    return _check_spread(where, "bias", bias, wanted, (0, 1, 2, *by_places))
