"""Storing the values of constrained fields: at construction, by `replace`, by `tree_at`.

Each takes the constrained value; the field's constraint computes the stored one. The library's
own constraints are in `training.constraints`. A tree with the structure of a model may not be a
model: gradients, masks, labels, axes. Values for such a tree are stored unchanged.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax.numpy as jnp

from pytreemod.errors import FieldError, SpecError, describe
from pytreemod.module.fields import AbstractConstraint
from pytreemod.module.reading import is_computed, is_derivative
from pytreemod.tree.nodes import is_node
from pytreemod.tree.predicates import is_abstract, is_array
from pytreemod.typing import class_of, jtu


def take_in(constraint: AbstractConstraint, value: Any, where: str, old: Any = None) -> Any:
    """Return the stored value of a constrained field.

    Args:
        constraint: the field's.
        value: the constrained value. None, and a computed leaf, are stored unchanged.
        where: the field, for errors.
        old: the value stored there before, if any.

    Raises:
        FieldError: if it is not a number or an array of floating-point numbers, or is outside the
            bound.
        ShapeError: if the constraint does not allow its shape.
    """
    if value is None or is_computed(value):
        return value
    kind = class_of(value)
    if kind is int:
        value = float(value)
    elif kind is not float and not (
        is_abstract(value) and jnp.issubdtype(value.dtype, jnp.inexact)
    ):
        _refuse_kind(constraint, value, where)
    return constraint.constrain(value, where, old)


def take_in_change(
    constraint: AbstractConstraint, old: Any, new: Any, where: str, *, is_built: bool
) -> Any:
    """Return the stored value of a constrained field of an instance, for a new value.

    Args:
        constraint: the field's.
        old: the value stored there now.
        new: a constrained value; or any value in a tree that is not a model.
        where: the field, for errors.
        is_built: whether the new value is judged as at construction.

    Raises:
        FieldError: as for `take_in`.
        ShapeError: as for `take_in`.
        SpecError: if the instance is a tree of derivatives, which do not refer to the field's
            value.
    """
    if is_computed(old):
        leaves = jtu.tree_leaves(old)
        if not leaves or not all(map(is_abstract, leaves)):
            return new
        is_value = _is_value(new)
        if is_value and is_derivative(old):
            _refuse_derivative(new, where)
    else:
        is_value = (old is None or is_abstract(old)) and _is_value(new) and class_of(new) is not int
    return take_in(constraint, new, where, old) if is_value or is_built else new


def _is_value(new: Any) -> bool:
    """Whether it could be a value in a model: a number, or anything with arrays."""
    if class_of(new) in (float, int) or is_abstract(new):
        return True
    is_opened = is_node(new) and not is_computed(new)
    return is_opened and any(map(is_abstract, jtu.tree_leaves(new)))


def _refuse_kind(constraint: AbstractConstraint, value: Any, where: str) -> NoReturn:
    field = where.rpartition(".")[2]
    if is_array(value):
        hint = ["convert them to floating-point numbers:", f"{field}=jnp.asarray(value, float)"]
    elif is_node(value):
        hint = [
            "a constraint is for one array; declare a field for each, or a Module for each:",
            "class Bounded(pm.Module):",
            f"    value: jax.Array = pm.field(constraint=pm.constraints.{constraint!r})",
        ]
    else:
        hint = ["pass a number, or None for no value:", f"{field}=1.0"]
    expected = f"an array of floating-point numbers, or a number, for the constraint {constraint!r}"
    raise FieldError(where, expected, describe(value), hint=hint)


def _refuse_derivative(new: Any, where: str) -> NoReturn:
    field = where.rpartition(".")[2]
    raise SpecError(
        where,
        "no new value, because it is a derivative",
        describe(new),
        hint=["name the stored array:", f'pm.tree_at("path.to.{field}.unconstrained", grads, new)'],
    )
