"""`Constraint`, and `Constrained`: a value within bounds, computed from one that has none.

A field that is declared `field(constraint=...)` is given its value in the clear, and gives it so.
What stands in the tree is a computed leaf with one array, `unconstrained`, which may be any: so an
optimizer, which knows no bounds, cannot leave them.

    class Kernel(pm.Module):                               made = Kernel(2.0)
        length: Array = pm.field(constraint=positive)      made.length                      2.0
                                                           made, "length.unconstrained"     log 2.0

A constraint knows both ways. The way in, `inverse`, is taken where a value is given (see
[`constraining`][pytreemod.module.constraining]); the way out, `forward`, where it is read.
"""

from __future__ import annotations

import functools as ft
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from pytreemod.errors import FieldError, PytreemodError, ShapeError, describe, explain
from pytreemod.module.classes import put_together
from pytreemod.module.computed_leaves import Computed
from pytreemod.module.fields import AbstractConstraint, field
from pytreemod.module.reading import MADE, UNKNOWN, Made, evaluate
from pytreemod.tree.predicates import is_array
from pytreemod.tree.printing import array_doc
from pytreemod.tree.stored_fields import stored
from pytreemod.typing import Tracer, class_of, untyped_jax


class Constraint(AbstractConstraint):
    """What arrays of a field may be, and a smooth map onto these from arrays that may be any.

    Those that there are stand in `pm.constraints`;
    [`bijection`][pytreemod.training.constraints.bijection] makes others.

    **Laws.** `forward(inverse(x))` is `x` for every `x` inside, up to rounding. `forward(u)` is
    inside for every finite `u`, up to rounding. Two that were made with the same arguments are
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
        """What a value must be, in words."""

    @abstractmethod
    def forward(self, unconstrained: Any) -> Any:
        """The value in the clear."""

    @abstractmethod
    def inverse(self, clear: Any) -> Any:
        """An array that `forward` takes to a value."""

    def fault(self, value: NDArray[Any]) -> str | None:
        """What is wrong with a value, in words; None if it is inside."""

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        """Which shapes it takes, if a value's is none of them; None if it is."""

    def shape_of(self, unconstrained: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of the value that is made of such an array; None if only `forward` knows."""
        return unconstrained

    def constrain(self, value: Any, where: str, old: Any = None) -> Any:
        """The computed leaf that stands for a value in the clear.

        The bound is checked here where numbers can be looked at, and by `invert_traced` where they
        are traced; not on other hosts.

        Raises:
            FieldError: the value is outside the bound.
            ShapeError: the constraint does not take its shape.
        """
        if isinstance(value, jax.ShapeDtypeStruct):
            self._check_form(value, where)
            unconstrained: Any = untyped_jax.eval_shape(self.inverse, value)
        else:
            if isinstance(value, Tracer):
                self._check_form(value, where)
                unconstrained = self.invert_traced(value, where)
            else:
                # What is known is so inside of a program, too.
                with jax.ensure_compile_time_eval():
                    value = value if isinstance(value, jax.Array) else jnp.asarray(value)
                    unconstrained = self._invert_known(value, where)
        if isinstance(old, Constrained) and old.constraint == self:
            return _renewed(old, unconstrained, tuple(value.shape))
        made = Made((tuple(unconstrained.shape),), tuple(value.shape))
        values = {"unconstrained": unconstrained, "constraint": self, MADE: made}
        return put_together(Constrained, values, ("constraint", MADE))

    def _invert_known(self, value: jax.Array, where: str) -> Any:
        self._check_form(value, where)
        if not value.is_fully_addressable:
            return self.inverse(value)
        fault = self.fault(np.asarray(value))
        if fault is not None:
            self._refuse(value, fault, where)
        unconstrained = self.invert_seen(value)
        if not np.isfinite(np.asarray(unconstrained)).all():
            self._refuse(value, "numbers too near to the bound", where)
        return unconstrained

    def invert_seen(self, value: Any) -> Any:
        """`inverse` of an array that is not traced."""
        return _compiled(self)(value)

    def invert_traced(self, value: Any, where: str) -> Any:
        """`inverse` of an array that is traced, which is checked when the program runs."""
        return self.inverse(value)

    def refusal(self, value: Any, fault: str, where: str) -> str:
        """The text that refuses a value."""
        return explain(
            where,
            f"{self.bound()}, for it is {self!r}",
            f"{fault} in {describe(value)}",
            cure=[
                "give it as it is read; of numbers without bounds one is made by:",
                f"pm.constraints.{self!r}.forward(unconstrained)",
            ],
        )

    def _check_form(self, value: Any, where: str) -> None:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            self._refuse(value, "complex numbers", where)
        expected = self.misfit(tuple(value.shape))
        if expected is not None:
            raise ShapeError(explain(where, f"{expected}, for it is {self!r}", describe(value)))

    def _refuse(self, value: Any, fault: str, where: str) -> NoReturn:
        raise FieldError(self.refusal(value, fault, where))


@ft.lru_cache(maxsize=256)
def _compiled(constraint: Constraint) -> Any:
    # A quarter of what the single operations take (6 us in place of 25).
    return jax.jit(constraint.inverse)


class Constrained(Computed):
    """What stands in a constrained field: an array that may be any, read as one within bounds."""

    unconstrained: Any
    constraint: Constraint = field(static=True)

    def value(self) -> Any:
        """The value in the clear."""
        return self.constraint.forward(self.unconstrained)

    def __value_shape__(self) -> tuple[int, ...] | None:
        return self.constraint.shape_of(_shape(self.unconstrained))

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
            # Not of several models as one, whose values are computed one by one.
            with suppress(PytreemodError):
                yield wl.pdoc(evaluate(self, "value"), **kwargs)
        # Beside the value, for gradients have the form of the model, and are no such values.
        yield from wl.named_objs([("unconstrained", leaf)], **kwargs)


def _renewed(old: Constrained, unconstrained: Any, shape: tuple[int, ...]) -> Any:
    """The same leaf with another array: with the roles that it was given, of as many models."""
    made: Made = stored(old, MADE, UNKNOWN)
    rank = len(_shape(old.unconstrained))
    # Axes that several models as one have before those of each.
    extra = rank - len(made.leaves[0]) if made.leaves and rank == unconstrained.ndim else 0
    each = Made((tuple(unconstrained.shape[extra:]),), shape[extra:])
    changes = {"unconstrained": unconstrained, MADE: each}
    return class_of(old).__record__.rebuild(old, changes)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))
