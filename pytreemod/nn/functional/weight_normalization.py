"""A weight as a direction and a length.

Computes lengths in float32 or wider, whatever the dtype of the weight.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pytreemod.errors import ArgumentError, describe
from pytreemod.nn.functional.inlining import as_arrays, traced_once
from pytreemod.nn.functional.promotion import computing_dtype


def norm_except(v: Float[Array, ...], *, axis: int | None = 0) -> Float[Array, ...]:
    r"""Compute the length of each slice of an array along one axis: $\lVert v_{i\,\cdot} \rVert$.

    Shapes:
        v: any
        return: the shape of v, with 1 for all axes but `axis`

    Args:
        v: the array.
        axis: the axis of the slices; if None, the whole array is one slice.

    Returns:
        Norms in the dtype of v, computed in float32 or wider.

    Raises:
        ArgumentError: if v is complex, or has no such axis.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.norm_except(jnp.array([[3.0, 4.0], [0.0, 2.0]])).tolist()
        [[5.0], [2.0]]
    """
    (v,) = as_arrays(v)
    return _norm_except(v, axis=_front(v, axis))


def weight_norm(
    v: Float[Array, ...], g: Float[Array, ...], *, axis: int | None = 0
) -> Float[Array, ...]:
    r"""Scale each slice of an array to a length: $g_i \, v_i / \lVert v_i \rVert$.

    If `g` is `norm_except(v)`, the result is v, up to the rounding of a sum.

    Shapes:
        v: any
        g: the shape of v, with 1 for all axes but `axis`
        return: the shape of v

    Args:
        v: directions; their lengths do not matter.
        g: lengths.
        axis: the axis of the slices; if None, the whole array is one slice.

    Returns:
        An array of the shape and dtype of v. A slice of zeros has no direction, and becomes NaN.

    Raises:
        ArgumentError: if v is complex, or has no such axis.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> v, g = jnp.array([[3.0, 4.0], [0.0, 2.0]]), jnp.array([[10.0], [2.0]])
        >>> nn.functional.weight_norm(v, g).tolist()
        [[6.0, 8.0], [0.0, 2.0]]

    Source:
        Salimans & Kingma 2016, https://arxiv.org/abs/1602.07868, eq. (2).
    """
    v, g = as_arrays(v, g)
    return _weight_norm(v, g, axis=_front(v, axis))


@traced_once("axis")
def _norm_except(v: Shaped[Array, ...], *, axis: int | None) -> Shaped[Array, ...]:
    wide = v.astype(computing_dtype(v.dtype))
    others = tuple(i for i in range(v.ndim) if i != axis)
    return jnp.sqrt(jnp.sum(jnp.square(wide), others, keepdims=True)).astype(v.dtype)


@traced_once("axis")
def _weight_norm(
    v: Shaped[Array, ...], g: Shaped[Array, ...], *, axis: int | None
) -> Shaped[Array, ...]:
    dtype = computing_dtype(v.dtype)
    # Rounds the norm to the dtype of g first, so that equal lengths cancel in narrow dtypes, too.
    factor = g.astype(dtype) / _norm_except(v, axis=axis).astype(dtype)
    return (v.astype(dtype) * jnp.broadcast_to(factor, v.shape)).astype(v.dtype)


def _front(v: Array, axis: int | None) -> int | None:
    """Count an axis from the front."""
    if axis is None or -v.ndim <= axis < v.ndim:
        return None if axis is None else axis % v.ndim
    raise ArgumentError("norm_except(axis)", f"an axis of {describe(v)}", describe(axis))
