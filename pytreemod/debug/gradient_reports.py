"""`gradient_report`: the gradient of a loss by each parameter: its size, and what is missing."""

from __future__ import annotations

import functools as ft
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.transform.gradients import filter_value_and_grad
from pytreemod.transform.jit import filter_jit
from pytreemod.transform.wrapping import Transformed, check_callable
from pytreemod.tree.members import layer_axes
from pytreemod.tree.paths import parse_pattern, pattern_text
from pytreemod.tree.reports import report_text
from pytreemod.tree.snapshots import divide
from pytreemod.typing import FilterSpec, Tracer, jtu

_Kind = Literal["not finite", "zero", "nonzero"]
_KINDS: tuple[_Kind, ...] = ("not finite", "zero", "nonzero")


class GradientRow(NamedTuple):
    """The report on one parameter.

    Attributes:
        path: of the parameter, as a selector takes it.
        kind: `"not finite"` if a number of the gradient is NaN or infinite; `"zero"` if all are
            zero: the loss does not use it, cuts it off, or does not depend on it here;
            `"nonzero"`.
        norm: of the gradient.
        parameter_norm: of the parameter.
        layers: for a parameter with layer axes, the norm for each layer, an
            array with these axes; None for others.
        shape: of the parameter, in short form.
    """

    path: str
    kind: _Kind
    norm: float
    parameter_norm: float
    layers: Any
    shape: str

    @property
    def ratio(self) -> float:
        """The gradient's norm, divided by the parameter's; infinite for a parameter of zeros."""
        if self.parameter_norm:
            return self.norm / self.parameter_norm
        return math.inf if self.norm else 0.0

    def __str__(self) -> str:
        text = f"{self.path}: {self.shape}"
        if self.kind == "nonzero":
            of_zeros = "" if self.parameter_norm else ", of a parameter of zeros"
            ratio = f", ratio {self.ratio:.3g}" if self.parameter_norm else of_zeros
            text += f", norm {self.norm:.3g}{ratio}"
        if self.kind in ("nonzero", "not finite") and self.layers is not None:
            text += _layers_text("not finite", ~np.isfinite(self.layers))
            text += _layers_text("zero", self.layers == 0)
        return text


def _layers_text(what: str, marks: Any) -> str:
    found = [tuple(map(int, index)) for index in np.argwhere(marks)]
    names = [str(index[0]) if len(index) == 1 else str(index) for index in found]
    if len(names) in (0, marks.size):
        return f"; {what} in all layers" if names else ""
    rest = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    several = "s" * (len(names) > 1)
    return f"; {what} in layer{several} {', '.join(names[:_MOST])}{rest}"


_MOST = 8


