"""Checking fields against their annotations, for classes that jaxtyping checks.

jaxtyping checks the arguments of `__init__`; what a converter makes of them, and what an own
`__init__` assigns, it does not see. When it takes hold of a Module class (by `@jaxtyped` or by its
import hook) it replaces the class's `__init__`; that is where the type checker is learned, and
from then on finished instances are checked too.
"""

from __future__ import annotations

import sys
import types
import typing
from typing import Any

import jax
import numpy as np
from jaxtyping import (
    AbstractArray,
    TypeCheckError,
    jaxtyped,  # pyright: ignore[reportUnknownVariableType] (typed in part)
)

from pytreemod.module.schema import Schema
from pytreemod.tree.nodes import is_node
from pytreemod.typing import class_of

_PLAIN: frozenset[type] = frozenset({type(None), list, tuple, dict})


def type_checker_of(init: Any) -> Any:
    """The type checker with which jaxtyping wrapped a function; None if it did not."""
    if getattr(init, "__globals__", {}).get("__name__", "").split(".")[0] != "jaxtyping":
        return None
    return _captured(init, "typechecker", depth=3)


def without_array_annotations(init: Any, schema: Schema) -> Any:
    """A generated `__init__` that jaxtyping has wrapped, wrapped so that arrays are left to us.

    What stands in an array's place may be a node that computes the array, which a check of the
    parameter would refuse. The fields of the finished instance are checked anyway.
    """
    written: Any = init.__wrapped__
    plain = types.FunctionType(
        written.__code__, written.__globals__, written.__name__, closure=written.__closure__
    )
    plain.__defaults__, plain.__kwdefaults__ = written.__defaults__, written.__kwdefaults__
    plain.__qualname__, plain.__module__ = written.__qualname__, written.__module__
    scope = _globals_of(schema.cls)
    plain.__annotations__ = {
        name: annotation
        for name, annotation in written.__annotations__.items()
        if name not in schema.fields
        or annotation is not schema.fields[name].type
        or not _wants_array(annotation, scope)
    }
    wrapped: Any = jaxtyped(plain, typechecker=type_checker_of(init))
    # What says what the class takes.
    wrapped.__wrapped__ = written
    return wrapped


def _captured(fn: Any, name: str, depth: int) -> Any:
    """What a function, or one that it has captured, has captured under a name."""
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
        schema: the class's.
        type_checker: that of jaxtyping.

    Raises (when called):
        jaxtyping.TypeCheckError: a field's value does not fit its annotation.
    """

    def __init__(self, schema: Schema, type_checker: Any):
        self._schema, self._type_checker = schema, type_checker
        self._names = [name for name in schema.fields if name.isidentifier()]
        scope = _globals_of(schema.cls)
        self._of_arrays = {n for n in self._names if _wants_array(schema.fields[n].type, scope)}
        self._checks: dict[tuple[str, ...], Any] = {}

    def __call__(self, node: Any) -> None:
        """Check an instance.

        A node in an array's place is let pass: a Module that computes the array, or wraps it. A
        list, or another of Python's own containers, is none of these.
        """
        values = {name: getattr(node, name) for name in self._names}
        values = {
            name: value
            for name, value in values.items()
            if name not in self._of_arrays or class_of(value) in _PLAIN or not is_node(value)
        }
        self._check_of(tuple(values))(**values)

    def _check_of(self, names: tuple[str, ...]) -> Any:
        """What checks these fields together: sizes that they share by name agree."""
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

        What a transform has made, such as the layers of an ensemble, has other shapes than its
        annotations say, and is changed nevertheless: `inference_mode(ensemble)`.
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


def _wants_array(annotation: Any, scope: dict[str, Any]) -> bool:
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, scope)
        except Exception:
            return False  # A name that only type checkers see; whoever checks it says so.
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_wants_array(kind, scope) for kind in typing.get_args(annotation))
    arrays = (AbstractArray, jax.Array, np.ndarray)
    return isinstance(annotation, type) and issubclass(annotation, arrays)


def _globals_of(cls: type) -> dict[str, Any]:
    return dict(getattr(sys.modules.get(cls.__module__), "__dict__", {}))
