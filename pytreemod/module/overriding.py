"""What a subclass puts in a field's place.

A property or method that comes before the declaration of a field, in the order in which Python
looks, is what everybody would read there. So it takes the field's place: the class has no such
field, its `__init__` no such parameter, and the tree no such child. (A plain value is a default,
and the field stays.)
"""

from __future__ import annotations

import copy
import dataclasses
import functools as ft
import inspect
from typing import Any, NoReturn

from pytreemod.errors import FieldError, describe
from pytreemod.module.fields import declares
from pytreemod.typing import class_of

_PROPERTIES = (property, ft.cached_property)


def find_overridden(cls: type, value_kinds: tuple[type, ...]) -> dict[str, Any]:
    """What stands in the place of fields, by their names.

    Args:
        cls: a class whose fields `dataclasses` has just collected.
        value_kinds: classes whose instances Python binds, but which stand for a value.
    """
    own = inspect.get_annotations(cls)
    found: dict[str, Any] = {}
    for name in [f.name for f in dataclasses.fields(cls) if f.name not in own]:
        first = next(b for b in cls.__mro__ if name in vars(b) or declares(b, name))
        if not declares(first, name):
            value = vars(first)[name]
            if is_bound(value) and not isinstance(value, value_kinds):
                found[name] = value
    return found


def is_bound(value: object) -> bool:
    """Whether Python gives something else where `value` is read from an instance."""
    return hasattr(class_of(value), "__get__")


def mark_overridden(cls: type, names: frozenset[str]) -> None:
    """Tell `dataclasses` that fields are no parameters: it reads them, and never sets them."""
    known: dict[str, dataclasses.Field[Any]] = vars(cls)["__dataclass_fields__"]
    for name in names:
        known[name] = copy.copy(known[name])
        known[name].init = False


def drop_overridden(cls: type, overridden: dict[str, Any], values: dict[str, Any]) -> None:
    """Take out of an instance what the `__init__` of a base has put in the place of a method.

    Raises:
        FieldError: it was given, and is no default.
    """
    for name in overridden:
        if name not in values:
            continue
        given = values.pop(name)
        owner = next(base for base in cls.__mro__ if declares(base, name))
        field = vars(owner)["__dataclass_fields__"][name]
        if field.init and given is not field.default:
            refuse_overridden(cls, name, overridden[name], given)


def refuse_overridden(cls: type, name: str, found: Any, given: Any) -> NoReturn:
    """Raise the error for a value that would be hidden by what has taken the field's place."""
    what = "property" if isinstance(found, _PROPERTIES) else "method"
    owner = next(base for base in cls.__mro__ if name in vars(base)).__qualname__
    raise FieldError(
        f"{cls.__qualname__}.{name}",
        f"nothing to be set, for a {what} of {owner} has taken the field's place",
        describe(given),
        hint=[
            f"set it only where it is a field, or give the {what} another name:",
            f"if not isinstance(self, {cls.__name__}):",
            f"    self.{name} = {name}",
        ],
    )


def refuse_properties(cls: type) -> None:
    """Refuse a field and a property of one name: Python would read the property only.

    Raises:
        FieldError: the class body annotates a name that is a property, of its own or of a base.
    """
    own = inspect.get_annotations(cls)
    for field in dataclasses.fields(cls):
        if field.name not in own or not isinstance(field.default, _PROPERTIES):
            continue
        name, kind = field.name, field.type if isinstance(field.type, str) else _name(field.type)
        owner = next(b for b in cls.__mro__ if vars(b).get(name) is field.default)
        hint = [
            "a property needs no annotation:",
            "@property",
            f"def {name}(self) -> {kind}: ...",
        ]
        if owner is not cls:
            hint = [
                f"declare it in {owner.__qualname__} for subclasses to provide:",
                f"{name}: pm.AbstractVar[{kind}]",
            ]
        raise FieldError(
            f"{cls.__qualname__}.{name}",
            "either a field or a property",
            f"the annotation of a field, and a property of {owner.__qualname__}",
            hint=hint,
        )


def _name(annotation: Any) -> str:
    return getattr(annotation, "__name__", None) or str(annotation)
