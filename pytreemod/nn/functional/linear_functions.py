"""`linear`: a product with a matrix, and a bias, over the last axis."""

from __future__ import annotations

from jax import lax
from jaxtyping import Array, ArrayLike, Shaped

from pytreemod.nn.functional.inlining import as_arrays, traced_once
from pytreemod.nn.functional.promotion import place, promote


def linear(
    x: Shaped[ArrayLike, "*batch in"],
    weight: Shaped[ArrayLike, "out in"],
    bias: Shaped[ArrayLike, " out"] | None = None,
) -> Shaped[Array, "*batch out"]:
    """Apply $y = Wx + b$ to the last axis of x.

    Shapes:
        x: (..., in)
        weight: (out, in)
        bias: (out,) or None
        return: (..., out)

    Args:
        x: input; every leading axis is a batch axis.
        weight: the matrix, rows first.
        bias: added to each output.

    Returns:
        The mapped array.

    Raises:
        TypeError: the sizes disagree (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.linear(jnp.ones((7, 3)), jnp.ones((2, 3))).shape
        (7, 2)

    Source:
        The layout of `torch.nn.functional.linear`.
    """
    return _linear(*as_arrays(x, weight, bias))


@traced_once()
def _linear(x: Array, weight: Array, bias: Array | None) -> Array:
    x, weight, bias = promote(x, weight, bias)
    # Not `x @ weight.T`: the transposition would be an operation of its own in the program.
    y = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return y if bias is None else lax.add(y, place(bias, y, y.ndim - 1))
