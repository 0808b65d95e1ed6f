"""Sums of products: with a matrix, with an array of any number of axes, or entry by entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Shaped

from pytreemod.nn.functional.explicit_meshes import contracted, terms_of
from pytreemod.nn.functional.inlining import traced_once
from pytreemod.nn.functional.promotion import promote, with_shared
from pytreemod.tree.split_arrays import explicit_mesh


@traced_once()
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
        TypeError: if the sizes disagree (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.linear(jnp.ones((7, 3)), jnp.ones((2, 3))).shape
        (7, 2)

    Source:
        The layout of `torch.nn.functional.linear`.
    """
    rows, matrix, offset = promote(x, weight, bias)
    batch = range(rows.ndim - 1)
    # Not `x @ weight.T`: the transposition would be a separate operation in the program.
    sums = (((rows.ndim - 1,), (1,)), ((), ()))
    terms = ((*batch, "in"), ("out", "in"), (*batch, "out"))
    y = contracted(_dot(sums), rows, matrix, terms)
    return with_shared(lax.add, y, offset, y.ndim - 1)


@traced_once("axis")
def linear_general(
    x: Shaped[Array, ...],
    weight: Shaped[Array, ...],
    bias: Shaped[Array, ...] | None = None,
    *,
    axis: Sequence[int] = (-1,),
) -> Shaped[Array, ...]:
    r"""Sum over several axes of x at once; the new axes are the last ones.

    $y_{r,o} = b_o + \sum_i x_{r,i} W_{i,o}$, where i and o are several indices each.

    Shapes:
        x: any
        weight: (*in, *out), where in are the sizes of the axes of x
        bias: out or None
        return: (*rest, *out), where rest are the other axes of x

    Args:
        x: input.
        weight: the factors.
        bias: added to each output.
        axis: the axes of x that are summed over, in the order of those of weight.

    Returns:
        The mapped array.

    Raises:
        TypeError: if the sizes disagree (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> x, weight = jnp.ones((7, 2, 3)), jnp.ones((2, 3, 4, 5))
        >>> nn.functional.linear_general(x, weight, axis=(-2, -1)).shape
        (7, 4, 5)

    Source:
        `flax.nnx.LinearGeneral`.
    """
    x, weight, bias = promote(x, weight, bias)
    ours = tuple(i % x.ndim for i in axis)
    others = [i for i in range(x.ndim) if i not in ours]
    out = [f"out {i}" for i in range(len(ours), weight.ndim)]
    sums = ((ours, tuple(range(len(ours)))), ((), ()))
    terms = (range(x.ndim), (*ours, *out), (*others, *out))
    y = contracted(_dot(sums), x, weight, terms)
    return _plus(y, bias)


@traced_once()
def scale(x: Shaped[Array, ...], weight: Shaped[Array, ...]) -> Shaped[Array, ...]:
    """Multiply the last axes of x by weight, entry by entry.

    $y = w x$.

    Shapes:
        x: (..., *shape)
        weight: any shape that broadcasts to shape, with one size for each of its axes
        return: the shape of x

    Args:
        x: input; every axis before those of weight is a batch axis.
        weight: the factors.

    Returns:
        The products.

    Raises:
        TypeError: if weight does not fit (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.scale(jnp.ones((2, 2)), jnp.array([1.0, 10.0])).tolist()
        [[1.0, 10.0], [1.0, 10.0]]
    """
    x, weight = promote(x, weight)
    return with_shared(lax.mul, x, weight, x.ndim - weight.ndim)


@traced_once("equation")
def einsum(
    x: Shaped[Array, ...],
    weight: Shaped[Array, ...],
    bias: Shaped[Array, ...] | None = None,
    *,
    equation: str,
) -> Shaped[Array, ...]:
    r"""Sum products of x and weight by an equation, and add a bias to the last axes.

    $y = b + \sum x W$, over the letters that are not in the result.

    Shapes:
        x: as in the equation
        weight: as in the equation
        bias: any shape that broadcasts to the last axes of the result, or None
        return: as in the equation

    Args:
        x: input; "..." in the equation means any number of batch axes.
        weight: the factors.
        bias: added to the result.
        equation: of x and weight, such as `"...i,io->...o"`.

    Returns:
        The sums.

    Raises:
        TypeError, ValueError: the shapes disagree, or the equation is invalid (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> x, weight = jnp.ones((7, 2, 3)), jnp.ones((2, 3, 4))
        >>> nn.functional.einsum(x, weight, equation="...hi,hio->...ho").shape
        (7, 2, 4)

    Source:
        `flax.nnx.Einsum`.
    """
    x, weight, bias = promote(x, weight, bias)
    left, *arrays = _summed_alone(equation, x, weight)
    y = (
        jnp.einsum(left, *arrays)
        if explicit_mesh(*arrays) is None
        else _sharded_sums(left, *arrays)
    )
    return _plus(y, bias)


def _dot(sums: Any) -> Any:
    """Return the product over these axes, in the form that `contracted` takes."""

    def dot(x: Array, weight: Array, to: Any) -> Array:
        return lax.dot_general(x, weight, sums, out_sharding=to)

    return dot


def _plus(y: Array, bias: Array | None) -> Array:
    """Add a bias to the last axes."""
    return y if bias is None else with_shared(lax.add, y, bias, y.ndim - bias.ndim)


def _sharded_sums(equation: str, x: Array, weight: Array) -> Array:
    """Sum products of arrays on a mesh with explicit axes."""
    terms = terms_of(equation, x, weight)
    return contracted(
        lambda x, weight, to: jnp.einsum(equation, x, weight, out_sharding=to), x, weight, terms
    )


def _summed_alone(equation: str, *arrays: Array) -> tuple[Any, ...]:
    """Sum over the axes that only one array has; return the remaining equation and arrays.

    `jnp.einsum` would add them up in the dtype of the array, `jnp.sum` does so in a wider one.
    """
    inputs, _, out = "".join(equation.split()).partition("->")
    terms = inputs.split(",")
    # Without an arrow, a letter that occurs once is in the result. JAX checks the number of arrays.
    if "->" not in equation or len(terms) != len(arrays):
        return equation, *arrays
    left: list[Array] = []
    for i, (term, array) in enumerate(zip(terms, arrays, strict=True)):
        letters = term.replace("...", ".")
        alone = [
            letter for letter in letters if letter != "." and (inputs + out).count(letter) == 1
        ]
        places = [letters.index(letter) for letter in alone]
        # After "..." an axis is counted from the end.
        axes = tuple(at - len(letters) * ("." in letters[:at]) for at in places)
        left.append(jnp.sum(array, axes) if axes else array)
        terms[i] = "".join(letter for letter in letters if letter not in alone).replace(".", "...")
    return f"{','.join(terms)}->{out}", *left
