"""Which attributes of a class are still abstract.

An annotation may be evaluated or a string, spelled `AbstractVar[int]`, `pm.AbstractVar[int]` or
through any alias: what counts is what the name before the bracket stands for.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pytreemod.module.fields import AbstractClassVar, AbstractVar, is_abstract_annotation

_NAMES = ("AbstractVar", "AbstractClassVar")


def split_annotations(cls: type) -> tuple[dict[str, Any], frozenset[str]]:
    """The annotations of the class body that are not abstract, and the names of those that are."""
    annotations = inspect.get_annotations(cls)
    abstract = frozenset(
        name for name, annotation in annotations.items() if _is_abstract(annotation, cls)
    )
    return {n: a for n, a in annotations.items() if n not in abstract}, abstract


def _is_abstract(annotation: Any, cls: type) -> bool:
    if not isinstance(annotation, str):
        return is_abstract_annotation(annotation)
    head = annotation.split("[", 1)[0].strip()
    if not all(part.isidentifier() for part in head.split(".")):
        return False
    for scope in _scopes(cls):
        found, value = _look_up(head, scope)
        if found:
            return (
                value is AbstractVar or value is AbstractClassVar or is_abstract_annotation(value)
            )
    # A name that nothing in sight defines (an import for type checkers only) goes by its spelling.
    return head.rsplit(".", 1)[-1] in _NAMES


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


def unmet(cls: type, own: frozenset[str], provided: set[str]) -> frozenset[str]:
    """The abstract attributes that `cls` still lacks.

    Args:
        cls: the class.
        own: names that its own body declares abstract.
        provided: names that its own body, or its fields, provide.

    Returns:
        The names.
    """
    inherited: set[str] = set()
    for base in cls.__mro__[1:]:
        inherited.update(getattr(base, "__abstractvars__", ()))
    return frozenset(
        name for name in inherited | own if name in own or not _is_provided(cls, name, provided)
    )


def _is_provided(cls: type, name: str, provided: set[str]) -> bool:
    if name in provided:
        return True
    return any(name in vars(base) for base in cls.__mro__)
