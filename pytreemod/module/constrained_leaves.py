"""`Constraint`, and `Constrained`: a value within bounds, computed from one without bounds.

A field declared `field(constraint=...)` takes its constrained value, and reads as it. The tree
stores a computed leaf with one array, `unconstrained`, which may have any value. So an optimizer,
which does not know the bounds, cannot leave them.

    class Kernel(pm.Module):                               made = Kernel(2.0)
        length: Array = pm.field(constraint=positive)      made.length                      2.0
                                                           made, "length.unconstrained"     log 2.0

`inverse` is applied to each new value (see
[`constraining`][pytreemod.module.constraining]), `forward` to each read.
"""

from __future__ import annotations

import functools as ft
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from pytreemod.errors import FieldError, PytreemodError, ShapeError, describe, explain
from pytreemod.module.computed_leaves import Computed
from pytreemod.module.construction import put_together, with_notes
from pytreemod.module.fields import AbstractConstraint, field
from pytreemod.module.reading import MADE, Made, count_made_as_one, evaluate, leaf_shape
from pytreemod.tree.predicates import is_array
from pytreemod.tree.printing import array_doc
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

    def fault(self, value: NDArray[Any]) -> str | None:
        """Return the way in which a value violates the bound, in words; None if it does not."""

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        """Return the shapes that are allowed, if a value's is not one of them; otherwise None."""

    def shape_of(self, unconstrained: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of the value for an array of this shape; None if only `forward` knows."""
        return unconstrained

    def constrain(self, value: Any, where: str, old: Any = None) -> Any:
        """Return the computed leaf that reads as a constrained value.

        The bound is checked here for concrete numbers, and by `invert_traced` for traced ones; not
        on other hosts.

        Raises:
            FieldError: if the value is outside the bound.
            ShapeError: if the constraint does not allow its shape.
        """
        # For several models at once, each has its own value.
        axes = count_made_as_one(old) if isinstance(old, Constrained) else 0
        axes = axes if np.ndim(value) >= axes else 0
        if isinstance(value, jax.ShapeDtypeStruct):
            self._check_form(value, where, axes)
            unconstrained: Any = untyped_jax.eval_shape(mapped(self.inverse, axes), value)
        elif isinstance(value, Tracer):
            self._check_form(value, where, axes)
            unconstrained = mapped(ft.partial(self.invert_traced, where=where), axes)(value)
        else:
            # Concrete values stay concrete inside a program, too.
            with jax.ensure_compile_time_eval():
                value = value if isinstance(value, jax.Array) else jnp.asarray(value)
                unconstrained = self._invert_known(value, where, axes)
        made = Made((tuple(unconstrained.shape[axes:]),), tuple(value.shape[axes:]))
        if isinstance(old, Constrained) and old.constraint == self:
            # The same leaf with another array, so that it has the same roles.
            return with_notes(old, {MADE: made}, {"unconstrained": unconstrained})
        values = {"unconstrained": unconstrained, "constraint": self, MADE: made}
        return put_together(Constrained, values, ("constraint",))

    def _invert_known(self, value: jax.Array, where: str, axes: int) -> Any:
        self._check_form(value, where, axes)
        if not value.is_fully_addressable:
            return mapped(self.inverse, axes)(value)
        seen = np.asarray(value)
        for index in np.ndindex(seen.shape[:axes]):
            fault = self.fault(seen[*index, ...])
            if fault is not None:
                self._refuse(value, fault, where)
        unconstrained = self.invert_seen(value, axes)
        if not np.isfinite(np.asarray(unconstrained)).all():
            self._refuse(value, "numbers too close to the bound", where)
        return unconstrained

    def invert_seen(self, value: Any, axes: int) -> Any:
        """Apply `inverse` to a concrete array; its first `axes` axes are layer axes."""
        return cast("Any", _inverted(self, axes, value))

    def invert_traced(self, value: Any, where: str) -> Any:
        """Apply `inverse` to a traced array, which is checked when the program runs."""
        return self.inverse(value)

    def refusal(self, value: Any, fault: str, where: str) -> str:
        """Return the message that refuses a value."""
        return explain(
            f"{where} breaks its constraint {self!r}, {self.bound()}: {fault} in {describe(value)}",
            hint=f"pm.constraints.{self!r}.forward(unconstrained)",
        )

    def _check_form(self, value: Any, where: str, axes: int) -> None:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            self._refuse(value, "complex numbers", where)
        expected = self.misfit(tuple(value.shape[axes:]))
        if expected is not None:
            raise ShapeError(where, f"{expected}, for the constraint {self!r}", describe(value))

    def _refuse(self, value: Any, fault: str, where: str) -> NoReturn:
        raise FieldError(self.refusal(value, fault, where))


def mapped(fn: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """Map a function of one array over the first `axes` axes."""
    for _ in range(axes):
        fn = jax.vmap(fn)
    return fn


# Compiled: this takes a quarter of the time of the single operations (6 us instead of 25).
@ft.partial(jax.jit, static_argnums=(0, 1))
def _inverted(constraint: Constraint, axes: int, value: Any) -> Any:
    return mapped(constraint.inverse, axes)(value)


class Constrained(Computed):
    """The value of a constrained field: any array, read as a value within bounds."""

    unconstrained: Any
    constraint: Constraint = field(static=True)

    def value(self) -> Any:
        """Return the constrained value."""
        return self.constraint.forward(self.unconstrained)

    def __value_shape__(self) -> tuple[int, ...] | None:
        return self.constraint.shape_of(leaf_shape(self.unconstrained))

    def __pdoc__(self, **kwargs: Any) -> Any:
        import wadler_lindig as wl  # Here, as in `tree.printing`.

        return wl.bracketed(
            begin=wl.TextDoc(f"{self.constraint!r}("),
            docs=list(self._contents(wl, kwargs)),
            sep=wl.comma,
            end=wl.TextDoc(")"),
            indent=kwargs["indent"],
        )

    def _contents(self, wl: Any, kwargs: dict[str, Any]) -> Iterator[Any]:
        leaf = self.unconstrained
        if is_array(leaf) and kwargs["short_arrays"]:
            shape = self.__value_shape__()
            yield wl.pdoc(leaf, **kwargs) if shape is None else array_doc(leaf, shape)
            return
        if is_array(leaf) and not isinstance(leaf, Tracer):
            # Not for several models at once, whose values are computed one by one.
            with suppress(PytreemodError):
                yield wl.pdoc(evaluate(self, "value"), **kwargs)
        # Show it beside the value: gradients have the model's structure, but their numbers are not
        # values.
        yield from wl.named_objs([("unconstrained", leaf)], **kwargs)
