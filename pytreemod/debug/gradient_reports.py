"""`gradient_report`: the gradient of a loss by each parameter: its size, and what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np

from pytreemod.errors import describe
from pytreemod.transform.gradients import filter_value_and_grad
from pytreemod.transform.jit import filter_jit
from pytreemod.transform.wrapping import check_callable
from pytreemod.tree.members import layer_axes
from pytreemod.tree.paths import parse_pattern, pattern_text
from pytreemod.tree.printing import report_text
from pytreemod.tree.snapshots import divide
from pytreemod.typing import FilterSpec, jtu

_Kind = Literal["not finite", "zero", "nonzero"]


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
        return np.inf if self.norm else 0.0

    def __str__(self) -> str:
        size = f", norm {self.norm:.3g}, ratio {self.ratio:.3g}" if self.kind == "nonzero" else ""
        text = f"{self.path}: {self.shape}{size}"
        layers = np.ones(0) if self.kind == "zero" or self.layers is None else self.layers
        for what, marks in ("not finite", ~np.isfinite(layers)), ("zero", layers == 0):
            found = [",".join(map(str, index)) for index in np.argwhere(marks).tolist()]
            text += f"; {what} in layer{'s' * (len(found) > 1)} {', '.join(found)}" if found else ""
        return text


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
        return {parse_pattern(row.path): row for row in self.rows}[parse_pattern(path)]

    def paths(self, *kinds: _Kind) -> tuple[str, ...]:
        """Return the paths of the parameters of some kinds; see `GradientRow`."""
        return tuple(row.path for row in self.rows if row.kind in kinds)

    def __repr__(self) -> str:
        rows = {kind: [str(r) for r in self.rows if r.kind == kind] for kind in get_args(_Kind)}
        return report_text("GradientReport", rows, [f"loss {self.loss:.6g}"], most=None)


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
        State in the arguments. It can't be called in compiled code.

    Raises:
        ArgumentError: if there is nothing to differentiate.
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

    def report(*args: Any, **kwargs: Any) -> GradientReport:
        # A copy of the arguments, so that the caller's States are not used up.
        arrays, structure = divide((loss, args, kwargs))
        fn, given, named = structure.assemble(arrays)
        differentiate: Any = filter_value_and_grad(fn, wrt=wrt, has_aux=has_aux)
        value, gradient = filter_jit(differentiate)(*given, **named)
        leaves, axes = jtu.tree_leaves_with_path(args[0]), jtu.tree_leaves(layer_axes(args[0]))
        # Of the structure of the model, with None for what is not differentiated.
        found = jtu.tree_structure(args[0]).flatten_up_to(gradient)
        rows = [
            _row(pattern_text(path), parameter, own, count)
            for (path, parameter), own, count in zip(leaves, found, axes, strict=True)
            if own is not None
        ]
        return GradientReport(tuple(rows), float(value[0] if has_aux else value))

    return report


def _row(path: str, parameter: Any, gradient: Any, axes: int) -> GradientRow:
    norms = _norms(gradient, axes)
    norm = float(np.sqrt(np.sum(norms**2)))
    kind = "not finite" if not np.isfinite(norm) else "nonzero" if norm else "zero"
    whole, layers = float(_norms(parameter, 0)), norms if axes else None
    return GradientRow(path, kind, norm, whole, layers, describe(parameter))


def _norms(array: Any, axes: int) -> Any:
    """The norm of an array, for each index of its first axes; not finite where a number is not."""
    rest = tuple(range(axes, array.ndim))
    size = jnp.abs(array)
    size = size if size.dtype == jnp.float64 else size.astype(jnp.float32)
    # Large numbers have no square, and small ones a square of zero.
    unit = jnp.max(size, rest, initial=np.finfo(size.dtype).tiny, keepdims=True)
    norms = jnp.squeeze(unit, rest) * jnp.sqrt(jnp.sum((size / unit) ** 2, rest))
    return np.asarray(norms, np.float64)
