"""Attributes with which a subclass replaces a field.

A property or method that precedes the declaration of a field, in Python's order of look-up, hides
the field from every reader. So it replaces the field: the class has no such
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
    """Return the attributes that replace fields, by name.

    Args:
        cls: a class whose fields `dataclasses` has collected.
        value_kinds: classes whose instances Python binds, but which represent a value.
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
    """Whether Python returns another object when `value` is read from an instance."""
    return hasattr(class_of(value), "__get__")


def mark_overridden(cls: type, names: frozenset[str]) -> None:
    """Mark fields so that `dataclasses` makes no parameters of them; it only reads them."""
    known: dict[str, dataclasses.Field[Any]] = vars(cls)["__dataclass_fields__"]
    for name in names:
        known[name] = copy.copy(known[name])
        known[name].init = False


def drop_overridden(cls: type, overridden: dict[str, Any], values: dict[str, Any]) -> None:
    """Remove values that the `__init__` of a base has stored under the name of a method.

    Raises:
        FieldError: if a value was passed explicitly, and is not a default.
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
    """Raise the error for a value that would be hidden by an attribute that replaces the field."""
    what = "property" if isinstance(found, _PROPERTIES) else "method"
    owner = next(base for base in cls.__mro__ if name in vars(base)).__qualname__
    raise FieldError(
        f"{cls.__qualname__}.{name}",
        f"no value, because a {what} of {owner} replaces the field",
        describe(given),
        hint=[
            f"set it only in classes where it is a field, or rename the {what}:",
            f"if not isinstance(self, {cls.__name__}):",
            f"    self.{name} = {name}",
        ],
    )


def refuse_properties(cls: type) -> None:
    """Refuse a field and a property of one name: Python would only read the property.

    Raises:
        FieldError: if the class body annotates the name of a property, its own or of a base.
    """
    own = inspect.get_annotations(cls)
    for field in dataclasses.fields(cls):
        if field.name not in own or not isinstance(field.default, _PROPERTIES):
            continue
        name, kind = field.name, field.type if isinstance(field.type, str) else _name(field.type)
        owner = next(b for b in cls.__mro__ if vars(b).get(name) is field.default)
        hint = ["a property needs no annotation:", "@property", f"def {name}(self) -> {kind}: ..."]
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
