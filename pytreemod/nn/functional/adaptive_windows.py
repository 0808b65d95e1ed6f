"""Reductions over a given number of windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from pytreemod.errors import ArgumentError, describe
from pytreemod.nn.functional.promotion import widen


def adaptive_pool(
    x: Shaped[Array, ...], target_shape: Sequence[int], operation: Callable[[Any], Any]
) -> Shaped[Array, ...]:
    r"""Divide each of the last axes of x into a number of windows, and reduce these.

    $y_i = \mathrm{operation}(x_{a_i}, \dots, x_{a_{i+1} - 1})$ with
    $a_i = i \lfloor n / t \rfloor + \min(i, n \bmod t)$.

    An axis of n entries is divided into t windows that do not overlap; the first n % t of them have
    one entry more than the others. The axes are reduced one after the other. Floats narrower than
    float32 are reduced in float32 and returned in the dtype of x.

    Shapes:
        x: (..., *spatial), as many spatial axes as `target_shape` has entries
        return: (..., *target_shape)

    Args:
        x: input; every axis before the spatial ones is a batch axis.
        target_shape: number of windows on each spatial axis.
        operation: from an array of one axis to one number, such as `jax.numpy.mean`.

    Returns:
        One value for each window.

    Raises:
        ArgumentError: if operation does not return one number.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.adaptive_pool(jnp.arange(7.0), (3,), jnp.max)
        Array([2., 4., 6.], dtype=float32)

    Source:
        Equinox's windows.
    """
    wide = out = widen(x)
    first = x.ndim - len(target_shape)
    for axis, count in enumerate(target_shape, first):
        out = _reduce_axis(out, axis, count, operation)
    # Results of another dtype, such as positions, are unchanged.
    return out.astype(x.dtype) if wide is not x and out.dtype == wide.dtype else out


def _reduce_axis(x: Array, axis: int, count: int, operation: Callable[[Any], Any]) -> Array:
    """Reduce the windows of one axis: first those that are larger by one, then the others."""
    size, larger = divmod(x.shape[axis], count)
    middle = larger * (size + 1)
    # The longer windows first, as in Equinox; none overlap.
    parts = [(0, middle, larger, size + 1), (middle, x.shape[axis], count - larger, size)]
    reduced = [
        _reduce_windows(lax.slice_in_dim(x, start, stop, axis=axis), axis, (n, width), operation)
        for start, stop, n, width in parts
        if n > 0
    ]
    return reduced[0] if len(reduced) == 1 else lax.concatenate(reduced, axis)


def _reduce_windows(
    x: Array, axis: int, windows: tuple[int, int], operation: Callable[[Any], Any]
) -> Array:
    """Reduce an axis of `n * width` entries to one of n."""
    shape = (*x.shape[:axis], *windows, *x.shape[axis + 1 :])
    apply = _one_number(operation)
    # Mapped over the other axes where they are, so nothing is moved or flattened.
    mapped = apply
    for _ in range(axis + 1):
        mapped = jax.vmap(mapped)
    for _ in range(len(shape) - axis - 2):
        mapped = jax.vmap(mapped, in_axes=-1, out_axes=-1)
    if 0 in shape:
        # Without a map: JAX takes no mean of an empty batch.
        result = jax.eval_shape(apply, jax.ShapeDtypeStruct((windows[1],), x.dtype))
        return jnp.zeros((*shape[: axis + 1], *shape[axis + 2 :]), result.dtype)
    return mapped(x.reshape(shape))


def _one_number(operation: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(window: Array) -> Any:
        result = operation(window)
        if getattr(result, "shape", None) != ():
            hint = ("such as", "operation=jnp.mean")
            expected, got = "one number for each window", describe(result)
            raise ArgumentError("adaptive_pool(operation)", expected, got, hint=hint)
        return result

    return apply
