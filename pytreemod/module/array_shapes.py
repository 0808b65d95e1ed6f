"""The shapes of a Module's arrays according to their annotations.

`weight: Float[Array, "out_size in_size"]` is a contract if these names are static fields, or
properties, of the class. A layer's call compares them with its arrays.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, TypeAlias

from jaxtyping import AbstractArray

from pytreemod.errors import FieldWarning, explain, warn
from pytreemod.module.fields import declares

ArrayShapes: TypeAlias = dict[str, tuple[int, ...]]
"""The shape that the configuration implies, by the name of an array."""


class Contract:
    """The shapes that a class's annotations declare, as code that is generated once per class.

    Args:
        cls: a Module class.

    Attributes:
        shapes: a function from an instance to the shapes of its arrays.
        names: the static fields that shapes depend on.

    Warns:
        FieldWarning: annotations cannot be evaluated; their arrays are not checked.
    """

    def __init__(self, cls: Any):
        self._cls = cls
        used: set[str] = set()
        unread: dict[str, str] = {}
        shapes: list[str] = []
        for name, field in cls.__record__.fields.items():
            try:
                annotation = evaluated(cls, field)
            except Exception as error:
                unread[name] = f"{field.type}  # {error}"
                continue
            dims = [kind.dim_str for kind in options_of(annotation) if _is_array(kind)]
            sizes = [self._size(token, used) for token in dims[0].split()] if dims else []
            if dims and None not in sizes:
                shapes.append(f"{name!r}: ({''.join(f'{size}, ' for size in sizes)})")
        scope: dict[str, Any] = {}
        exec(f"def shapes(self):\n    return {{{', '.join(shapes)}}}\n", scope)
        self.shapes: Callable[[Any], ArrayShapes] = scope["shapes"]
        self.names = tuple(name for name in cls.__record__.fields if name in used)
        if unread:
            _warn_unread(cls, unread)

    def _size(self, token: str, used: set[str]) -> str | None:
        """Return the source of one axis, or of several; None if the token names no size."""
        name = token.removeprefix("*")
        if name.isdigit():
            return name
        is_static = name in self._cls.__record__.static
        if not is_static and not isinstance(getattr(self._cls, name, None), property):
            return None
        if is_static:
            used.add(name)
        if token != name:
            return f"*self.{name}"
        # The word of layers for no axis; their arrays have one entry there.
        return f"(1 if self.{name} == 'scalar' else self.{name})"


def evaluated(cls: type, field: Any) -> Any:
    """A field's annotation; a string is evaluated in the module of the class that declares it."""
    if not isinstance(field.type, str):
        return field.type
    owner = next(base for base in cls.__mro__ if declares(base, field.name))
    return eval(field.type, dict(vars(sys.modules[owner.__module__])))


def options_of(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union; for any other annotation, only that."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _is_array(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, AbstractArray)


def _warn_unread(cls: type, unread: dict[str, str]) -> None:
    text = explain(
        f"{cls.__qualname__}.{next(iter(unread))}",
        "an annotation that can be evaluated in its module",
        "another annotation; its shape is not checked",
        at=[f"{name}: {annotation}" for name, annotation in unread.items()],
        hint="import its names at the top of the module, not only for type checkers",
    )
    warn(FieldWarning, text)


def contract_of(cls: Any) -> Contract:
    """Return the contract of a Module class, read at the first request."""
    schema = cls.__record__.original
    if schema.contract is None:
        schema.contract = Contract(schema.cls)
    return schema.contract
