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
from abc import abstractmethod
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


@dataclasses.dataclass(frozen=True, repr=False)
class _Map(Constraint):
    """A constraint whose maps are computed in float32 at least: `_onto`, and its inverse, `_back`.

    Attributes:
        name: in code.
        words: the condition on a value.
        lower: a bound of each number of a value, to which rounding must not lead.
        upper: the same.
    """

    name: str = dataclasses.field(compare=False)
    words: str = dataclasses.field(compare=False)
    _: dataclasses.KW_ONLY
    lower: float = -math.inf
    upper: float = math.inf

    @abstractmethod
    def _onto(self, u: Any) -> Any: ...

    @abstractmethod
    def _back(self, x: Any) -> Any: ...

    def __repr__(self) -> str:
        return self.name

    def bound(self) -> str:
        """Return the condition on a value, in words."""
        return self.words

    def forward(self, unconstrained: Any) -> Any:
        """Return the constrained value."""
        x = _widely(self._onto, unconstrained)
        if self.lower == -math.inf and self.upper == math.inf:
            return x
        return jnp.clip(x, _next_to(self.lower, 1.0, x.dtype), _next_to(self.upper, -1.0, x.dtype))

    def inverse(self, constrained: Any) -> Any:
        """Return an array that `forward` maps to the value."""
        return _widely(self._back, constrained)

    def refuse_traced(self, unconstrained: Any, is_right: Any, message: str) -> Any:
        """Return the array, which fails at run time if the value was outside the bound."""
        return error_if(unconstrained, ~is_right, message)


def _widely(fn: Callable[[Any], Any], given: Any) -> Any:
    """Compute in float32 what would lose digits, or underflow, in half precision."""
    x = jnp.asarray(given)
    return fn(x.astype(jnp.float32)).astype(x.dtype) if x.dtype.itemsize < 4 else fn(x)


@ft.cache
def _next_to(bound: float, towards: float, dtype: Any) -> float:
    """Return the finite number of a dtype next to a bound, in a direction."""
    kind = np.dtype(dtype).type
    with np.errstate(over="ignore"):
        found = float(np.nextafter(kind(bound), kind(math.copysign(math.inf, towards))))
    if bound == 0:
        # Not the smallest number, if compiled code takes it for zero. It does not in float16, whose
        # smallest numbers are ordinary ones in float32, in which it is computed.
        wide = dtype if np.dtype(dtype).itemsize > 4 else jnp.float32
        return math.copysign(max(abs(found), float(untyped_jax.numpy.finfo(wide).tiny)), towards)
    return found


def _exp(u: Any) -> Any:
    # Not infinite, because the gradient would be NaN.
    known = untyped_jax.numpy.finfo(u.dtype)
    return jnp.exp(jnp.minimum(u, math.log(known.max) * (1 - 2 * float(known.eps))))


# ---- numbers


class _Range(_Map):
    """Each number between two bounds, either of which may be infinite."""

    def _onto(self, u: Any) -> Any:
        if self.lower == -math.inf:
            return u if self.upper == math.inf else self.upper - _exp(u)
        if self.upper == math.inf:
            return self.lower + _exp(u)
        # From the nearer end: near an end that is zero, a number has more digits.
        low, high = ((self.upper - self.lower) * jax.nn.sigmoid(end) for end in (u, -u))
        return jnp.where(u < 0, self.lower + low, self.upper - high)

    def _back(self, x: Any) -> Any:
        if self.lower == -math.inf:
            return x if self.upper == math.inf else jnp.log(self.upper - x)
        above = jnp.log(x - self.lower)
        return above if self.upper == math.inf else above - jnp.log(self.upper - x)


class _Softplus(_Map):
    def _onto(self, u: Any) -> Any:
        return jax.nn.softplus(u)

    def _back(self, x: Any) -> Any:
        return x + jnp.log(-jnp.expm1(-x))


real: Constraint = _Range("real", "finite numbers")
"""Finite numbers: no bound. For code that takes any constraint."""

positive: Constraint = _Range("positive", "finite numbers greater than 0.0", lower=0.0)
"""Greater than zero: `exp`, whose inverse is `log`. An optimizer step is a factor, whatever
the size of the value, as scales, rates and variances need. numpyro and PyTorch use this map, too.

The stored array is `log x`, so a value is exact to `1 + |log x|` roundings of its dtype: from
`e^-8` to `e^8` that is `1e-6` in `float32`, 0.5 % in `float16` and 4 % in `bfloat16`. Store a value
that must be more exact in `float32`."""

softplus_positive: Constraint = _Softplus("softplus_positive", positive.bound(), lower=0.0)
"""Greater than zero: `softplus`, `log(1 + exp(u))`. Nearly `u` itself for large values, so
that they grow by sums and not by factors; nearly `exp(u)` for small ones. numpyro's name."""

unit_interval: Constraint = _Range(
    "unit_interval", "finite numbers greater than 0.0 and less than 1.0", lower=0.0, upper=1.0
)
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
    return _Range(f"greater_than({lower})", f"finite numbers greater than {lower}", lower=lower)


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
    return _Range(f"less_than({upper})", f"finite numbers less than {upper}", upper=upper)


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
    words = f"finite numbers greater than {lower} and less than {upper}"
    return _Range(f"interval({lower}, {upper})", words, lower=lower, upper=upper)


