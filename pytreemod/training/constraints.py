"""The constraints of fields: `pm.field(constraint=pm.constraints.positive)`.

The names are numpyro's and PyTorch's. Each is a value, or a function of its bounds; a
[`Constraint`][pytreemod.module.constrained_leaves.Constraint] has a smooth map, `forward`, from
unconstrained arrays onto those inside the bound, and an inverse. Leading axes are batch axes.

There is no `nonnegative`, and no closed interval: no smooth map without bounds reaches an end. All
maps preserve the dtype. Their values are inside for every finite array, if need be by clipping to
the number next to the bound.
"""

from __future__ import annotations

import dataclasses
import functools as ft
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

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


@dataclasses.dataclass(frozen=True, repr=False)
class _Checked(Constraint):
    """A constraint whose bound is one formula, for concrete values and in programs.

    Traced values are checked when the program runs, by `error_if`.

    Attributes:
        name: its name in code.
        words: its bound.
    """

    name: ClassVar[str]
    words: ClassVar[str]

    def __repr__(self) -> str:
        return self.name

    def bound(self) -> str:
        return self.words

    def tests(self, value: Any, xp: Any) -> Iterator[tuple[Any, Any, str]]:
        """Conditions on a value's numbers, each with the numbers and a message for a violation.

        Args:
            value: an array.
            xp: `numpy`, or `jax.numpy` for a traced one.
        """
        return iter(())

    def fault(self, value: NDArray[Any]) -> str | None:
        for is_right, numbers, text in self.tests(value, np):
            if not np.all(is_right):
                at = tuple(int(i) for i in np.argwhere(~np.asarray(is_right))[0])
                number = np.asarray(numbers)[at]
                return text.format(f"{number} at {list(at)}" if at else f"{number}")
        return None

    def holds(self, value: Any, unconstrained: Any) -> Any:
        """Whether a traced value is inside, if `unconstrained` is finite."""
        with jax.default_matmul_precision("highest"):
            answers = [jnp.all(is_right) for is_right, _, _ in self.tests(value, jnp)]
        return ft.reduce(cast("Any", operator.and_), answers, True)

    def invert_traced(self, value: Any, where: str) -> Any:
        """Apply `inverse`, which fails at run time for a value outside the bound."""
        unconstrained, is_wrong = cast("tuple[Any, Any]", _inverted(self, value))
        return error_if(unconstrained, is_wrong, self.refusal(value, "numbers outside", where))


# Compiled: a single operation under vmap instead of ten, two thirds of the time of a field.
@ft.partial(jax.jit, static_argnums=0, inline=True)
def _inverted(constraint: _Checked, value: Any) -> tuple[Any, Any]:
    unconstrained = constraint.inverse(value)
    is_right = jnp.isfinite(unconstrained).all() & constraint.holds(value, unconstrained)
    return unconstrained, ~is_right


# ---- numbers


@dataclasses.dataclass(frozen=True, repr=False)
class _Range(_Checked):
    """Each number between two bounds, either of which may be infinite."""

    lower: float
    upper: float

    def __repr__(self) -> str:
        return _NAMES.get((self.lower, self.upper)) or self._name()

    def _name(self) -> str:
        if self.upper == math.inf:
            return f"greater_than({self.lower})"
        if self.lower == -math.inf:
            return f"less_than({self.upper})"
        return f"interval({self.lower}, {self.upper})"

    def bound(self) -> str:
        parts = [f"greater than {self.lower}"] * (self.lower > -math.inf)
        parts += [f"less than {self.upper}"] * (self.upper < math.inf)
        return f"finite numbers {' and '.join(parts)}".rstrip()

    def forward(self, unconstrained: Any) -> Any:
        u = jnp.asarray(unconstrained)
        if self.lower == -math.inf and self.upper == math.inf:
            return u
        if self.upper == math.inf:
            constrained = self.lower + _exp(u)
        elif self.lower == -math.inf:
            constrained = self.upper - _exp(u)
        else:
            # From the nearer end: near an end that is zero, a number has more digits.
            width = self.upper - self.lower
            # In float16 the powers of small numbers would underflow.
            low, high = (jax.nn.sigmoid(_computable(end)) for end in (u, -u))
            if low.dtype != u.dtype:
                low, high = low.astype(u.dtype), high.astype(u.dtype)
            constrained = jnp.where(u < 0, self.lower + width * low, self.upper - width * high)
        return jnp.clip(constrained, *_inside(self.lower, self.upper, u.dtype))

    def inverse(self, constrained: Any) -> Any:
        x = jnp.asarray(constrained)
        if self.lower == -math.inf and self.upper == math.inf:
            return x
        x = jnp.clip(x, *_inside(self.lower, self.upper, x.dtype))
        if self.upper == math.inf:
            return jnp.log(x - self.lower)
        if self.lower == -math.inf:
            return jnp.log(self.upper - x)
        return jnp.log(x - self.lower) - jnp.log(self.upper - x)

    def _check_form(self, value: Any, where: str, axes: int) -> None:
        super()._check_form(value, where, axes)
        # The dtype alone decides, so that this works for traced values, too.
        least, most = _inside(self.lower, self.upper, value.dtype)
        if not least <= most:
            self._refuse(value, "no number between the bounds", where)

    def tests(self, value: Any, xp: Any) -> Iterator[tuple[Any, Any, str]]:
        lower, upper = (value.dtype.type(end) for end in (self.lower, self.upper))
        yield (value > lower) & (value < upper), value, "{}"


