"""`dot_product_attention`: averages of values, by how well their keys agree with a query."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Shaped

from pytreemod.nn.functional.inlining import as_arrays, traced_once
from pytreemod.nn.functional.promotion import promote, wide_dtype


def attention_weights(
    query: Shaped[ArrayLike, "*batch q_seq heads size"],
    key: Shaped[ArrayLike, "*batch kv_seq heads size"],
    mask: Bool[ArrayLike, ...] | None = None,
) -> Shaped[Array, "*batch heads q_seq kv_seq"]:
    r"""What each query gives to each place: $\mathrm{softmax}(q k^\top / \sqrt{d})$.

    Shapes:
        query: (..., q_seq, heads, size)
        key: (..., kv_seq, heads, size)
        mask: any shape that broadcasts to that of the result
        return: (..., heads, q_seq, kv_seq)

    Args:
        query: what is looked for.
        key: what is there to be found.
        mask: True where a query may look. One that may look nowhere looks everywhere alike.

    Returns:
        Numbers that sum to one for each query, computed in float32 or wider, in the dtype of query
        and key.

    Raises:
        TypeError: the sizes disagree (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> query, key = jnp.ones((1, 1, 2)), jnp.ones((4, 1, 2))
        >>> nn.functional.attention_weights(query, key).tolist()
        [[[0.25, 0.25, 0.25, 0.25]]]

    Source:
        Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, eq. (1).
    """
    return _attention_weights(*as_arrays(query, key, mask))


@traced_once()
def _attention_weights(query: Array, key: Array, mask: Array | None) -> Array:
    query, key = promote(query, key)
    wide = wide_dtype(query.dtype)
    # The queries and not the products, of which there are more.
    scaled = query.astype(wide) / math.sqrt(query.shape[-1])
    logits = jnp.einsum("...qhd,...khd->...hqk", scaled, key.astype(wide))
    if mask is not None:
        # Not -inf: a row of nothing else would become nan, and its gradient, too.
        about: Any = jnp.finfo
        logits = jnp.where(jnp.broadcast_to(mask, logits.shape), logits, about(wide).min)
    return jax.nn.softmax(logits, axis=-1).astype(query.dtype)


def weighted_values(
    weights: Shaped[ArrayLike, "*batch heads q_seq kv_seq"],
    value: Shaped[ArrayLike, "*batch kv_seq heads size"],
) -> Shaped[Array, "*batch q_seq heads size"]:
    r"""For each query the sum of values, by weights.

    $y_q = \sum_k p_{q,k} v_k$, each head for itself.

    Shapes:
        weights: (..., heads, q_seq, kv_seq)
        value: (..., kv_seq, heads, size)
        return: (..., q_seq, heads, size)

    Args:
        weights: what each query gives to each place, see `attention_weights`.
        value: what is found there.

    Returns:
        The sums, added up in float32 or wider.

    Raises:
        TypeError: the sizes disagree (raised by JAX).

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
    summed = jnp.einsum("...hqk,...khd->...qhd", weights, value, preferred_element_type=wide)
    return lax.convert_element_type(summed, value.dtype)


def dot_product_attention(
    query: Shaped[ArrayLike, "*batch q_seq heads size"],
    key: Shaped[ArrayLike, "*batch kv_seq heads size"],
    value: Shaped[ArrayLike, "*batch kv_seq heads v_size"],
    mask: Bool[ArrayLike, ...] | None = None,
    *,
    dropout: Callable[[Array], Array] | None = None,
) -> Shaped[Array, "*batch q_seq heads v_size"]:
    r"""Attend: $\mathrm{softmax}(q k^\top / \sqrt{d}) \, v$, each head for itself.

    Shapes:
        query: (..., q_seq, heads, size)
        key: (..., kv_seq, heads, size)
        value: (..., kv_seq, heads, v_size)
        mask: any shape that broadcasts to (..., heads, q_seq, kv_seq)
        return: (..., q_seq, heads, v_size)

    Args:
        query: what is looked for.
        key: what is there to be found.
        value: what is given for it.
        mask: True where a query may look. One that may look nowhere looks everywhere alike.
        dropout: from the weights, (..., heads, q_seq, kv_seq), to those that are used.

    Returns:
        For each query and head an average of values. The softmax and the sums are computed in
        float32 or wider.

    Raises:
        TypeError: the sizes disagree (raised by JAX).

    Examples:
        The last of two places may see both, the first one itself alone:

        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> x = jnp.array([[[1.0]], [[3.0]]])
        >>> mask = jnp.tril(jnp.ones((2, 2), bool))
        >>> nn.functional.dot_product_attention(0 * x, x, x, mask)[:, 0, 0].tolist()
        [1.0, 2.0]

    Source:
        Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, eq. (1).
    """
    weights = attention_weights(query, key, mask)
    return weighted_values(weights if dropout is None else dropout(weights), value)
