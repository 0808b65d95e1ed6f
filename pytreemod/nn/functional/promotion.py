"""Dtypes and broadcasting for the layers' formulas.

Both are explicit, so that the formulas work under JAX's strictest settings
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
from pytreemod.nn.functional.explicit_meshes import entries, sharded_like, sharding
from pytreemod.tree.split_arrays import explicit_mesh


def promote(*arrays: Any) -> tuple[Any, ...]:
    """Convert arrays to one dtype by JAX's rules; None stays None.

    Args:
        arrays: arrays, numbers or None.

    Returns:
        As many JAX arrays (or None).

    Raises:
        jax.dtypes.TypePromotionError: if the dtypes differ and promotion is set to strict.

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
    """Return the dtype for statistics of an array of `dtype`: float32 or wider.

    Args:
        dtype: an array's dtype.

    Returns:
        A floating dtype.

    Raises:
        ArgumentError: if the dtype is complex, for which the formulas would need |x|^2.

    Examples:
        >>> jnp.dtype(computing_dtype(jnp.bfloat16)).name
        'float32'
    """
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ArgumentError("normalization", "real numbers", str(jnp.dtype(dtype)))
    # The mean of integers is a float.
    return wide_dtype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)


@ft.cache
def wide_dtype(dtype: Any) -> Any:
    """Return the dtype for long sums of `dtype`: float32 for narrower floats.

    In bfloat16 a long sum stops growing: 256 + 1 is 256.

    Args:
        dtype: an array's dtype.

    Returns:
        float32 for narrower floats; any other dtype unchanged.

    Examples:
        >>> jnp.dtype(wide_dtype(jnp.float16)).name, jnp.dtype(wide_dtype(jnp.int8)).name
        ('float32', 'int8')
    """
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.float32
    return dtype


def countable(x: Shaped[Array, ...]) -> Shaped[Array, ...]:
    """Convert integers so that they can be added and subtracted: signed, of 32 bits or more.

    Positions and lengths can have any integer dtype. In uint8, 255 + 1 would be 0, and no number
    would be negative.

    Args:
        x: an array; floats are unchanged.

    Returns:
        The same numbers; numbers that are too large become the largest of the dtype.

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
    """Convert an array to its `wide_dtype`; return the array itself if it is wide enough."""
    return _as_dtype(x, wide_dtype(x.dtype))


def narrow(out: Shaped[Array, ...], x: Shaped[Array, ...]) -> Shaped[Array, ...]:
    """Convert a result to the dtype of the input, unless the input is integer."""
    return out.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else out


def place(values: Shaped[Array, ...], like: Shaped[Array, ...], axis: int) -> Shaped[Array, ...]:
    """Give `values` the rank of `like`, with its first axis at `axis`; other axes have size one.

    The gradient of values is a sum over the broadcast entries, so `like` should have a wide dtype:
    see `with_shared`.

    Args:
        values: an array of at most `like.ndim - axis` axes.
        like: the array to match.
        axis: the axis of `like` that matches the first axis of `values`, counted from the front.

    Returns:
        An array of like's dtype that broadcasts to its shape.

    Examples:
        >>> place(jnp.arange(2), jnp.zeros((2, 3), int), 0)
        Array([[0],
               [1]], dtype=int32)
    """
    values = sharded_like(_as_dtype(values, like.dtype), like, axis)
    # Not of the shape of `like`: JAX would store such an array for the backward pass.
    own = range(axis, axis + values.ndim)
    shape = tuple(size if i in own else 1 for i, size in enumerate(like.shape))
    # Nothing to broadcast, so the program gets no operation.
    if values.shape == shape:
        return values
    to, mesh = None, explicit_mesh(like)
    if mesh is not None:
        theirs = enumerate(entries(like))
        to = sharding(mesh, [names if i in own else () for i, names in theirs])
    return lax.broadcast_in_dim(values, shape, own, out_sharding=to)


def with_shared(
    operation: Callable[[Any, Any], Array],
    x: Shaped[Array, ...],
    values: Shaped[Array, ...] | None,
    axis: int,
) -> Shaped[Array, ...]:
    """Add or multiply an array that all examples share, such as a bias.

    Its gradient is a long sum, so this computes in the `wide_dtype`, and returns the dtype of x.
    `place` alone could not do it: under `jax.vmap` the sum over the batch belongs to the operation.

    Args:
        operation: of two arrays that broadcast, such as `lax.add`.
        x: an array.
        values: the shared array; None leaves x unchanged.
        axis: the axis of x that matches the first axis of values, counted from the front.

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
