"""`embedding`: reads rows of a table."""

from __future__ import annotations

import functools as ft
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, ArrayLike, Integer, Shaped

from pytreemod.errors import ArgumentError, describe
from pytreemod.nn.functional.explicit_meshes import factors
from pytreemod.nn.functional.inlining import as_arrays
from pytreemod.nn.functional.promotion import wide_dtype, widen
from pytreemod.tree.split_arrays import explicit_mesh


def embedding(
    x: Integer[ArrayLike, "*batch"], weight: Shaped[Array, "num size"]
) -> Shaped[Array, "*batch size"]:
    """Read the rows of weight with the numbers in x.

    $y_i = W_{x_i}$.

    Shapes:
        x: any, of integers
        weight: (num, size)
        return: (*x.shape, size)

    Args:
        x: row numbers of any integer dtype, from 0 to num - 1, or from -1 to -num to count from
            the end. -1 is the last row even if the dtype is too narrow for num.
        weight: the table.

    Returns:
        One row for each entry of x. A number out of range gives a row of NaN, or in a table of
        integers an extreme value: under `jax.jit` the values are not known, so it cannot raise an
        error. Gradients of floats narrower than float32 are added up in float32.

    Raises:
        ArgumentError: if x is not integer.
        IndexError: if the table has no rows, and x is not empty (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.embedding(jnp.array([1, 0]), jnp.array([[0.0], [10.0]])).tolist()
        [[10.0], [0.0]]
    """
    (weight,) = as_arrays(weight)
    rows = _row_numbers(x, weight.shape[0])
    if explicit_mesh(rows, weight) is not None:
        rows, weight, _ = _resharded(rows, weight)
    read = _read if wide_dtype(weight.dtype) == weight.dtype else _read_narrow
    return read(weight, rows)


def _row_numbers(x: Any, num: int) -> Array:
    """Convert row numbers to a dtype in which they stay in range, or out of range.

    JAX adds num to negative numbers in their own dtype, where the sum may overflow. It truncates
    longer integers to their lower 32 bits, which may be the number of another row.
    """
    # NumPy arrays are clipped before JAX converts them to 32 bits.
    is_numpys = isinstance(x, (np.ndarray, np.generic))
    held = cast("Any", x) if is_numpys else as_arrays(x)[0]
    bits = _bits(held.dtype)
    if bits == 0:
        raise ArgumentError("embedding(x)", "integers", describe(held))
    if bits < 32:
        return jnp.asarray(held, jnp.int32)
    if bits > 32:
        held = held.clip(max(-num - 1, int(jnp.iinfo(held.dtype).min)), num)
    return as_arrays(held)[0]


@ft.cache
def _bits(dtype: Any) -> int:
    """Return the number of bits of an integer dtype, and 0 for other dtypes."""
    return int(jnp.iinfo(dtype).bits) if jnp.issubdtype(dtype, jnp.integer) else 0


def _resharded(rows: Array, weight: Array) -> tuple[Any, Any, NamedSharding | None]:
    batch = range(rows.ndim)
    return factors(rows, weight, (batch, ("num", "size"), (*batch, "size")))


def _read(weight: Array, rows: Array, fill: Any = None) -> Array:
    # Not `weight[rows]`, which clips a number out of range to the last row.
    if explicit_mesh(weight) is None:
        return jnp.take(weight, rows, axis=0, mode="fill", fill_value=fill)
    *_, to = _resharded(rows, weight)
    return weight.at[rows].get(mode="fill", fill_value=fill, out_sharding=to)


@jax.custom_jvp
def _read_narrow(weight: Array, rows: Array) -> Array:
    return _read(weight, rows)


@_read_narrow.defjvp
def _tangent_of_narrow(
    primals: tuple[Array, Array], tangents: tuple[Array, Any]
) -> tuple[Array, Array]:
    """Compute in float32, so that the gradient of a row is summed over its uses in float32."""
    weight, rows = primals
    change = _read(widen(tangents[0]), rows, 0)
    return _read_narrow(weight, rows), change.astype(weight.dtype)
