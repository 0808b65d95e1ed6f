"""`Constraint`, and `Constrained`: a value within bounds, computed from one without bounds.

A field declared `field(constraint=...)` takes its constrained value, and reads as it. The tree
stores a computed leaf with one array, `unconstrained`, which may have any value. So an optimizer,
which does not know the bounds, cannot leave them.

    class Kernel(pm.Module):                               made = Kernel(2.0)
        length: Array = pm.field(constraint=positive)      made.length                      2.0
                                                           made, "length.unconstrained"     log 2.0

`inverse` is applied to each new value (see [`schema`][pytreemod.module.schema]), `forward` to each
read.
"""

from __future__ import annotations

import functools as ft
from abc import abstractmethod
from contextlib import nullcontext
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import FieldError, ShapeError, describe, explain
from pytreemod.module.computed_leaves import Computed
from pytreemod.module.fields import AbstractConstraint, field
from pytreemod.module.reading import mapped, stacked_axes
from pytreemod.tree.instances import Notes, with_notes
from pytreemod.typing import Tracer, untyped_jax


class Constraint(AbstractConstraint):
    """A set of values, and a smooth map onto it from arrays of any value.

    The module `pm.constraints` has the library's own;
    [`bijection`][pytreemod.training.constraints.bijection] makes others.

    **Laws.** `forward(inverse(x))` is `x` for every `x` inside, up to rounding. `forward(u)` is
    inside for every finite `u`, up to rounding. Two constraints made with the same arguments are
    equal.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> positive = pm.constraints.positive
        >>> positive.inverse(jnp.asarray([1.0, 2.0]))
        Array([0.       , 0.6931472], dtype=float32)
        >>> positive.forward(positive.inverse(jnp.asarray([1.0, 2.0])))
        Array([1., 2.], dtype=float32)
    """

    @abstractmethod
    def bound(self) -> str:
        """Return the condition on a value, in words."""

    @abstractmethod
    def forward(self, unconstrained: Any) -> Any:
        """Return the constrained value."""

    @abstractmethod
    def inverse(self, constrained: Any) -> Any:
        """Return an array that `forward` maps to the value."""

    def refuse_traced(self, unconstrained: Any, is_right: Any, message: str) -> Any:
        """Return the array for a traced value, whose bound is known when the program runs."""
        return unconstrained

    def constrain(self, value: Any, where: str, old: Any = None) -> Any:
        """Return the computed leaf that reads as a constrained value.

        The bound is checked here for concrete numbers, and by `refuse_traced` for traced ones; not
        on other hosts.

        Raises:
            FieldError: if the value is outside the bound.
            ShapeError: if the constraint does not allow its shape.
        """
        # For several models at once, each has its own value.
        axes = stacked_axes(old) if isinstance(old, Constrained) else 0
        axes = axes if np.ndim(value) >= axes else 0
        is_traced, is_shape = isinstance(value, Tracer), isinstance(value, jax.ShapeDtypeStruct)
        # Concrete values stay concrete inside a program, too.
        with nullcontext() if is_traced else jax.ensure_compile_time_eval():
            value = value if is_traced or is_shape else jnp.asarray(value)
            if not jnp.issubdtype(value.dtype, jnp.floating):
                raise FieldError(self._refusal("no floating-point numbers", value, where))
            invert = cast("Any", ft.partial(_inverted, self, axes))  # pyright: ignore[reportUnknownArgumentType]
            try:
                unconstrained, is_right = (
                    jax.eval_shape(invert, value) if is_shape else invert(value)
                )
            except (TypeError, ValueError, IndexError) as error:  # Of another shape.
                fact = f"{where}: the constraint {self!r} has no value like {describe(value)}"
                raise ShapeError(fact) from error
            if is_traced:
                message = self._refusal("numbers outside", value, where)
                unconstrained = self.refuse_traced(unconstrained, is_right, message)
            elif not is_shape and value.is_fully_addressable and not is_right:
                raise FieldError(self._refusal("numbers outside", value, where))
        ranks = (unconstrained.ndim - axes,)
        values = {"unconstrained": unconstrained, "constraint": self}
        if isinstance(old, Constrained) and old.constraint == self:
            # The same leaf with another array, so that it has the same roles.
            made = type(old).__module_schema__.rebuild(old, {"unconstrained": unconstrained})
            return with_notes(made, ranks=ranks)
        return Constrained.__module_schema__.make(values, ("constraint",), Notes(ranks=ranks))

    def _refusal(self, fault: str, value: Any, where: str) -> str:
        fact = (
            f"{where} breaks its constraint {self!r}, {self.bound()}: {fault} in {describe(value)}"
        )
        return explain(fact, hint=f"pm.constraints.{self!r}.forward(unconstrained)")


def _with_answer(constraint: Constraint, value: Any) -> tuple[Any, Any]:
    """Return the unconstrained array, and whether the value is inside the bound."""
    # In float32 at least: the answer is about the value, not about its rounding on the way back.
    wide = value.astype(jnp.float32) if value.dtype.itemsize < 4 else value
    with jax.default_matmul_precision("highest"):
        there = constraint.inverse(wide)
        again = constraint.forward(there)
    if again.shape != wide.shape:
        raise ValueError(f"it has the shape {again.shape}")
    # Half of the digits: a map may be steep, and its inverse loses as many.
    slack = float(untyped_jax.numpy.finfo(value.dtype).eps) ** 0.5
    is_close = jnp.abs(again - wide) <= slack * (1 + jnp.abs(wide))
    return constraint.inverse(value), jnp.isfinite(there).all() & is_close.all()


# Compiled: this takes a quarter of the time of the single operations (6 us instead of 25).
@ft.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _inverted(constraint: Constraint, axes: int, value: Any) -> tuple[Any, Any]:
    unconstrained, is_right = mapped(ft.partial(_with_answer, constraint), axes)(value)
    return unconstrained, is_right.all()


class Constrained(Computed):
    """The value of a constrained field: any array, read as a value within bounds."""

    unconstrained: Any
    constraint: Constraint = field(static=True)

    def value(self) -> Any:
        """Return the constrained value."""
        return self.constraint.forward(self.unconstrained)

    def __pdoc__(self, **kwargs: Any) -> Any:
        import wadler_lindig as wl  # Here, as in `tree.printing`.

        # By name: the array of a gradient, or of a bound, is not the value.
        array = wl.named_objs([("unconstrained", self.unconstrained)], **kwargs)
        begin, end = wl.TextDoc(f"{self.constraint!r}("), wl.TextDoc(")")
        return wl.bracketed(begin, list(array), wl.comma, end, kwargs["indent"])
