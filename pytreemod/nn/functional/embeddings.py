"""`embedding`: reading rows of a table."""

from __future__ import annotations

import functools as ft
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, ArrayLike, Integer, Shaped

from pytreemod.errors import ArgumentError, describe
from pytreemod.nn.functional.explicit_meshes import explicit_mesh, factors
from pytreemod.nn.functional.inlining import as_arrays
from pytreemod.nn.functional.promotion import wide_dtype, widen


def embedding(
    x: Integer[ArrayLike, "*batch"], weight: Shaped[Array, "num size"]
) -> Shaped[Array, "*batch size"]:
    """Read the rows of weight that x names.

    $y_i = W_{x_i}$.

    Shapes:
        x: any, of integers
        weight: (num, size)
        return: (*x.shape, size)

    Args:
        x: row numbers, from 0 to num - 1 (or counted from the end, from -1 to -num), of any
            integer dtype: -1 is the last row even where the dtype is too narrow for num.
        weight: the table.

    Returns:
        One row for each entry of x. A number out of range gives a row of nan (in a table of
        integers, of an extreme one): under `jax.jit` the values are not known, so it cannot be
        refused, but it is not read as another row. Gradients of floats narrower than float32 are
        added up in float32.

    Raises:
        ArgumentError: x has no integers.
        IndexError: the table has no rows, and x names one (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.embedding(jnp.array([1, 0]), jnp.array([[0.0], [10.0]])).tolist()
        [[10.0], [0.0]]
    """
    (weight,) = as_arrays(weight)
    rows = _row_numbers(x, weight.shape[0])
    if explicit_mesh(rows, weight) is not None:
        rows, weight, _ = _laid(rows, weight)
    read = _read if wide_dtype(weight.dtype) == weight.dtype else _read_narrow
    return read(weight, rows)


def _row_numbers(x: Any, num: int) -> Array:
    """Row numbers in a dtype in which what is in range, and what is not, stays so.

    JAX adds num to a negative one in its own dtype, in which the sum may not fit; and it takes the
    lower 32 bits of longer ones, which may well name a row.
    """
    # What NumPy holds is looked at before it becomes an array of JAX, with 32 bits by default.
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
    """How many bits an integer of a dtype has; none if it is a dtype of something else."""
    return int(jnp.iinfo(dtype).bits) if jnp.issubdtype(dtype, jnp.integer) else 0


def _laid(rows: Array, weight: Array) -> tuple[Any, Any, NamedSharding | None]:
    batch = range(rows.ndim)
    return factors(rows, weight, (batch, ("num", "size"), (*batch, "size")))


def _read(weight: Array, rows: Array, fill: Any = None) -> Array:
    # Not `weight[rows]`, which takes a number out of range for that of the last row.
    if explicit_mesh(weight) is None:
        return jnp.take(weight, rows, axis=0, mode="fill", fill_value=fill)
    *_, to = _laid(rows, weight)
    return weight.at[rows].get(mode="fill", fill_value=fill, out_sharding=to)


@jax.custom_jvp
def _read_narrow(weight: Array, rows: Array) -> Array:
    return _read(weight, rows)


@_read_narrow.defjvp
def _tangent_of_narrow(
    primals: tuple[Array, Array], tangents: tuple[Array, Any]
) -> tuple[Array, Array]:
    """In float32: backwards this adds up what each reading of a row contributes."""
    weight, rows = primals
    change = _read(widen(tangents[0]), rows, 0)
    return _read_narrow(weight, rows), change.astype(weight.dtype)
