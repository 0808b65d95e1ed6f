"""Configuration that says which shapes a Module's arrays have does not change without them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pytreemod.errors import ShapeError, describe, explain
from pytreemod.typing import class_of


def check_array_shapes(made: Any, before: Any, changed: Collection[str]) -> None:
    """Refuse new configuration that does not fit the arrays of a Module.

    A class takes part if it has a method `__array_shapes__`: by the name of a field, the shape that
    the configuration says; None where it says that there is no such array. Only shapes that the
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
    arrays: list[str] = []
    for name, shape in made.__array_shapes__().items():
        value = getattr(made, name)
        if (
            shape != old[name]
            and not _fits(value, shape, old[name])
            # That of a subclass may have a layout of its own.
            and _fits(getattr(before, name), old[name], old[name])
        ):
            needed = "None" if shape is None else f"shape {shape}"
            places.append(f"{name}: {describe(value)}, and {needed} would be needed")
            arrays.append(f"{name}=None" if shape is None else f"{name}=...")
    if places:
        names = [name for name in changed if name not in old]
        kind = class_of(made).__qualname__
        change = ", ".join(f"{name}={describe(getattr(made, name))}" for name in names)
        cure = [
            "arrays and configuration go together; where they change, they change in one step:",
            f"layer = layer.replace({change}, {', '.join(arrays)})",
        ]
        where, expected = f"{kind}({', '.join(names)})", "what its arrays were made for"
        raise ShapeError(explain(where, expected, change, places=places, cure=cure))


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
