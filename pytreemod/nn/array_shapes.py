"""The shapes of a layer's arrays according to their annotations.

`weight: Float[Array, "out_size in_size"]` is a contract if these names are static fields, or
properties, of the class. A layer's call compares them with its arrays.
"""

from __future__ import annotations

import functools as ft
from typing import Any

from pytreemod.errors import FieldWarning, warn
from pytreemod.module.naming_axes import array_texts, evaluated


def size_names(cls: Any) -> list[str]:
    """Return the static fields of a Module class that shapes depend on."""
    used = {axis for axes in declared_axes(cls).values() for axis in axes}
    return [name for name in cls.__module_schema__.fields if name in used]


# Cached for the process, because JAX never frees the classes of its pytrees.
@ft.cache
def declared_axes(cls: Any) -> dict[str, list[int | str]]:
    """Return the axes of the arrays whose annotations name only sizes of the class.

    Returns:
        By the name of the field, for each axis a number or the name of a size; the value of that is
        a tuple for several axes.

    Warns:
        FieldWarning: if an annotation cannot be evaluated.
    """
    found: dict[str, list[int | str]] = {}
    static = cls.__module_schema__.static
    for name, field in cls.__module_schema__.fields.items():
        try:
            texts = array_texts(evaluated(cls, field))
        except Exception as error:
            fact = f"{cls.__qualname__}.{name}: its shape is not checked: {error}"
            warn(FieldWarning, fact, hint="import its names at the top of the module")
            continue
        axes = [token.removeprefix("*") for token in (texts[0].split() if texts else ["no array"])]
        names = [axis for axis in axes if not axis.isdigit()]
        if all(n in static or isinstance(getattr(cls, n, None), property) for n in names):
            found[name] = [int(axis) if axis.isdigit() else axis for axis in axes]
    return found
