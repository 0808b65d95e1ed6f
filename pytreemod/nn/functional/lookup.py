"""Reading rows of a table."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Integer, Shaped


def embedding(
    x: Integer[Array, "*batch"], weight: Shaped[Array, "num size"]
) -> Shaped[Array, "*batch size"]:
    """Read the rows of weight that x names.

    Shapes:
        x: any, of integers
        weight: (num, size)
        return: (*x.shape, size)

    Args:
        x: row numbers, from 0 to num - 1 (or counted from the end, from -1 to -num).
        weight: the table.

    Returns:
        One row for each entry of x. A number out of range gives a row of nan: under `jax.jit`
        the values are not known, so it cannot be refused, but it is not read as another row.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.embedding(jnp.array([1, 0]), jnp.array([[0.0], [10.0]])).tolist()
        [[10.0], [0.0]]
    """
    return jnp.take(weight, x, axis=0, mode="fill")
