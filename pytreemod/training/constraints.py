"""The constraints of fields: `pm.field(constraint=pm.constraints.positive)`.

The names are numpyro's and PyTorch's. Each is a value, or a function of its bounds: a smooth map,
`forward`, from arrays without bounds onto those inside, and its inverse. Leading axes are batch
axes. A value is inside if its inverse is finite, and maps back to it.

There is no `nonnegative`, and no closed interval: no smooth map reaches an end. All maps preserve
the dtype. Their values are inside for every finite array, if need be by clipping to the number
next to the bound.
"""

from __future__ import annotations

import dataclasses
import functools as ft
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.constrained_leaves import Constraint
from pytreemod.transform.runtime_checks import error_if
from pytreemod.tree.nodes import is_node
from pytreemod.typing import untyped_jax

__all__ = [
    "Constraint",
    "bijection",
    "greater_than",
    "interval",
    "less_than",
    "lower_cholesky",
    "ordered_vector",
    "orthogonal",
    "positive",
    "positive_definite",
    "real",
    "simplex",
    "softplus_positive",
    "unit_interval",
]

_Shape = tuple[int, ...]


class _Checked(Constraint):
    """A constraint whose traced values are checked when the program runs."""

    def refuse_traced(self, unconstrained: Any, is_right: Any, message: str) -> Any:
        """Return the array, which fails at run time if the value was outside the bound."""
        return error_if(unconstrained, ~is_right, message)


@dataclasses.dataclass(frozen=True, repr=False)
class _Map(_Checked):
    """A constraint made of two functions, which are compared by identity.

    Attributes:
        name: its name in code.
        words: its bound.
        to: `forward`.
        back: `inverse`.
        shape: the shape of the value, from that of the unconstrained array; None if it is the same.
    """

    name: str
    words: str
    to: Callable[[Any], Any]
    back: Callable[[Any], Any]
    shape: Callable[[_Shape], _Shape | None] | None = None

    def __repr__(self) -> str:
        return self.name

    def bound(self) -> str:
        """Return the condition on a value, in words."""
        return self.words

    def forward(self, unconstrained: Any) -> Any:
        """Return the constrained value."""
        return self.to(jnp.asarray(unconstrained))

    def inverse(self, constrained: Any) -> Any:
        """Return an array that `forward` maps to the value."""
        return self.back(jnp.asarray(constrained))

    def shape_of(self, unconstrained: _Shape) -> _Shape | None:
        """Return the shape of the value; None if only `forward` knows."""
        return unconstrained if self.shape is None else self.shape(unconstrained)


# ---- numbers


@dataclasses.dataclass(frozen=True, repr=False)
class _Range(_Checked):
    """Each number between two bounds, either of which may be infinite."""

    lower: float
    upper: float
    name: str = dataclasses.field(compare=False)

    def __repr__(self) -> str:
        return self.name

    def bound(self) -> str:
        """Return the condition on a value, in words."""
        parts = [f"greater than {self.lower}"] * (self.lower > -math.inf)
        parts += [f"less than {self.upper}"] * (self.upper < math.inf)
        return f"finite numbers {' and '.join(parts)}".rstrip()

    def forward(self, unconstrained: Any) -> Any:
        """Return the constrained value."""
        u = jnp.asarray(unconstrained)
        if self.lower == -math.inf and self.upper == math.inf:
            return u
        if self.upper == math.inf:
            x = self.lower + _exp(u)
        elif self.lower == -math.inf:
            x = self.upper - _exp(u)
        else:
            # From the nearer end: near an end that is zero, a number has more digits. Not in
            # float16, in which the powers of small numbers would underflow.
            low, high = (jax.nn.sigmoid(_wide(end)) for end in (u, -u))
            if low.dtype != u.dtype:
                low, high = low.astype(u.dtype), high.astype(u.dtype)
            width = self.upper - self.lower
            x = jnp.where(u < 0, self.lower + width * low, self.upper - width * high)
        return jnp.clip(x, *self._inside(u.dtype))

    def inverse(self, constrained: Any) -> Any:
        """Return an array that `forward` maps to the value."""
        x = jnp.asarray(constrained)
        if self.lower == -math.inf and self.upper == math.inf:
            return x
        if self.upper == math.inf:
            return jnp.log(x - self.lower)
        if self.lower == -math.inf:
            return jnp.log(self.upper - x)
        return jnp.log(x - self.lower) - jnp.log(self.upper - x)

    def misfit(self, value: Any) -> str | None:
        """Return what is wrong with the dtype: it may have no number between the bounds."""
        least, most = self._inside(value.dtype)
        return None if least <= most else "no number between the bounds"

    def _inside(self, dtype: Any) -> tuple[float, float]:
        """Return the least and the greatest number of a dtype between the bounds."""
        return _next_to(self.lower, 1.0, dtype), _next_to(self.upper, -1.0, dtype)