def _bound(where: str, given: Any) -> float:
    bound = float(given) + 0.0  # Zero has one sign.
    if not math.isfinite(bound):
        raise ArgumentError(where, "a finite number", describe(given))
    return bound


# ---- vectors and matrices


class _Simplex(_Map):
    def _onto(self, u: Any) -> Any:
        # Adding one number to all changes no share: the last is fixed at zero, so that the inverse
        # is unique.
        last = jnp.zeros_like(u, shape=(*u.shape[:-1], 1))
        return jax.nn.softmax(jnp.concatenate([u, last], axis=-1), axis=-1)

    def _back(self, x: Any) -> Any:
        return jnp.log(x[..., :-1]) - jnp.log(x[..., -1:])


class _Ordered(_Map):
    def _onto(self, u: Any) -> Any:
        return jnp.cumsum(jnp.concatenate([u[..., :1], _exp(u[..., 1:])], axis=-1), axis=-1)

    def _back(self, x: Any) -> Any:
        return jnp.concatenate([x[..., :1], jnp.log(jnp.diff(x, axis=-1))], axis=-1)


class _Triangle(_Map):
    def forward(self, unconstrained: Any) -> Any:
        # In its dtype, in which the diagonal is to be greater than zero.
        return self._onto(jnp.asarray(unconstrained))

    def _onto(self, u: Any) -> Any:
        # There are n (n + 1) / 2 numbers on the diagonal and below.
        size = (math.isqrt(8 * u.shape[-1] + 1) - 1) // 2
        shape = (*u.shape[:-1], size, size)
        rows, columns = np.tril_indices(shape[-1], -1)
        below, diagonal = u[..., : len(rows)], positive.forward(u[..., len(rows) :])
        zeros, ends = jnp.zeros_like(u, shape=shape), np.arange(shape[-1])
        return zeros.at[..., rows, columns].set(below).at[..., ends, ends].set(diagonal)

    def _back(self, x: Any) -> Any:
        rows, columns = np.tril_indices(x.shape[-1], -1)
        diagonal = untyped_jax.numpy.diagonal(x, axis1=-2, axis2=-1)
        return jnp.concatenate([x[..., rows, columns], positive.inverse(diagonal)], axis=-1)


class _Definite(_Triangle):
    def _onto(self, u: Any) -> Any:
        factor = super()._onto(u)
        # In the default precision of an accelerator the product might not be definite.
        return jnp.matmul(factor, jnp.matrix_transpose(factor), precision="highest")

    def _back(self, x: Any) -> Any:
        return super()._back(jnp.linalg.cholesky(x))


class _Orthogonal(_Map):
    def _onto(self, u: Any) -> Any:
        q, r = jnp.linalg.qr(u)
        diagonal = untyped_jax.numpy.diagonal(r, axis1=-2, axis2=-1)
        # Not by `sign`, which is zero for a column that depends on those before it.
        return q * jnp.where(diagonal < 0, -1, 1).astype(q.dtype)[..., None, :]

    def _back(self, x: Any) -> Any:
        return x


# A share that underflows to zero would have no inverse.
simplex: Constraint = _Simplex(
    "simplex", "numbers greater than 0.0 whose sum over the last axis is 1.0", lower=0.0
)
"""Shares: positive numbers whose sum over the last axis is one. The `softmax` of one number fewer,
and zero, which is more precise than breaking sticks (numpyro's and PyTorch's map)."""

ordered_vector: Constraint = _Ordered(
    "ordered_vector", "finite numbers, each greater than the one before it"
)
"""Numbers that increase along the last axis: the first, and the logarithms of the differences."""

lower_cholesky: Constraint = _Triangle(
    "lower_cholesky", "zeros above the diagonal, and numbers greater than 0.0 on it"
)
"""Lower-triangular matrices with a positive diagonal, as Cholesky factors are. The stored array
has the numbers below the diagonal, and the logarithms of the diagonal: `n (n + 1) / 2` numbers."""

positive_definite: Constraint = _Definite(
    "positive_definite", "symmetric matrices whose eigenvalues are greater than 0.0"
)
"""Symmetric matrices with positive eigenvalues: a `lower_cholesky` factor times its transpose."""

orthogonal: Constraint = _Orthogonal("orthogonal", "columns of length 1.0 that are at right angles")
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
        Pair(rho=bijection(tanh, arctanh)(unconstrained=weak_f32[]))
        >>> Pair(0.5).rho
        Array(0.5, dtype=float32, weak_type=True)
    """
    for name, function in (("forward", forward), ("inverse", inverse)):
        if not callable(function) or is_node(function):
            raise ArgumentError(f"bijection({name})", "a function", describe(function))
    one, two = (getattr(each, "__name__", type(each).__name__) for each in (forward, inverse))
    words = f"a value x with {one}({two}(x)) == x"
    return _Bijection(f"bijection({one}, {two})", words, forward, inverse)


@dataclasses.dataclass(frozen=True, repr=False)
class _Bijection(_Map):
    onto: Callable[[Any], Any]
    back: Callable[[Any], Any]

    def _onto(self, u: Any) -> Any:
        return self.onto(u)

    def _back(self, x: Any) -> Any:
        return self.back(x)
