"""Which attributes of a class are still abstract.

An annotation may be evaluated or a string, spelled `AbstractVar[int]`, `pm.AbstractVar[int]` or
through any alias: the object that the name before the bracket refers to decides.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pytreemod.errors import FieldError
from pytreemod.module.fields import AbstractClassVar, AbstractVar, abstract_kind
from pytreemod.tree.pending import has_attribute

SETS = {"AbstractVar": "__abstractvars__", "AbstractClassVar": "__abstractclassvars__"}
"""The attribute of a class that has the names that it lacks, by kind."""


def split_annotations(cls: type) -> tuple[dict[str, Any], dict[str, str]]:
    """The annotations of the class body that are not abstract, and the kinds of those that are.

    Raises:
        FieldError: if an abstract attribute has no type, or has a value.
    """
    annotations = inspect.get_annotations(cls)
    kinds = {name: _abstract_kind(annotation, cls) for name, annotation in annotations.items()}
    abstract = {name: kind for name, kind in kinds.items() if kind is not None}
    for name, kind in abstract.items():
        _refuse_untyped(cls, name, kind, annotations[name])
        if name in vars(cls):
            _refuse_value(cls, name, kind)
    return {n: a for n, a in annotations.items() if n not in abstract}, abstract


def _abstract_kind(annotation: Any, cls: type) -> str | None:
    """`AbstractVar` or `AbstractClassVar`; None for any other annotation."""
    if not isinstance(annotation, str):
        return abstract_kind(annotation)
    head = annotation.split("[", 1)[0].strip()
    if not all(part.isidentifier() for part in head.split(".")):
        return None
    for scope in _scopes(cls):
        found, value = _look_up(head, scope)
        if found:
            return abstract_kind(value)
    # A name that is not defined (imported for type checkers only) is judged by its spelling.
    last = head.rsplit(".", 1)[-1]
    return last if last in SETS else None


def _refuse_untyped(cls: type, name: str, kind: str, annotation: Any) -> None:
    is_name = isinstance(annotation, str) and annotation.rsplit(".", 1)[-1].strip() in SETS
    if annotation is AbstractVar or annotation is AbstractClassVar or is_name:
        raise FieldError(
            f"{cls.__qualname__}.{name}",
            f"{kind} with a type",
            f"one without. Cannot use unsubscripted `{kind}`",
            hint=["declare the type that subclasses provide:", f"{name}: pm.{kind}[jax.Array]"],
        )


def _refuse_value(cls: type, name: str, kind: str) -> None:
    raise FieldError(
        f"{cls.__qualname__}.{name}",
        "no value, because subclasses provide it",
        f"a value, or a property of the same class. Abstract attribute {name} cannot have value",
        hint=["declare it without a value, or make it a field:", f"{name}: pm.{kind}[...]"],
    )


def _scopes(cls: type) -> Iterator[Mapping[str, Any]]:
    yield vars(cls)
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == cls.__module__:
            yield frame.f_locals
        frame = frame.f_back
    module = sys.modules.get(cls.__module__)
    if module is not None:
        yield vars(module)
    yield vars(builtins)


def _look_up(dotted: str, scope: Mapping[str, Any]) -> tuple[bool, Any]:
    first, *rest = dotted.split(".")
    if first not in scope:
        return False, None
    value = scope[first]
    for name in rest:
        if not hasattr(value, name):
            return False, None
        value = getattr(value, name)
    return True, value


def unmet(cls: type, own: dict[str, str], provided: set[str]) -> dict[str, str]:
    """The abstract attributes that `cls` still lacks, and their kinds by the latest declaration.

    Args:
        cls: the class.
        own: the abstract attributes that its own body declares.
        provided: names that its own body, or its fields, provide.
    """
    inherited: dict[str, str] = {}
    for base in reversed(cls.__mro__[1:]):
        for kind, attribute in SETS.items():
            inherited |= dict.fromkeys(vars(base).get(attribute, ()), kind)
    lacking = {
        n: k for n, k in inherited.items() if n not in provided and not has_attribute(cls, n)
    }
    return lacking | own