def _exp(u: Any) -> Any:
    # Not infinite, because the gradient would be NaN.
    known = untyped_jax.numpy.finfo(u.dtype)
    return jnp.exp(jnp.minimum(u, math.log(known.max) * (1 - 2 * float(known.eps))))


def _wide(x: Any) -> Any:
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


@ft.cache
def _next_to(bound: float, towards: float, dtype: Any) -> float:
    """Return the finite number of a dtype next to a bound, in a direction."""
    known = untyped_jax.numpy.finfo(dtype)
    if math.isinf(bound):
        return math.copysign(float(known.max), bound)
    if bound == 0:
        # Not the smallest number, if compiled code takes it for zero. It does not in float16, whose
        # smallest numbers are ordinary ones in float32, in which it is computed.
        wide = dtype if np.dtype(dtype).itemsize > 4 else jnp.float32
        least = max(float(known.smallest_subnormal), float(untyped_jax.numpy.finfo(wide).tiny))
        return math.copysign(least, towards)
    kind = np.dtype(dtype).type
    with np.errstate(over="ignore"):
        return float(np.nextafter(kind(bound), kind(math.copysign(math.inf, towards))))


def _softplus(u: Any) -> Any:
    return jnp.clip(
        jax.nn.softplus(u), _next_to(0.0, 1.0, u.dtype), _next_to(math.inf, -1.0, u.dtype)
    )


def _softplus_inverse(x: Any) -> Any:
    return x + jnp.log(-jnp.expm1(-x))


real: Constraint = _Range(-math.inf, math.inf, "real")
"""Finite numbers: no bound. For code that takes any constraint."""

positive: Constraint = _Range(0.0, math.inf, "positive")
"""Greater than zero: `exp`, whose inverse is `log`. An optimizer step is a factor, whatever
the size of the value, as scales, rates and variances need. numpyro and PyTorch use this map, too.

The stored array is `log x`, so a value is exact to `1 + |log x|` roundings of its dtype: from
`e^-8` to `e^8` that is `1e-6` in `float32`, 0.5 % in `float16` and 4 % in `bfloat16`. Store a value
that must be more exact in `float32`."""

softplus_positive: Constraint = _Map(
    "softplus_positive", positive.bound(), _softplus, _softplus_inverse
)
"""Greater than zero: `softplus`, `log(1 + exp(u))`. Nearly `u` itself for large values, so
that they grow by sums and not by factors; nearly `exp(u)` for small ones. numpyro's name."""

unit_interval: Constraint = _Range(0.0, 1.0, "unit_interval")
"""Between zero and one: the logistic function. `interval(0.0, 1.0)`."""


def greater_than(lower_bound: float) -> Constraint:
    """Constrain numbers to be greater than a bound: `bound + exp(u)`.

    Args:
        lower_bound: a finite number.

    Returns:
        A constraint.

    Raises:
        ArgumentError: if the bound is not a finite number.

    Examples:
        >>> import pytreemod as pm
        >>> pm.constraints.greater_than(2.0).forward(0.0)
        Array(3., dtype=float32, weak_type=True)
    """
    lower = _bound("greater_than(lower_bound)", lower_bound)
    return _Range(lower, math.inf, f"greater_than({lower})")