@dataclass(frozen=True, repr=False)
class GradientReport:
    """The result of [`gradient_report`][pytreemod.debug.gradient_report]; prints a line per path.

    Fields:
        rows: one for each parameter, in the order of the model.
        loss: the value of the loss.
    """

    rows: tuple[GradientRow, ...]
    loss: float

    def __getitem__(self, path: str) -> GradientRow:
        wanted = parse_pattern(path)
        for row in self.rows:
            if parse_pattern(row.path) == wanted:
                return row
        fact = f"GradientReport: {path!r} is no parameter that is differentiated"
        raise SpecError(fact, at=[row.path for row in self.rows], most=10)

    def __iter__(self) -> Iterator[GradientRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def paths(self, *kinds: _Kind) -> tuple[str, ...]:
        """Return the paths of the parameters of some kinds; see `GradientRow`."""
        return tuple(row.path for row in self.rows if row.kind in kinds)

    def __repr__(self) -> str:
        rows = {kind: [str(row) for row in self.rows if row.kind == kind] for kind in _KINDS}
        return report_text("GradientReport", rows, [f"loss {self.loss:.6g}"], most=None)

    __str__ = __repr__


class _Options(NamedTuple):
    wrt: FilterSpec | None
    has_aux: bool


class _Report(Transformed):
    __slots__ = ()

    options: _Options
    transform_name = "gradient_report"

    def __call__(self, /, *args: Any, **kwargs: Any) -> GradientReport:
        """Report the gradient with respect to the first argument."""
        wrt, has_aux = self.options
        arrays, structure = divide((self.fn, args, kwargs))
        if any(isinstance(x, Tracer) for x in arrays):
            fact = "gradient_report: the arguments are traced; call it outside compiled code"
            raise ArgumentError(fact)
        # A copy of the arguments, so that the caller's States are not used up.
        fn, given, named = structure.assemble(arrays)
        differentiate = filter_jit(filter_value_and_grad(fn, wrt=wrt, has_aux=has_aux))
        value: Any
        value, gradient = differentiate(*given, **named)
        rows = _rows(args[0], gradient)
        return GradientReport(rows, float(value[0] if has_aux else value))


def gradient_report(
    loss: Callable[..., Any], *, wrt: FilterSpec | None = None, has_aux: bool = False
) -> Callable[..., GradientReport]:
    """Report the size of a loss's gradient by each parameter.

    A parameter has the first kind that fits: *not finite*, *zero*, *nonzero*. The gradient by a
    parameter that the loss does not use is zero, and so is that by one behind `stop_gradient`.

    Args:
        loss: as for [`filter_grad`][pytreemod.filter_grad]: differentiated with respect to its
            first argument. It is compiled.
        wrt: picks the leaves; as for `filter_grad`.
        has_aux: whether `loss` returns a pair `(loss, aux)`.

    Returns:
        A function of the same arguments that returns a `GradientReport`. Printed, it has a line for
        each parameter; `report["head.bias"]` is the `GradientRow` of one. It does not use up a
        State in the arguments.

    Raises:
        ArgumentError: if there is nothing to differentiate, or the arguments are traced.
        SpecError: if `wrt` does not fit the first argument.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> model = {"w": jnp.ones(2), "scale": jnp.ones(2), "steps": jnp.asarray(3.0)}
        >>> def loss(model, x):
        ...     return jnp.sum(model["w"] * x * jax.lax.stop_gradient(model["scale"]))
        >>> report = pm.debug.gradient_report(loss)(model, jnp.ones(2))
        >>> report
        GradientReport: 2 zero, 1 nonzero, loss 2
          zero
            scale: f32[2]
            steps: f32[]
          nonzero
            w: f32[2], norm 1.41, ratio 1
        >>> report["w"].kind, report.paths("zero")
        ('nonzero', ('scale', 'steps'))
    """
    check_callable("gradient_report", loss, "loss")
    return _Report(loss, _Options(wrt, has_aux))


# ---- numbers


def _rows(model: Any, gradient: Any) -> tuple[GradientRow, ...]:
    measure: Any = _norms
    leaves, axes = jtu.tree_leaves_with_path(model), jtu.tree_leaves(layer_axes(model))
    # Of the structure of the model, with None for what is not differentiated.
    found = jtu.tree_structure(model).flatten_up_to(gradient)
    rows: list[GradientRow] = []
    for (path, parameter), count, own in zip(leaves, axes, found, strict=True):
        if own is None:
            continue
        norms = np.asarray(measure(own, count), np.float64)
        norm = float(np.sqrt(np.sum(norms * norms)))
        kind: _Kind = "not finite" if not np.isfinite(norm) else "nonzero" if norm else "zero"
        whole, layers = float(measure(parameter, 0)), norms if count else None
        rows.append(GradientRow(pattern_text(path), kind, norm, whole, layers, describe(parameter)))
    return tuple(rows)


@ft.partial(jax.jit, static_argnums=1)
def _norms(array: Any, axes: int) -> jax.Array:
    """The norm of an array, for each index of its first axes; not finite where a number is not."""
    rest = tuple(range(axes, array.ndim))
    size = jnp.abs(array)
    size = size.astype(jnp.float64 if size.dtype == jnp.float64 else jnp.float32)
    # Large numbers have no square, and small ones a square of zero.
    largest = jnp.max(size, rest, initial=0.0, keepdims=True)
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    return jnp.squeeze(unit, rest) * jnp.sqrt(jnp.sum((size / unit) ** 2, rest))
