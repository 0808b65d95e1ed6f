"""The shapes of a Module's arrays according to their annotations, and checks against them.

`weight: Float[Array, "out_size in_size"]` is a contract if these names are static fields, or
properties, of the class. It is read for classes that have `__array_shapes__`: when their arrays are
used (`read_arrays`), and when `replace` changes fields named in it (`check_array_shapes`).
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

from jaxtyping import AbstractArray

from pytreemod.errors import FieldWarning, ShapeError, describe, explain, warn
from pytreemod.module.fields import GIVEN, declares
from pytreemod.typing import class_of

ArrayShapes: TypeAlias = dict[str, tuple[int, ...] | None]
"""The shape that the configuration implies, or None, by the name or path of an array."""

COUNTS = "counts"
"""In a field's metadata: the size of the axis for each word that the field accepts."""

_Reader: TypeAlias = Callable[[Any, Any, Callable[..., None]], tuple[Any, ...]]


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
        self._scope: dict[str, Any] = {}
        self._readers: dict[tuple[str, ...], _Reader] = {}
        used: set[str] = set()
        unread: dict[str, str] = {}
        # By the name of an array: the source of its shape, and whether that may evaluate to None.
        # The latter is None if nothing declares it, and the array may be None at any time.
        self._sources: dict[str, tuple[str, bool | None]] = {}
        for name, field in cls.__record__.fields.items():
            try:
                annotation = evaluated(cls, field)
            except Exception as error:
                unread[name] = f"{field.type}  # {error}"
                continue
            options = options_of(annotation)
            dims = [kind.dim_str for kind in options if _is_array(kind)]
            sizes = [self._size(token, used) for token in dims[0].split()] if dims else []
            if not dims or None in sizes:
                continue
            shape = f"({''.join(f'{size}, ' for size in sizes)})"
            flag = field.metadata.get(GIVEN)
            if flag is not None:
                shape += f" if self.{flag} is not None and self.{flag} is not False else None"
            is_optional = type(None) in options
            self._sources[name] = shape, flag is not None if flag or not is_optional else None
        shown = "".join(f"{name!r}: {shape}, " for name, (shape, _) in self._sources.items())
        self.shapes: Callable[[Any], ArrayShapes] = self._compiled("self", f"return {{{shown}}}")
        self.names = tuple(name for name in cls.__record__.fields if name in used)
        if unread:
            _warn_unread(cls, unread)

    def reader(self, names: tuple[str, ...]) -> _Reader:
        """A function that reads arrays of an instance once, and reports those of another shape.

        It is called as `read(self, where, check)`, and calls `check(where, name, shape, value)`.
        """
        read = self._readers.get(names)
        if read is None:
            lines: list[str] = []
            for i, name in enumerate(names):
                lines.append(f"v{i} = self.{name}")
                if name not in self._sources:
                    continue
                shape, may_lack = self._sources[name]
                misfit = f"getattr(v{i}, 'shape', None) != shape"
                if may_lack is None:
                    misfit = f"v{i} is not None and {misfit}"
                elif may_lack:
                    misfit = f"v{i} is not None if shape is None else {misfit}"
                lines.append(f"shape = {shape}\n    if {misfit}:")
                lines.append(f"    check(where, {name!r}, shape, v{i})")
            values = "".join(f"v{i}, " for i in range(len(names)))
            body = "\n    ".join([*lines, f"return ({values})"])
            read = self._readers[names] = self._compiled("self, where, check", body)
        return read

    def _size(self, token: str, used: set[str]) -> str | None:
        """Return the source of one axis, or of several; None if the token names no size."""
        name = token.removeprefix("*")
        if name.isdigit():
            return name
        field = self._cls.__record__.fields.get(name)
        is_static = name in self._cls.__record__.static
        if not is_static and not isinstance(getattr(self._cls, name, None), property):
            return None
        if field is not None:
            used.add(name)
        words = field.metadata.get(COUNTS) if field is not None else None
        if not words:
            return token.replace(name, f"self.{name}")
        self._scope[f"count_{name}"] = words
        return f"count_{name}.get(self.{name}, self.{name})"

    def _compiled(self, parameters: str, body: str) -> Any:
        exec(f"def read({parameters}):\n    {body}\n", self._scope)
        return self._scope.pop("read")


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


def read_arrays(
    node: Any, names: tuple[str, ...], where: Any, check: Callable[..., None]
) -> tuple[Any, ...]:
    """Read arrays of a Module, each once.

    Args:
        node: the Module.
        names: of its fields.
        where: passed on.
        check: called as `check(where, name, shape, value)` for each array that does not have its
            declared shape.

    Returns:
        The values.
    """
    return contract_of(class_of(node)).reader(names)(node, where, check)


def check_array_shapes(made: Any, before: Any, changed: Collection[str]) -> None:
    """Refuse new configuration that does not fit the arrays of a Module.

    A class takes part if it has a method `__array_shapes__`. This returns the shape that the
    configuration implies for each array, or None if the array should not exist. The key is the
    name of a field, or the path of an array in an inner layer (`"query_proj.weight"`). Only shapes
    that the new configuration changes are checked, and only their last axes: a map that made
    several Modules at once has added its own axis in front.

    Args:
        made: a Module after `replace`.
        before: the Module before it.
        changed: the names of the replaced fields.

    Raises:
        ShapeError: if an array has another shape, is missing, or should not exist.
    """
    if not hasattr(class_of(made), "__array_shapes__"):
        return
    old = before.__array_shapes__()
    if old.keys() >= set(changed):
        return
    places: list[str] = []
    arrays: dict[str, None] = {}
    for name, shape in made.__array_shapes__().items():
        was = old.get(name, shape)
        if shape == was or _fits(_at(made, name), shape, was):
            continue
        # A subclass may arrange its array differently.
        if _fits(_at(before, name), was, was):
            needed = "None" if shape is None else f"shape {shape}"
            places.append(f"{name}: {describe(_at(made, name))}, expected {needed}")
            first, *inside = name.split(".")
            arrays[f"{first}=None" if shape is None and not inside else f"{first}=..."] = None
    if places:
        own = {name.partition(".")[0] for name in old}
        names = [name for name in changed if name not in own]
        kind = class_of(made).__qualname__
        change = ", ".join(f"{name}={describe(getattr(made, name))}" for name in names)
        raise ShapeError(
            f"{kind}: {change} does not fit its arrays",
            at=places,
            hint=f"layer = layer.replace({change}, {', '.join(arrays)})",
        )


def _at(node: Any, path: str) -> Any:
    """Return the value at a path; None if a node on the way has no such child."""
    for name in path.split("."):
        if not name.isdigit():
            node = getattr(node, name, None)
        else:
            node = node[int(name)] if class_of(node) is tuple else None
    return node


def _fits(value: Any, shape: tuple[int, ...] | None, old: tuple[int, ...] | None) -> bool:
    """Whether a value is allowed for an array that must have this shape from now on."""
    if value is None:
        # An array that partition has removed is None as well.
        return shape is None or old is not None
    found = getattr(value, "shape", None)
    # A label, or a spec, has no shape.
    if found is None:
        return True
    return shape is not None and found[len(found) - len(shape) :] == shape