def less_than(upper_bound: float) -> Constraint:
    """Constrain numbers to be less than a bound: `bound - exp(u)`.

    Args:
        upper_bound: a finite number.

    Returns:
        A constraint.

    Raises:
        ArgumentError: if the bound is not a finite number.

    Examples:
        >>> import pytreemod as pm
        >>> pm.constraints.less_than(2.0).forward(0.0)
        Array(1., dtype=float32, weak_type=True)
    """
    upper = _bound("less_than(upper_bound)", upper_bound)
    return _Range(-math.inf, upper, f"less_than({upper})")


def interval(lower_bound: float, upper_bound: float) -> Constraint:
    """Constrain numbers to lie strictly between two bounds: the logistic function, stretched.

    Args:
        lower_bound: a finite number.
        upper_bound: a greater one.

    Returns:
        A constraint.

    Raises:
        ArgumentError: if a bound is not a finite number, or the upper is not above the lower.

    Examples:
        >>> import pytreemod as pm
        >>> pm.constraints.interval(-1.0, 3.0).forward(0.0)
        Array(1., dtype=float32, weak_type=True)
    """
    lower = _bound("interval(lower_bound)", lower_bound)
    upper = _bound("interval(upper_bound)", upper_bound)
    if not (lower < upper and math.isfinite(upper - lower)):
        raise ArgumentError(f"interval: {upper} is not above {lower}")
    return _Range(lower, upper, f"interval({lower}, {upper})")


def _bound(where: str, given: Any) -> float:
    # Python's or NumPy's numbers: a traced value, or an array, is not a constant of the program.
    kinds: tuple[Any, ...] = (int, float, np.integer, np.floating)
    if not isinstance(given, kinds) or isinstance(given, bool) or not math.isfinite(given):
        raise ArgumentError(where, "a finite number", describe(given))
    return float(given) + 0.0  # Zero has one sign.


# ---- vectors


def _shares(u: Any) -> Any:
    # Adding one number to all changes no share: the last is fixed at zero, so that the inverse is
    # unique. A share that underflows to zero would have no inverse.
    last = jnp.zeros_like(u, shape=(*u.shape[:-1], 1))
    shares = jax.nn.softmax(jnp.concatenate([u, last], axis=-1), axis=-1)
    return jnp.maximum(shares, _next_to(0.0, 1.0, u.dtype))


def _shares_inverse(x: Any) -> Any:
    return jnp.log(x[..., :-1]) - jnp.log(x[..., -1:])


def _one_more(shape: _Shape) -> _Shape:
    return *shape[:-1], shape[-1] + 1


def _ordered(u: Any) -> Any:
    return jnp.cumsum(jnp.concatenate([u[..., :1], _exp(u[..., 1:])], axis=-1), axis=-1)


def _ordered_inverse(x: Any) -> Any:
    return jnp.concatenate([x[..., :1], jnp.log(jnp.diff(x, axis=-1))], axis=-1)


simplex: Constraint = _Map(
    "simplex",
    "numbers greater than 0.0 whose sum over the last axis is 1.0",
    _shares,
    _shares_inverse,
    _one_more,
)
"""Shares: positive numbers whose sum over the last axis is one. The `softmax` of one number fewer,
and zero, which is more precise than breaking sticks (numpyro's and PyTorch's map)."""

ordered_vector: Constraint = _Map(
    "ordered_vector",
    "finite numbers, each greater than the one before it",
    _ordered,
    _ordered_inverse,
)
"""Numbers that increase along the last axis: the first, and the logarithms of the differences."""


# ---- matrices


def _size(count: int) -> int:
    """Return the size of a matrix with this many numbers on and below the diagonal."""
    return (math.isqrt(8 * count + 1) - 1) // 2


def _square(shape: _Shape) -> _Shape:
    return *shape[:-1], _size(shape[-1]), _size(shape[-1])


