"""`gradient_report`: how a loss depends on each parameter, and why a gradient is missing.

The reason follows from the program (see `transform.derivatives.reaching`); the size from the
gradient.
"""

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
from pytreemod.transform.boundary.wrapping import Transformed, check_callable, function_name
from pytreemod.transform.compilation.jit import filter_jit
from pytreemod.transform.derivatives.chosen_leaves import Chosen, choose, refuse_nothing
from pytreemod.transform.derivatives.gradients import filter_value_and_grad
from pytreemod.transform.derivatives.reaching import reach_of
from pytreemod.transform.derivatives.results import explain_loss, pair_of
from pytreemod.tree.members import layer_axes
from pytreemod.tree.paths import parse_pattern, pattern_text
from pytreemod.tree.reports import report_text
from pytreemod.tree.snapshots import divide
from pytreemod.typing import FilterSpec, Tracer, jtu

_Kind = Literal["unused", "cut off", "not finite", "zero", "nonzero"]
_KINDS: tuple[_Kind, ...] = ("unused", "cut off", "not finite", "zero", "nonzero")


class GradientRow(NamedTuple):
    """The report on one parameter.

    Attributes:
        path: of the parameter, as a selector takes it.
        kind: `"unused"` if the loss does not depend on it; `"cut off"` if it does, but only
            without a derivative: behind `stop_gradient`, rounding, comparisons; `"not finite"`
            if a number of the gradient is NaN or infinite; `"zero"` if all are zero; `"nonzero"`.
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
_HINT_NOTHING = [
    "pass the model first, with floating arrays to train:",
    "pm.debug.gradient_report(loss)(model, batch)",
]


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
        steps = parse_pattern(path) if path != "<root>" else ()
        for row in self.rows:
            if row.path == path or (steps and _steps_of(row.path) == steps):
                return row
        raise SpecError(
            "GradientReport",
            "the path of a parameter that is differentiated",
            repr(path),
            at=[row.path for row in self.rows],
            most=10,
        )

    def __iter__(self) -> Iterator[GradientRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def paths(self, *kinds: str) -> tuple[str, ...]:
        """Return the paths of the parameters of some kinds; see `GradientRow`.

        Raises:
            ArgumentError: if there is no such kind.
        """
        for kind in kinds:
            if kind not in _KINDS:
                expected = ", ".join(map(repr, _KINDS))
                raise ArgumentError("GradientReport.paths(kinds)", expected, describe(kind))
        return tuple(row.path for row in self.rows if row.kind in kinds)

    def __repr__(self) -> str:
        rows = {kind: [str(row) for row in self.rows if row.kind == kind] for kind in _KINDS}
        return report_text("GradientReport", rows, [f"loss {self.loss:.6g}"], most=None)

    __str__ = __repr__


def _steps_of(path: str) -> tuple[str, ...]:
    return () if path == "<root>" else parse_pattern(path)


class _Options(NamedTuple):
    wrt: FilterSpec | None
    has_aux: bool


class _Report(Transformed):
    """A loss under `gradient_report`."""

    __slots__ = ()

    options: _Options

    transform_name = "gradient_report"

    def __call__(self, /, *args: Any, **kwargs: Any) -> GradientReport:
        """Report the gradient with respect to the first argument."""
        fn, (wrt, has_aux) = self.fn, self.options
        where = f"gradient_report of {function_name(fn)}"
        self._refuse_traced(where, (fn, args, kwargs))
        chosen = choose("gradient_report", fn, args, kwargs, wrt, None)
        refuse_nothing("gradient_report", fn, chosen, wrt, _HINT_NOTHING)
        again = chosen.apart(fn, kwargs)

        def loss_of(values: list[Any]) -> Any:
            loss = again(values)[0]
            if has_aux:
                loss, _ = pair_of(loss, where, "loss, aux", reason=", for has_aux=True")
            explain_loss("gradient_report", fn, loss, None, call="debug.gradient_report")
            return loss

        reach = reach_of(loss_of, chosen.values)
        # A copy of the arguments, so that the caller's States are not used up.
        arrays, structure = divide((fn, args, kwargs))
        fn, args, kwargs = structure.assemble(arrays)
        differentiate = filter_jit(filter_value_and_grad(fn, wrt=wrt, has_aux=has_aux))
        value: Any
        value, gradient = differentiate(*args, **kwargs)
        loss = value[0] if has_aux else value
        return GradientReport(_rows(chosen, reach, jtu.tree_leaves(gradient)), float(loss))

    def _refuse_traced(self, where: str, tree: Any) -> None:
        if any(isinstance(leaf, Tracer) for leaf in jtu.tree_leaves(tree)):
            raise ArgumentError(
                where,
                "arrays with values",
                "traced ones",
                hint=[
                    "call it outside compiled code; it compiles the loss itself:",
                    "pm.debug.gradient_report(loss)(model, batch)",
                ],
            )


def gradient_report(
    loss: Callable[..., Any], *, wrt: FilterSpec | None = None, has_aux: bool = False
) -> Callable[..., GradientReport]:
    """Report for each parameter how a loss depends on it, and why a gradient is missing.

    A parameter has the first kind that fits: *unused*, *cut off*, *not finite*, *zero*,
    *nonzero*. The first two follow from the program of the loss, so that they do not depend on
    the numbers: the gradient of `0 * b` is zero, and neither of them.

    A custom derivative that returns None counts as one that returns zeros. Rows of an embedding
    that are not looked up are numbers of one parameter, and have no paths.

    Args:
        loss: as for [`filter_grad`][pytreemod.filter_grad]: differentiated with respect to its
            first argument. It is compiled, and traced twice.
        wrt: picks the leaves; as for `filter_grad`.
        has_aux: whether `loss` returns a pair `(loss, aux)`.

    Returns:
        A function of the same arguments that returns a `GradientReport`. Printed, it has a line for
        each parameter; `report["head.bias"]` is the `GradientRow` of one. It does not use up a
        State in the arguments.

    Raises:
        ArgumentError: if there is nothing to differentiate, `loss` does not return a loss, or the
            arguments are traced.
        ShapeError: if the loss is not a scalar.
        SpecError: if `wrt` does not fit the first argument.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> model = {"w": jnp.ones(2), "scale": jnp.ones(2), "steps": jnp.asarray(3.0)}
        >>> def loss(model, x):
        ...     return jnp.sum(model["w"] * x * jax.lax.stop_gradient(model["scale"]))
        >>> report = pm.debug.gradient_report(loss)(model, jnp.ones(2))
        >>> report
        GradientReport: 1 unused, 1 cut off, 1 nonzero, loss 2
          unused
            steps: f32[]
          cut off
            scale: f32[2]
          nonzero
            w: f32[2], norm 1.41, ratio 1
        >>> report["w"].kind, report.paths("unused", "cut off")
        ('nonzero', ('scale', 'steps'))
    """
    check_callable("gradient_report", loss, "loss")
    return _Report(loss, _Options(wrt, has_aux))


# ---- numbers


def _rows(chosen: Chosen, reach: list[Any], gradients: list[Any]) -> tuple[GradientRow, ...]:
    (model,) = chosen.trees()
    named, axes = jtu.tree_leaves_with_path(model), jtu.tree_leaves(layer_axes(model))
    measure: Any = _norms
    rows: list[GradientRow] = []
    positions = chosen.structure.positions or ()
    for i, reached, gradient in zip(positions, reach, gradients, strict=True):
        path, parameter = named[i]
        norms = np.asarray(measure(gradient, axes[i]), np.float64)
        whole = float(measure(parameter, 0))
        norm = float(np.sqrt(np.sum(norms * norms)))
        kind = reached
        if reached == "reaches":
            kind = "not finite" if not np.isfinite(norm) else "nonzero" if norm else "zero"
        layers = norms if axes[i] else None
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
