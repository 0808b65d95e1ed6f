"""Checking fields against their annotations, for classes that jaxtyping checks.

jaxtyping checks the arguments of `__init__`; what a converter makes of them, and what an own
`__init__` assigns, it does not see. When it takes hold of a Module class (by `@jaxtyped` or by its
import hook) it replaces the class's `__init__`; that is where the type checker is learned, and
from then on finished instances are checked too.
"""

import sys
from collections.abc import Callable
from typing import Any

from jaxtyping import jaxtyped  # pyright: ignore[reportUnknownVariableType] (typed in part)

from pytreemod.module.schema import Schema


def type_checker_of(init: Any) -> Any:
    """The type checker with which jaxtyping wrapped a function; None if it did not."""
    if getattr(init, "__globals__", {}).get("__name__", "").split(".")[0] != "jaxtyping":
        return None
    return _captured(init, "typechecker", depth=3)


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


def field_check(schema: Schema, type_checker: Any) -> Callable[[Any], None]:
    """A function that checks the fields of an instance against their annotations.

    Raises (when called):
        jaxtyping.TypeCheckError: a field's value does not fit its annotation.
    """
    fields = [f for f in schema.fields.values() if f.name.isidentifier()]
    scope: dict[str, Any] = {}
    names = ", ".join(f.name for f in fields)
    exec(f"def check({'*, ' + names if names else ''}): pass", _globals_of(schema.cls), scope)
    check: Any = scope["check"]
    check.__annotations__ = {f.name: f.type for f in fields}
    check.__name__, check.__qualname__ = schema.cls.__name__, schema.cls.__qualname__
    check.__module__ = schema.cls.__module__
    checked = jaxtyped(check, typechecker=type_checker)

    def check_fields(node: Any) -> None:
        checked(**{f.name: getattr(node, f.name) for f in fields})

    return check_fields


def _globals_of(cls: type) -> dict[str, Any]:
    return dict(getattr(sys.modules.get(cls.__module__), "__dict__", {}))
