"""Checking fields against their annotations, for classes that jaxtyping checks.

jaxtyping checks the arguments of `__init__`, but not the results of converters, or values that a
user's `__init__` assigns. To check a Module class (by `@jaxtyped` or by its import hook), it
replaces the class's `__init__`. There the type checker is recorded, and from then on finished
instances are checked, too.
"""

from __future__ import annotations

import functools as ft
import inspect
import sys
import types
import typing
from typing import Any

import jax
import numpy as np
from jaxtyping import (
    AbstractArray,
    AnnotationError,
    TypeCheckError,
    jaxtyped,  # pyright: ignore[reportUnknownVariableType] (typed in part)
)

from pytreemod.module.schema import Schema
from pytreemod.tree.nodes import is_node
from pytreemod.typing import class_of

_PLAIN: frozenset[type] = frozenset({type(None), list, tuple, dict})


def type_checker_of(init: Any) -> Any:
    """Return the type checker with which jaxtyping wrapped a function; None if it did not."""
    init = getattr(init, _CHECKED, init)
    if getattr(init, "__globals__", {}).get("__name__", "").split(".")[0] != "jaxtyping":
        return None
    return _captured(init, "typechecker", depth=3)


def letting_nodes_pass(init: Any, schema: Schema) -> Any:
    """Wrap a generated `__init__` that jaxtyping has wrapped, so that it accepts nodes for arrays.

    The argument for an array may be a node that computes the array. A check of the parameter would
    refuse it, as it would refuse a number for a constrained field. In these cases only the finished
    instance is checked. Otherwise jaxtyping checks the parameters, which binds the axis names of
    one parameter for the others.
    """
    written: Any = init.__wrapped__
    names = [*inspect.signature(written).parameters]
    arrays = _array_fields(schema)

    @ft.wraps(written)
    def __init__(*args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        found = [(given[name], name in schema.constraints) for name in arrays & given.keys()]
        is_left = any(is_number or _is_placeholder(value) for value, is_number in found)
        (written if is_left else init)(*args, **kwargs)

    setattr(__init__, _CHECKED, init)
    return __init__


_CHECKED = "__checked__"


def _captured(fn: Any, name: str, depth: int) -> Any:
    """Return the object that a function, or one that it captures, has captured under a name."""
    code = getattr(fn, "__code__", None)
    if code is None or depth == 0:
        return None
    cells = dict(zip(code.co_freevars, fn.__closure__ or (), strict=True))
    values = {key: cell.cell_contents for key, cell in cells.items() if _is_full(cell)}
    if name in values:
        return values[name]
    found = (_captured(value, name, depth - 1) for value in values.values())
    return next((value for value in found if value is not None), None)


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


class FieldCheck:
    """Checks the fields of an instance against their annotations.

    Args:
        schema: the schema of the class.
        type_checker: jaxtyping's.

    Raises (when called):
        jaxtyping.TypeCheckError: if a field's value does not fit its annotation.
    """

    def __init__(self, schema: Schema, type_checker: Any):
        self._schema, self._type_checker = schema, type_checker
        self._names = [name for name in schema.fields if name.isidentifier()]
        self._of_arrays = _array_fields(schema)
        self._checks: dict[tuple[str, ...], Any] = {}

    def __call__(self, node: Any) -> None:
        """Check an instance.

        A node instead of an array is accepted: a Module that computes the array, or wraps it.
            Python's
        own containers, such as a list, are not.
        """
        values = {name: getattr(node, name) for name in self._names}
        values = {
            name: value
            for name, value in values.items()
            if name not in self._of_arrays or not _is_placeholder(value)
        }
        try:
            self._check_of(tuple(values))(**values)
        except AnnotationError:
            # They have sizes that only an accepted node knows.
            if len(values) == len(self._names):
                raise

    def _check_of(self, names: tuple[str, ...]) -> Any:
        """A function that checks these fields together, so that sizes with one name agree."""
        if names not in self._checks:
            cls, scope = self._schema.cls, dict[str, Any]()
            parameters = f"*, {', '.join(names)}" if names else ""
            exec(f"def check({parameters}): pass", _globals_of(cls), scope)
            check: Any = scope["check"]
            check.__annotations__ = {name: self._schema.fields[name].type for name in names}
            check.__name__, check.__qualname__ = cls.__name__, cls.__qualname__
            check.__module__ = cls.__module__
            self._checks[names] = jaxtyped(check, typechecker=self._type_checker)
        return self._checks[names]

    def check_copy(self, node: Any, original: Any) -> None:
        """Check a changed copy, unless its original did not fit either.

        An instance that a transform has made, such as the layers of an ensemble, has other shapes
        than its annotations say, and can be changed nevertheless: `inference_mode(ensemble)`.
        """
        try:
            self(node)
        except TypeCheckError:
            if self._fits(original):
                raise

    def _fits(self, node: Any) -> bool:
        try:
            self(node)
        except TypeCheckError:
            return False
        return True


def _is_placeholder(value: Any) -> bool:
    """Whether a value may compute, or wrap, an array."""
    return class_of(value) not in _PLAIN and is_node(value)


def _array_fields(schema: Schema) -> set[str]:
    scope = _globals_of(schema.cls)
    return {name for name, field in schema.fields.items() if _wants_array(field.type, scope)}


def _wants_array(annotation: Any, scope: dict[str, Any]) -> bool:
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, scope)
        except Exception:
            return False  # Only type checkers see this name; the check reports it.
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_wants_array(kind, scope) for kind in typing.get_args(annotation))
    arrays = (AbstractArray, jax.Array, np.ndarray)
    return isinstance(annotation, type) and issubclass(annotation, arrays)


def _globals_of(cls: type) -> dict[str, Any]:
    return dict(getattr(sys.modules.get(cls.__module__), "__dict__", {}))