def _exp(u: Any) -> Any:
    # Not infinite, because the gradient would be NaN.
    known = untyped_jax.numpy.finfo(u.dtype)
    return jnp.exp(jnp.minimum(u, math.log(known.max) * (1 - 2 * float(known.eps))))


def _inside(lower: float, upper: float, dtype: Any) -> tuple[float, float]:
    """Return the least and the greatest number of a dtype between two bounds."""
    return _next_to(lower, 1.0, dtype), _next_to(upper, -1.0, dtype)


@ft.cache
def _next_to(bound: float, towards: float, dtype: Any) -> float:
    """The finite number of a dtype next to a bound, in the direction of the sign of `towards`."""
    known = untyped_jax.numpy.finfo(dtype)
    if math.isinf(bound):
        return math.copysign(float(known.max), bound)
    if bound == 0:
        # Not the smallest number, if compiled code takes it for zero. It does not in float16, whose
        # smallest numbers are ordinary ones in float32, in which it is computed.
        wide: Any = dtype if np.dtype(dtype).itemsize > 4 else jnp.float32
        computed = cast("Any", jnp.finfo)(wide)
        least = max(float(known.smallest_subnormal), float(computed.tiny))
        return math.copysign(least, towards)
    kind = np.dtype(dtype).type
    with np.errstate(over="ignore"):
        return float(np.nextafter(kind(bound), kind(math.copysign(math.inf, towards))))


def _slack(value: Any, roundings: int) -> float:
    known = untyped_jax.numpy.finfo(value.dtype)
    return roundings * float(known.eps)


def _exact(value: Any, xp: Any) -> Any:
    """Return a value in high precision: the tests look at the rounding of its numbers."""
    return value.astype(np.float64) if xp is np else _computable(value)


class _Softplus(_Checked):
    name = "softplus_positive"

    def bound(self) -> str:
        return positive.bound()

    def forward(self, unconstrained: Any) -> Any:
        u = jnp.asarray(unconstrained)
        return jnp.clip(jax.nn.softplus(u), *_inside(0.0, math.inf, u.dtype))

    def inverse(self, constrained: Any) -> Any:
        x = jnp.asarray(constrained)
        x = jnp.clip(x, *_inside(0.0, math.inf, x.dtype))
        return x + jnp.log(-jnp.expm1(-x))

    def tests(self, value: Any, xp: Any) -> Iterator[tuple[Any, Any, str]]:
        yield (value > 0) & xp.isfinite(value), value, "{}"


real: Constraint = _Range(-math.inf, math.inf)
"""Finite numbers: no bound. For code that takes any constraint; values are checked, and stored
unchanged."""

positive: Constraint = _Range(0.0, math.inf)
"""Greater than zero: `exp`, whose inverse is `log`. An optimizer step is a factor, whatever
the size of the value, as scales, rates and variances need. numpyro and PyTorch use this map, too.

The stored array is `log x`, so a value is exact to `1 + |log x|` roundings of its dtype: from
`e^-8` to `e^8` that is `1e-6` in `float32`, 0.5 % in `float16` and 4 % in `bfloat16`. Store a value
that must be more exact in `float32`."""

