"""Dtypes and broadcasting as the layers' formulas need them.

Both are explicit, so that the formulas hold under JAX's strictest settings
(`jax_numpy_dtype_promotion="strict"`, `jax_numpy_rank_promotion="raise"`).
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from pytreemod.errors import ArgumentError
from pytreemod.nn.functional.explicit_meshes import laid_like, lies


def promote(*arrays: Any) -> tuple[Any, ...]:
    """Bring arrays to one dtype by JAX's rules; None stays None.

    Args:
        arrays: arrays, numbers or None.

    Returns:
        As many JAX arrays (or None).

    Raises:
        jax.errors.TypePromotionError: the dtypes differ and promotion is set to strict.

    Examples:
        >>> [array.dtype.name for array in promote(1.0, jnp.ones(2, jnp.bfloat16))]
        ['bfloat16', 'bfloat16']
    """
    given = [array for array in arrays if array is not None]
    dtype = jnp.result_type(*given)
    return tuple(None if array is None else _as_dtype(array, dtype) for array in arrays)


def _as_dtype(array: Any, dtype: Any) -> Array:
    if isinstance(array, jax.Array) and array.dtype == dtype:
        return array
    return jnp.asarray(array, dtype)


def computing_dtype(dtype: Any) -> Any:
    """The dtype in which statistics of an array of `dtype` are computed: float32 or wider.

    Args:
        dtype: an array's dtype.

    Returns:
        A floating dtype.

    Raises:
        ArgumentError: the dtype is complex, for which the formulas would need |x|^2.

    Examples:
        >>> jnp.dtype(computing_dtype(jnp.bfloat16)).name
        'float32'
    """
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ArgumentError("normalization", "real numbers", str(jnp.dtype(dtype)))
    # Integers have no mean of their dtype.
    return wide_dtype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)


@ft.cache
def wide_dtype(dtype: Any) -> Any:
    """The dtype in which many numbers of `dtype` are added up: float32 for narrower floats.

    In bfloat16, 256 + 1 is 256: a long sum stops growing.

    Args:
        dtype: an array's dtype.

    Returns:
        float32 for floats that are narrower; what was given for all else.

    Examples:
        >>> jnp.dtype(wide_dtype(jnp.float16)).name, jnp.dtype(wide_dtype(jnp.int8)).name
        ('float32', 'int8')
    """
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.float32
    return dtype


def countable(x: Shaped[Array, ...]) -> Shaped[Array, ...]:
    """Integers of which one can count on and subtract: signed, of 32 bits or more.

    Places and lengths come as whatever holds them, such as uint8: counted in that, 255 + 1 is 0,
    and no place is before the first.

    Args:
        x: an array; floats stay what they are.

    Returns:
        The same numbers; those that have no room count as the greatest that has.

    Examples:
        >>> countable(jnp.array([3, 255], jnp.uint8)) - 4
        Array([ -1, 251], dtype=int32)
    """
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return x
    bits, signed = jnp.iinfo(x.dtype).bits, jnp.issubdtype(x.dtype, jnp.signedinteger)
    if bits < 32:
        return x.astype(jnp.int32)
    if signed:
        return x
    as_signed = jnp.dtype(f"int{bits}")
    return jnp.minimum(x, jnp.asarray(jnp.iinfo(as_signed).max, x.dtype)).astype(as_signed)


def widen(x: Shaped[Array, ...]) -> Shaped[Array, ...]:
    """An array in its `wide_dtype`; the array itself where it is wide enough."""
    return _as_dtype(x, wide_dtype(x.dtype))


def narrow(out: Shaped[Array, ...], x: Shaped[Array, ...]) -> Shaped[Array, ...]:
    """A result in the dtype of the input, unless that is one of integers."""
    return out.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else out


def place(values: Shaped[Array, ...], like: Shaped[Array, ...], axis: int) -> Shaped[Array, ...]:
    """Broadcast `values` against `like`, its first axis put at `axis` of it.

    The gradient of values is a sum over all entries that they were brought to, so `like` is to be
    of a wide dtype: see `with_shared`.

    Args:
        values: an array of at most `like.ndim - axis` axes.
        like: the array to match.
        axis: where the first axis of `values` belongs, counted from the front.

    Returns:
        An array of like's shape and dtype.

    Examples:
        >>> place(jnp.arange(2), jnp.zeros((2, 3), int), 0)
        Array([[0, 0, 0],
               [1, 1, 1]], dtype=int32)
    """
    values = laid_like(_as_dtype(values, like.dtype), like, axis)
    # It is for all axes: nothing is left to broadcast, and the program gets no operation.
    if values.shape == like.shape:
        return values
    # As `like` lies: its gradient would be gathered for what is whole, before it is summed.
    to = lies(like)
    return lax.broadcast_in_dim(
        values, like.shape, range(axis, axis + values.ndim), out_sharding=to
    )


def with_shared(
    operation: Callable[[Any, Any], Array],
    x: Shaped[Array, ...],
    values: Shaped[Array, ...] | None,
    axis: int,
) -> Shaped[Array, ...]:
    """Add or multiply what all examples share, such as a bias: its gradient is a long sum.

    So it is computed in the `wide_dtype`, and given back in the dtype of x. `place` alone could not
    do it: under `jax.vmap` the sum over the batch belongs to the operation.

    Args:
        operation: of two arrays of one shape, such as `lax.add`.
        x: an array.
        values: what it is combined with; None leaves x as it is.
        axis: where the first axis of values belongs, counted from the front.

    Returns:
        An array of the shape and dtype of x.

    Examples:
        >>> with_shared(lax.add, jnp.zeros((2, 3), jnp.bfloat16), jnp.arange(3), 1)
        Array([[0, 1, 2],
               [0, 1, 2]], dtype=bfloat16)
    """
    if values is None:
        return x
    wide = widen(x)
    return _as_dtype(operation(wide, place(values, wide, axis)), x.dtype)
