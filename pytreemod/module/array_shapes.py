"""Configuration that says which shapes a Module's arrays have does not change without them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pytreemod.errors import ShapeError, describe
from pytreemod.typing import class_of


def check_array_shapes(made: Any, before: Any, changed: Collection[str]) -> None:
    """Refuse new configuration that does not fit the arrays of a Module.

    A class takes part if it has a method `__array_shapes__`: by the name of a field, or the path of
    an array in a layer inside (`"query_proj.weight"`), the shape that the configuration says; None
    where it says that there is no such array. Only shapes that the
    new configuration changes are looked at, and only their last axes: a map that made several
    Modules as one has put its own axis before them.

    Args:
        made: a Module after `replace`.
        before: the Module that it was.
        changed: the names of the fields that were exchanged.

    Raises:
        ShapeError: an array has another shape; or there is none, or one that should not be there.
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
        # That of a subclass may have a layout of its own.
        if _fits(_at(before, name), was, was):
            needed = "None" if shape is None else f"shape {shape}"
            places.append(f"{name}: {describe(_at(made, name))}, and {needed} would be needed")
            first, *inside = name.split(".")
            arrays[f"{first}=None" if shape is None and not inside else f"{first}=..."] = None
    if places:
        own = {name.partition(".")[0] for name in old}
        names = [name for name in changed if name not in own]
        kind = class_of(made).__qualname__
        change = ", ".join(f"{name}={describe(getattr(made, name))}" for name in names)
        hint = [
            "arrays and configuration go together; where they change, they change in one step:",
            f"layer = layer.replace({change}, {', '.join(arrays)})",
        ]
        where, expected = f"{kind}({', '.join(names)})", "what its arrays were made for"
        raise ShapeError(where, expected, change, places=places, hint=hint)


def _at(node: Any, path: str) -> Any:
    """What is at a path; None if what is on the way has no such part."""
    for name in path.split("."):
        if not name.isdigit():
            node = getattr(node, name, None)
        else:
            node = node[int(name)] if class_of(node) is tuple else None
    return node


def _fits(value: Any, shape: tuple[int, ...] | None, old: tuple[int, ...] | None) -> bool:
    """Whether a value may stand where an array of this shape is expected from now on."""
    if value is None:
        # An array that was taken out by partition is None as well.
        return shape is None or old is not None
    found = getattr(value, "shape", None)
    # A label, or a spec, has no shape.
    if found is None:
        return True
    return shape is not None and found[len(found) - len(shape) :] == shape