softplus_positive: Constraint = _Softplus()
"""Greater than zero: `softplus`, `log(1 + exp(u))`. Nearly `u` itself for large values, so
that they grow by sums and not by factors; nearly `exp(u)` for small ones. numpyro's name."""

unit_interval: Constraint = _Range(0.0, 1.0)
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
        >>> pm.constraints.greater_than(0.0) == pm.constraints.positive
        True
    """
    return _Range(_bound("greater_than(lower_bound)", lower_bound), math.inf)


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
    return _Range(-math.inf, _bound("less_than(upper_bound)", upper_bound))


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
        expected = "a lower bound and a higher upper bound"
        raise ArgumentError("interval", expected, f"{lower} and {upper}")
    return _Range(lower, upper)


def _bound(where: str, given: Any) -> float:
    # Python's or NumPy's numbers: a traced value, or an array, is not a constant of the program.
    kinds: tuple[Any, ...] = (int, float, np.integer, np.floating)
    if not isinstance(given, kinds) or isinstance(given, bool) or not math.isfinite(given):
        hint = [
            "a bound is configuration; for a bound that is an array, write a computed leaf:",
            "class Scaled(pm.Computed): ...",
        ]
        got = describe(given)
        raise ArgumentError(where, "a finite number", got, hint=hint)
    return float(given) + 0.0  # Zero has one sign.


_NAMES = {(-math.inf, math.inf): "real", (0.0, math.inf): "positive", (0.0, 1.0): "unit_interval"}


# ---- vectors


class _Simplex(_Checked):
    name = "simplex"
    words = "numbers greater than 0.0 whose sum over the last axis is 1.0"

    def forward(self, unconstrained: Any) -> Any:
        u = jnp.asarray(unconstrained)
        # Adding one number to all changes no share: the last is fixed at zero, so that the inverse
        # is unique.
        last = jnp.zeros_like(u, shape=(*u.shape[:-1], 1))
        shares = jax.nn.softmax(jnp.concatenate([u, last], axis=-1), axis=-1)
        # A share that underflows to zero has no inverse.
        return jnp.maximum(shares, _next_to(0.0, 1.0, u.dtype))

    def inverse(self, constrained: Any) -> Any:
        x = jnp.asarray(constrained)
        logs = jnp.log(jnp.maximum(x, _next_to(0.0, 1.0, x.dtype)))
        return logs[..., :-1] - logs[..., -1:]

    def tests(self, value: Any, xp: Any) -> Iterator[tuple[Any, Any, str]]:
        exact = _exact(value, xp)
        yield exact > 0, value, "{}"
        sums = exact.sum(axis=-1)
        yield xp.abs(sums - 1) <= _slack(value, 4 * value.shape[-1]), sums, "a sum of {}"

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        return None if shape and shape[-1] else "a last axis, of one number or more"

    def shape_of(self, unconstrained: tuple[int, ...]) -> tuple[int, ...] | None:
        return *unconstrained[:-1], unconstrained[-1] + 1


class _OrderedVector(_Checked):
    name = "ordered_vector"
    words = "finite numbers, each greater than the one before it"

    def forward(self, unconstrained: Any) -> Any:
        u = jnp.asarray(unconstrained)
        return jnp.cumsum(jnp.concatenate([u[..., :1], _exp(u[..., 1:])], axis=-1), axis=-1)

    def inverse(self, constrained: Any) -> Any:
        x = jnp.asarray(constrained)
        return jnp.concatenate([x[..., :1], jnp.log(jnp.diff(x, axis=-1))], axis=-1)

    def tests(self, value: Any, xp: Any) -> Iterator[tuple[Any, Any, str]]:
        first = xp.ones_like(value[..., :1], dtype=bool)
        is_more = xp.concatenate([first, value[..., 1:] > value[..., :-1]], axis=-1)
        yield xp.isfinite(value) & is_more, value, "{}"

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        return None if shape else "a last axis"


simplex: Constraint = _Simplex()
"""Shares: positive numbers whose sum over the last axis is one. The `softmax` of one number fewer,
and zero, which is more precise than breaking sticks (numpyro's and PyTorch's map)."""

ordered_vector: Constraint = _OrderedVector()
"""Numbers that increase along the last axis: the first, and the logarithms of the differences."""


# ---- matrices


class _LowerCholesky(_Checked):
    name = "lower_cholesky"
    words = "zeros above the diagonal, and numbers greater than 0.0 on it"

    def forward(self, unconstrained: Any) -> Any:
        u = jnp.asarray(unconstrained)
        size = _size(u.shape[-1])
        below = u.shape[-1] - size
        diagonal = positive.forward(u[..., below:])
        zero = jnp.zeros_like(u, shape=(*u.shape[:-1], 1))
        parts = jnp.concatenate([u[..., :below], diagonal, zero], axis=-1)
        # One gather, instead of two scatters to set both triangles.
        return parts[..., _sources(size)]

    def inverse(self, constrained: Any) -> Any:
        x = jnp.asarray(constrained)
        rows, columns = np.tril_indices(x.shape[-1], -1)
        diagonal = untyped_jax.numpy.diagonal(x, axis1=-2, axis2=-1)
        return jnp.concatenate([x[..., rows, columns], positive.inverse(diagonal)], axis=-1)

    def tests(self, value: Any, xp: Any) -> Iterator[tuple[Any, Any, str]]:
        size = value.shape[-1]
        above, diagonal = np.triu(np.ones((size, size), bool), 1), np.eye(size, dtype=bool)
        is_right = xp.where(above, value == 0, ~diagonal | (value > 0))
        yield is_right & xp.isfinite(value), value, "{}"

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        is_square = len(shape) >= 2 and shape[-1] == shape[-2] > 0
        return None if is_square else "a square matrix, in the last two axes"

    def shape_of(self, unconstrained: tuple[int, ...]) -> tuple[int, ...] | None:
        size = _size(unconstrained[-1])
        return *unconstrained[:-1], size, size


def _size(count: int) -> int:
    """Return the size of a matrix with this many numbers on and below the diagonal."""
    return (math.isqrt(8 * count + 1) - 1) // 2


@ft.cache
def _sources(size: int) -> NDArray[Any]:
    """The index of the source of each number of a matrix: below the diagonal, on it, or a zero."""
    below = size * (size - 1) // 2
    found = np.full((size, size), below + size)
    found[np.tril_indices(size, -1)] = np.arange(below)
    found[np.diag_indices(size)] = np.arange(below, below + size)
    return found


class _PositiveDefinite(_LowerCholesky):
    name = "positive_definite"
    words = "symmetric matrices whose eigenvalues are greater than 0.0"

    def forward(self, unconstrained: Any) -> Any:
        factor = super().forward(unconstrained)
        # In the default precision of an accelerator the product might not be definite.
        return jnp.matmul(factor, jnp.matrix_transpose(factor), precision="highest")

    def inverse(self, constrained: Any) -> Any:
        x = jnp.asarray(constrained)
        return super().inverse(jnp.linalg.cholesky(_computable(x)).astype(x.dtype))

    def tests(self, value: Any, xp: Any) -> Iterator[tuple[Any, Any, str]]:
        exact = _exact(value, xp)
        yield xp.isfinite(exact), value, "{}"
        is_same = xp.abs(exact - xp.swapaxes(exact, -1, -2)) <= (
            _slack(value, 8) * xp.abs(exact).max(initial=0)
        )
        yield is_same, value, "another number than on the other side of the diagonal, {},"
        # In NumPy only: in a program, a matrix that is not definite has no factor.
        if xp is np:
            # They are sorted: if the smallest is positive, all are.
            least = np.linalg.eigvalsh(exact)[..., 0]
            yield least > 0, least, "an eigenvalue of {}"


class _Orthogonal(_Checked):
    name = "orthogonal"
    words = "columns of length 1.0 that are at right angles"

    def forward(self, unconstrained: Any) -> Any:
        u = jnp.asarray(unconstrained)
        q, r = jnp.linalg.qr(_computable(u))
        diagonal = untyped_jax.numpy.diagonal(r, axis1=-2, axis2=-1)
        # Not by `sign`, which is zero for a column that depends on those before it.
        signs = jnp.where(diagonal < 0, -1, 1).astype(q.dtype)
        return (q * signs[..., None, :]).astype(u.dtype)

    def inverse(self, constrained: Any) -> Any:
        return jnp.asarray(constrained)

    def tests(self, value: Any, xp: Any) -> Iterator[tuple[Any, Any, str]]:
        exact = _exact(value, xp)
        products = xp.swapaxes(exact, -1, -2) @ exact
        is_right = xp.abs(products - np.eye(value.shape[-1], dtype=exact.dtype)) <= (
            _slack(value, 16 * value.shape[-2])
        )
        yield is_right, products, "a product of two columns of {}"

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        is_tall = len(shape) >= 2 and shape[-2] >= shape[-1] > 0
        return None if is_tall else "a matrix with no more columns than rows, in the last two axes"


def _computable(x: Any) -> Any:
    # Linear algebra does not support half precision.
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


lower_cholesky: Constraint = _LowerCholesky()
"""Lower-triangular matrices with a positive diagonal, as Cholesky factors are. The stored array
has the numbers below the diagonal, and the logarithms of the diagonal: `n (n + 1) / 2` numbers."""

positive_definite: Constraint = _PositiveDefinite()
"""Symmetric matrices with positive eigenvalues: a `lower_cholesky` factor times its transpose."""

orthogonal: Constraint = _Orthogonal()
"""Matrices, square or taller than wide, with orthonormal columns: the `Q` of the decomposition
`QR`, with the signs that make the diagonal of `R` positive.

