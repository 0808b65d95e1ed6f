"""`dot_product_attention`: averages of values, weighted by how well keys match a query."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Shaped

from pytreemod.errors import ArgumentError
from pytreemod.nn.functional.explicit_meshes import divided, factors, sharded_like, terms_of
from pytreemod.nn.functional.inlining import as_arrays, traced_once
from pytreemod.nn.functional.promotion import countable, promote, wide_dtype


def attention_mask(
    query_positions: Shaped[ArrayLike, "*batch q_seq"],
    key_positions: Shaped[ArrayLike, "*batch kv_seq"],
    *,
    is_causal: bool = False,
    window: int | None = None,
) -> Bool[Array, "*batch q_seq kv_seq"]:
    """Compute which keys each query may see, from the positions of both.

    Shapes:
        query_positions: (..., q_seq)
        key_positions: (..., kv_seq)
        return: (..., q_seq, kv_seq)

    Args:
        query_positions: integers.
        key_positions: integers.
        is_causal: whether each query sees only its own and earlier positions.
        window: number of positions that a query sees: itself and the window - 1 before it; if not
            causal, as many after it, too.

    Returns:
        True where a query may look.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> places = jnp.arange(3)
        >>> nn.functional.attention_mask(places, places, is_causal=True, window=2).astype(int)
        Array([[1, 0, 0],
               [1, 1, 0],
               [0, 1, 1]], dtype=int32)

    Source:
        Windows: Beltagy et al. 2020, https://arxiv.org/abs/2004.05150, sec. 3.1.
    """
    places = as_arrays(query_positions, key_positions)
    return _attention_mask(*places, is_causal=is_causal, window=window)


@traced_once("is_causal", "window")
def _attention_mask(query: Array, key: Array, *, is_causal: bool, window: int | None) -> Array:
    query, key = countable(query)[..., :, None], countable(key)[..., None, :]
    if window is None:
        both = jnp.broadcast_shapes(query.shape, key.shape)
        return key <= query if is_causal else jnp.ones(both, bool)
    ahead = key - query
    return (ahead > -window) & (ahead <= (0 if is_causal else window - 1))


def attention_weights(
    query: Shaped[ArrayLike, "*batch q_seq heads size"],
    key: Shaped[ArrayLike, "*batch kv_seq kv_heads size"],
    mask: Bool[ArrayLike, ...] | None = None,
    bias: Shaped[ArrayLike, ...] | None = None,
) -> Shaped[Array, "*batch heads q_seq kv_seq"]:
    r"""Compute the weight of each key for each query: $\mathrm{softmax}(q k^\top / \sqrt{d} + b)$.

    Shapes:
        query: (..., q_seq, heads, size)
        key: (..., kv_seq, kv_heads, size), kv_heads a divisor of heads
        mask: any shape that broadcasts to that of the result
        bias: any shape that broadcasts to that of the result
        return: (..., heads, q_seq, kv_seq)

    Args:
        query: the queries.
        key: the keys. If they have fewer heads than the queries, several adjacent heads of queries
            share each.
        mask: True where a query may look. A query that may look nowhere looks everywhere equally.
        bias: added to the products.

    Returns:
        Numbers that sum to one for each query, computed in float32 or wider, in the dtype of query
        and key.

    Raises:
        ArgumentError: if the number of heads of keys does not divide that of queries.
        TypeError: if the sizes disagree (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> query, key = jnp.ones((1, 1, 2)), jnp.ones((4, 1, 2))
        >>> nn.functional.attention_weights(query, key).tolist()
        [[[0.25, 0.25, 0.25, 0.25]]]

    Source:
        Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, eq. (1); heads in groups: Ainslie et
        al. 2023, https://arxiv.org/abs/2305.13245, sec. 2.2.
    """
    return _attention_weights(*as_arrays(query, key, mask, bias))


@traced_once()
def _attention_weights(query: Array, key: Array, mask: Array | None, bias: Array | None) -> Array:
    query, key = promote(query, key)
    groups = _groups(query.shape[-2], key.shape[-2])
    wide = wide_dtype(query.dtype)
    # Scales the queries, not the products, of which there are more.
    scaled = query.astype(wide) / math.sqrt(query.shape[-1])
    if groups == 1:
        logits = _products("...qhd,...khd->...hqk", scaled, key.astype(wide))
    else:
        # Groups the queries instead of repeating the keys, which would copy them for each head.
        # All sizes are explicit: an empty batch does not allow inferring one.
        scaled = divided(scaled, -2, (key.shape[-2], groups))
        logits = _products("...qhgd,...khd->...hgqk", scaled, key.astype(wide))
        logits = logits.reshape((*logits.shape[:-4], query.shape[-2], *logits.shape[-2:]))
    if bias is not None:
        logits = logits + _spread(bias.astype(wide), logits)
    if mask is not None:
        # Not -inf: a row without other entries would become NaN, and its gradient, too.
        about: Any = jnp.finfo
        logits = jnp.where(_spread(mask, logits), logits, about(wide).min)
    return jax.nn.softmax(logits, axis=-1).astype(query.dtype)


def _spread(x: Array, logits: Array) -> Array:
    """Broadcast a mask or a bias to all products."""
    return jnp.broadcast_to(sharded_like(x, logits, logits.ndim - x.ndim), logits.shape)


def _products(equation: str, x: Array, other: Array, dtype: Any = None) -> Array:
    """Sum products for each head; heads are sharded like those of the first array."""
    x, other, to = factors(x, other, terms_of(equation, x, other))
    return jnp.einsum(equation, x, other, preferred_element_type=dtype, out_sharding=to)


def weighted_values(
    weights: Shaped[ArrayLike, "*batch heads q_seq kv_seq"],
    value: Shaped[ArrayLike, "*batch kv_seq kv_heads size"],
) -> Shaped[Array, "*batch q_seq heads size"]:
    r"""Sum the values for each query, with weights: $y_q = \sum_k p_{q,k} v_k$ for each head.

    Shapes:
        weights: (..., heads, q_seq, kv_seq)
        value: (..., kv_seq, kv_heads, size), kv_heads a divisor of heads
        return: (..., q_seq, heads, size)

    Args:
        weights: the weight of each key for each query, see `attention_weights`.
        value: the values.

    Returns:
        The sums, added up in float32 or wider.

    Raises:
        ArgumentError: if the number of heads of values does not divide that of queries.
        TypeError: if the sizes disagree (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> weights, value = jnp.array([[[0.5, 0.5]]]), jnp.array([[[1.0]], [[3.0]]])
        >>> nn.functional.weighted_values(weights, value).tolist()
        [[[2.0]]]

    Source:
        Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, eq. (1).
    """
    return _weighted_values(*as_arrays(weights, value))


@traced_once()
def _weighted_values(weights: Array, value: Array) -> Array:
    weights, value = promote(weights, value)
    wide = wide_dtype(value.dtype)
    # The sums are wide, not the summands: no copies of weights and values are made.
    groups = _groups(weights.shape[-3], value.shape[-2])
    if groups == 1:
        summed = _products("...hqk,...khd->...qhd", weights, value, wide)
    else:
        heads, kv_heads = weights.shape[-3], value.shape[-2]
        weights = divided(weights, -3, (kv_heads, groups))
        summed = _products("...hgqk,...khd->...qhgd", weights, value, wide)
        summed = summed.reshape((*summed.shape[:-3], heads, summed.shape[-1]))
    return lax.convert_element_type(summed, value.dtype)


def _groups(heads: int, kv_heads: int) -> int:
    """Return how many heads of queries share one head of keys."""
    # JAX's error for the shapes says that there are no heads of keys at all.
    count, rest = divmod(heads, kv_heads or 1)
    if rest != 0:
        expected, got = f"a number of key heads that divides the {heads} query heads", str(kv_heads)
        raise ArgumentError("attention", expected, got)
    return count


def dot_product_attention(
    query: Shaped[ArrayLike, "*batch q_seq heads size"],
    key: Shaped[ArrayLike, "*batch kv_seq kv_heads size"],
    value: Shaped[ArrayLike, "*batch kv_seq kv_heads v_size"],
    mask: Bool[ArrayLike, ...] | None = None,
    *,
    bias: Shaped[ArrayLike, ...] | None = None,
    is_causal: bool = False,
    window: int | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    dropout: Callable[[Array], Array] | None = None,
) -> Shaped[Array, "*batch q_seq heads v_size"]:
    r"""Compute attention: $\mathrm{softmax}(q k^\top / \sqrt{d} + b) \, v$ for each head.

    Shapes:
        query: (..., q_seq, heads, size)
        key: (..., kv_seq, kv_heads, size), kv_heads a divisor of heads
        value: (..., kv_seq, kv_heads, v_size)
        mask: any shape that broadcasts to (..., heads, q_seq, kv_seq)
        bias: any shape that broadcasts to (..., heads, q_seq, kv_seq)
        return: (..., q_seq, heads, v_size)

    Args:
        query: the queries.
        key: the keys.
        value: the values.
        mask: True where a query may look. A query that may look nowhere looks everywhere equally.
        bias: added to the products.
        is_causal: whether each query sees only its own and earlier positions, counted from 0.
        window: number of positions that a query sees, see `attention_mask`.
        implementation: "xla" or "cudnn", to use `jax.nn.dot_product_attention`. If None, and with
            dropout or values of another size than keys, the formula above is computed.
        dropout: from the weights, (..., heads, q_seq, kv_seq), to those that are used.

    Returns:
        An average of values for each query and head. The softmax and the sums are computed in
        float32 or wider, unless another implementation is used.

    Raises:
        ArgumentError: if the number of heads of keys does not divide that of queries.
        TypeError: if the sizes disagree (raised by JAX).

    Examples:
        The second of two positions may see both, the first only itself:

        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> x = jnp.array([[[1.0]], [[3.0]]])
        >>> mask = jnp.tril(jnp.ones((2, 2), bool))
        >>> nn.functional.dot_product_attention(0 * x, x, x, mask)[:, 0, 0].tolist()
        [1.0, 2.0]

    Source:
        Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, eq. (1).
    """
    q, k, v, allowed, added = as_arrays(query, key, value, mask, bias)
    if implementation is not None and dropout is None and v.shape[-1] == k.shape[-1]:
        options: dict[str, Any] = {"is_causal": is_causal, "implementation": implementation}
        return _of_jax(q, k, v, allowed, added, window=window, **options)
    if is_causal or window is not None:
        allowed = _both(allowed, _seen(q, k, is_causal, window))
    weights = attention_weights(q, k, allowed, added)
    return weighted_values(weights if dropout is None else dropout(weights), v)


def _seen(query: Array, key: Array, is_causal: bool, window: int | None) -> Array:
    places = (jnp.arange(x.shape[-3]) for x in (query, key))
    return attention_mask(*places, is_causal=is_causal, window=window)


def _both(mask: Array | None, seen: Array) -> Array:
    """Combine two masks; a query may look where both allow it."""
    if mask is None:
        return seen
    shape = jnp.broadcast_shapes(mask.shape, seen.shape)
    return jnp.broadcast_to(mask, shape) & jnp.broadcast_to(seen, shape)


@traced_once("is_causal", "window", "implementation")
def _of_jax(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    bias: Array | None,
    *,
    is_causal: bool,
    window: int | None,
    implementation: Any,
) -> Array:
    """Call JAX's function, which requires one batch axis, and equal ranks."""
    # Called for its error: JAX's would name axes that are not those of the call.
    _groups(query.shape[-2], key.shape[-2])
    query, key, value = promote(query, key, value)
    # JAX groups the queries itself; here heads only get the same sharding.
    alike = "...qhd,...khd->...hqk"
    if key.shape[-2] == query.shape[-2]:
        query, key, _ = factors(query, key, terms_of(alike, query, key))
        query, value, _ = factors(query, value, terms_of("...qhd,...khe->...hqke", query, value))
    lead = query.shape[:-3]
    size = math.prod(lead)

    def flat(x: Array | None) -> Array | None:
        if x is None or x.ndim <= 3:
            # The same for the whole batch.
            return None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape)
        x = jnp.broadcast_to(x, (*lead, *x.shape[-3:]))
        return x.reshape((size, *x.shape[-3:]))

    # JAX's function does not support strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        found = jax.nn.dot_product_attention(
            *(x.reshape((size, *x.shape[-3:])) for x in (query, key, value)),
            bias=flat(None if bias is None else bias.astype(query.dtype)),
            mask=flat(mask),
            is_causal=is_causal,
            # JAX counts positions on each side of the query's own, without that one.
            local_window_size=None
            if window is None
            else (window - 1, 0 if is_causal else window - 1),
            implementation=implementation,
        )
    return found.reshape((*lead, *found.shape[1:]))
