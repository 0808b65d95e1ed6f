"""Checking fields against their annotations, for classes that jaxtyping checks.

jaxtyping checks the arguments of `__init__`; what a converter makes of them, and what an own
`__init__` assigns, it does not see. When it takes hold of a Module class (by `@jaxtyped` or by its
import hook) it replaces the class's `__init__`; that is where the type checker is learned, and
from then on finished instances are checked too.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from jaxtyping import jaxtyped  # pyright: ignore[reportUnknownVariableType] (typed in part)

from pytreemod.module.schema import Schema


def type_checker_of(init: Any) -> Any:
    """The type checker with which jaxtyping wrapped a function; None if it did not."""
    if getattr(init, "__globals__", {}).get("__name__", "").split(".")[0] != "jaxtyping":
        return None
    try:
        return inspect.getclosurevars(init).nonlocals.get("typechecker")
    except (TypeError, ValueError):
        return None


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
    check.__qualname__ = check.__name__ = schema.cls.__qualname__
    check.__module__ = schema.cls.__module__
    checked = jaxtyped(check, typechecker=type_checker)

    def check_fields(node: Any) -> None:
        checked(**{f.name: getattr(node, f.name) for f in fields})

    return check_fields


def _globals_of(cls: type) -> dict[str, Any]:
    return dict(getattr(sys.modules.get(cls.__module__), "__dict__", {}))