No smooth map from unconstrained arrays is one-to-one onto these. This one reaches all of them,
including reflections, and is smooth wherever the columns are linearly independent; the inverse is
the matrix itself. The two components, of determinant 1 and -1, are not connected. The stored array
has the shape of the value."""


# ---- others


@dataclasses.dataclass(frozen=True, repr=False)
class _Bijection(_Checked):
    forwards: Callable[[Any], Any]
    backwards: Callable[[Any], Any]
    check: Callable[[Any], Any] | None

    def __repr__(self) -> str:
        return f"bijection({_name(self.forwards)}, {_name(self.backwards)})"

    def bound(self) -> str:
        return f"a value x with {_name(self.forwards)}({_name(self.backwards)}(x)) == x"

    def forward(self, unconstrained: Any) -> Any:
        return self.forwards(unconstrained)

    def inverse(self, constrained: Any) -> Any:
        return jnp.asarray(self.backwards(constrained))

    def fault(self, value: NDArray[Any]) -> str | None:
        if self.check is not None and not bool(np.all(self.check(value))):
            return f"a value that {_name(self.check)} refuses"
        again = np.asarray(self.forwards(self.backwards(jnp.asarray(value))))
        if again.shape != value.shape:
            return f"the shape {again.shape} after both functions"
        return super().fault(value)

    def holds(self, value: Any, unconstrained: Any) -> Any:
        again = self.forwards(unconstrained)
        return again.shape == value.shape and super().holds(value, unconstrained)

    def tests(self, value: Any, xp: Any) -> Iterator[tuple[Any, Any, str]]:
        # Without `check`, which is written for NumPy's arrays.
        again = self.forwards(self.backwards(jnp.asarray(value)))
        # Half of the digits: a map may be steep, and its inverse loses as many.
        slack = math.sqrt(_slack(value, 1)) * (1 + xp.abs(value))
        yield xp.abs(again - value) <= slack, value, "{}"

    def shape_of(self, unconstrained: tuple[int, ...]) -> tuple[int, ...] | None:
        return None

    def invert_seen(self, value: Any, axes: int) -> Any:
        # Called directly: it may not be traceable.
        if not axes:
            return self.inverse(value)
        each = [self.inverse(value[index]) for index in np.ndindex(value.shape[:axes])]
        return jnp.reshape(jnp.stack(each), (*value.shape[:axes], *each[0].shape))


def bijection(
    forward: Callable[[Any], Any],
    inverse: Callable[[Any], Any],
    *,
    check: Callable[[Any], Any] | None = None,
) -> Constraint:
    """Make a constraint from a smooth map and its inverse.

    A new value is mapped there and back, and refused if the result differs. So it refuses values
    outside the bound, and two functions that do not fit each other.

    Args:
        forward: from any array to one inside the bound.
        inverse: its inverse.
        check: a further test of a value, as a NumPy array: returns a bool, or an array of
            them.

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
    given = {"forward": forward, "inverse": inverse}
    for name, function in (given if check is None else {**given, "check": check}).items():
        if not callable(function) or is_node(function):
            hint = ["compute a value that has its own parameters from them:"]
            hint += ["class Mapped(pm.Computed): ..."]
            where = f"bijection({name})"
            raise ArgumentError(where, "a function", describe(function), hint=hint)
    return _Bijection(forward, inverse, check)


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