def _triangle(u: Any) -> Any:
    size = _size(u.shape[-1])
    rows, columns = np.tril_indices(size, -1)
    below, diagonal = u[..., : len(rows)], positive.forward(u[..., len(rows) :])
    zeros, ends = jnp.zeros_like(u, shape=_square(u.shape)), np.arange(size)
    return zeros.at[..., rows, columns].set(below).at[..., ends, ends].set(diagonal)


def _triangle_inverse(x: Any) -> Any:
    rows, columns = np.tril_indices(x.shape[-1], -1)
    diagonal = untyped_jax.numpy.diagonal(x, axis1=-2, axis2=-1)
    return jnp.concatenate([x[..., rows, columns], positive.inverse(diagonal)], axis=-1)


def _definite(u: Any) -> Any:
    factor = _triangle(u)
    # In the default precision of an accelerator the product might not be definite.
    return jnp.matmul(factor, jnp.matrix_transpose(factor), precision="highest")


def _definite_inverse(x: Any) -> Any:
    return _triangle_inverse(jnp.linalg.cholesky(_wide(x)).astype(x.dtype))


def _orthonormal(u: Any) -> Any:
    q, r = jnp.linalg.qr(_wide(u))
    diagonal = untyped_jax.numpy.diagonal(r, axis1=-2, axis2=-1)
    # Not by `sign`, which is zero for a column that depends on those before it.
    signs = jnp.where(diagonal < 0, -1, 1).astype(q.dtype)
    return (q * signs[..., None, :]).astype(u.dtype)


def _same(x: Any) -> Any:
    return x


lower_cholesky: Constraint = _Map(
    "lower_cholesky",
    "zeros above the diagonal, and numbers greater than 0.0 on it",
    _triangle,
    _triangle_inverse,
    _square,
)
"""Lower-triangular matrices with a positive diagonal, as Cholesky factors are. The stored array
has the numbers below the diagonal, and the logarithms of the diagonal: `n (n + 1) / 2` numbers."""

positive_definite: Constraint = _Map(
    "positive_definite",
    "symmetric matrices whose eigenvalues are greater than 0.0",
    _definite,
    _definite_inverse,
    _square,
)
"""Symmetric matrices with positive eigenvalues: a `lower_cholesky` factor times its transpose."""

orthogonal: Constraint = _Map(
    "orthogonal", "columns of length 1.0 that are at right angles", _orthonormal, _same
)
"""Matrices, square or taller than wide, with orthonormal columns: the `Q` of the decomposition
`QR`, with the signs that make the diagonal of `R` positive.

No smooth map from unconstrained arrays is one-to-one onto these. This one reaches all of them,
including reflections; the inverse is the matrix itself."""


def bijection(forward: Callable[[Any], Any], inverse: Callable[[Any], Any]) -> Constraint:
    """Make a constraint from a smooth map and its inverse, in functions of JAX.

    A new value is mapped there and back, and refused if the result differs. So it refuses values
    outside the bound, and two functions that do not fit each other.

    Args:
        forward: from any array to one inside the bound.
        inverse: its inverse.

    Returns:
        A constraint. Functions are compared by identity: make it once, and not in each call.

    Raises:
        ArgumentError: if one of them is not a function, or is a tree, whose arrays would not be
            parameters.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> correlation = pm.constraints.bijection(jnp.tanh, jnp.arctanh)
        >>> class Pair(pm.Module):
        ...     rho: jax.Array = pm.field(constraint=correlation)
        >>> Pair(0.5)
        Pair(rho=bijection(tanh, arctanh)(weak_f32[]))
        >>> Pair(0.5).rho
        Array(0.5, dtype=float32, weak_type=True)
    """
    for name, function in (("forward", forward), ("inverse", inverse)):
        if not callable(function) or is_node(function):
            raise ArgumentError(f"bijection({name})", "a function", describe(function))
    ends = [
        getattr(function, "__name__", type(function).__name__) for function in (forward, inverse)
    ]
    words = f"a value x with {ends[0]}({ends[1]}(x)) == x"
    return _Map(f"bijection({', '.join(ends)})", words, forward, inverse, _unknown)


def _unknown(shape: _Shape) -> _Shape | None:
    return None
