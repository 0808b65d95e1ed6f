"""Counts the floating-point operations of a program, from its jaxpr.

XLA's own `cost_analysis` counts the body of a loop once, however often it runs: a Stack of 24
layers would be 24 times too cheap. Here a scan counts its length times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from pytreemod.errors import ArgumentError, describe

# One operation for each element of the result.
_ELEMENTWISE = """
    abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp cos
    cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma
    log log1p logistic lt max min mul ne neg nextafter polygamma pow regularized_incomplete_beta rem
    round rsqrt sign sin sinh sqrt square sub tan tanh
""".split()  # noqa: SIM905  (a table to be read)

# One operation for each element of the input.
_REDUCTIONS = """
    argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce_max reduce_min reduce_prod
    reduce_sum reduce_window_max reduce_window_min reduce_window_sum
""".split()  # noqa: SIM905  (a table to be read)


class Flops(NamedTuple):
    """The operations of a program.

    Attributes:
        total: operations; a multiplication with an addition is two.
        steps: operations of one step of each loop of unknown length, counted once
            in the total.
    """

    total: int
    steps: tuple[int, ...] = ()


def count_flops(jaxpr: Any) -> Flops:
    """Count the operations of a jaxpr.

    Matrix products and convolutions count two for each multiplication and addition. Elementwise
    operations and reductions of floating numbers count one for each element. A scan counts its
    length times; a `while` loop, whose length is unknown, counts as one step. The most expensive
    branch counts. A program on several devices is counted for all of them. Moving data is free.

    Args:
        jaxpr: the result of `jax.make_jaxpr`.

    Returns:
        The total, and the steps of loops of unknown length.

    Raises:
        ArgumentError: if it is not a jaxpr.

    Examples:
        >>> import jax
        >>> count_flops(jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4)))).total
        48
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    if not hasattr(inner, "eqns"):
        hint = ["trace the function first:", "count_flops(jax.make_jaxpr(f)(x))"]
        raise ArgumentError("count_flops(jaxpr)", "a jaxpr", describe(jaxpr), hint=hint)
    steps: list[int] = []
    total = _count(inner, steps)
    return Flops(total, tuple(steps))


def _count(jaxpr: Any, steps: list[int]) -> int:
    return sum(_count_one(eqn, steps) for eqn in jaxpr.eqns)


def _count_one(eqn: Any, steps: list[int]) -> int:
    name, params = eqn.primitive.name, eqn.params
    if name in _COUNTED:
        return _COUNTED[name](eqn)
    if name == "scan":
        return params["length"] * _count(params["jaxpr"].jaxpr, steps)
    if name == "while":
        # The condition, too, is computed in each step.
        both = (params["cond_jaxpr"], params["body_jaxpr"])
        steps.append(sum(_count(part.jaxpr, []) for part in both))
        return steps[-1]
    if name == "cond":
        return max(_count(branch.jaxpr, steps) for branch in params["branches"])
    inner = [*_jaxprs_in(params)]
    if inner:
        # Rules of derivatives are functions, not jaxprs: the only jaxpr is the one that runs.
        found = sum(_count(each, steps) for each in inner[:1])
        return found * (params["mesh"].size if name == "shard_map" else 1)
    if not any(_is_inexact(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
        return 0
    if name in _ELEMENTWISE:
        return sum(_size(var.aval) for var in eqn.outvars)
    return _size(eqn.invars[0].aval) if name in _REDUCTIONS else 0


def _jaxprs_in(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        # Recognized by its attributes: JAX does not promise to keep the names of its classes.
        jaxpr = getattr(value, "jaxpr", value)
        if hasattr(jaxpr, "eqns"):
            yield jaxpr


def _is_inexact(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _of_dot(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return 2 * _size(eqn.outvars[0].aval) * math.prod(shape[axis] for axis in contracted)


def _of_convolution(eqn: Any) -> int:
    kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
    taps = math.prod(kernel[axis] for axis in numbers.rhs_spec[1:])
    out = _size(eqn.outvars[0].aval)
    # Zeros between input elements, as in a transposed convolution, are not multiplied.
    return 2 * out * taps // math.prod(eqn.params["lhs_dilation"])


_COUNTED: dict[str, Callable[[Any], int]] = {
    "dot_general": _of_dot,
    "conv_general_dilated": _of_convolution,
}
