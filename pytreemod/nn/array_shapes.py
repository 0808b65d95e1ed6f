"""The shapes of a layer's arrays according to their annotations.

`weight: Float[Array, "out_size in_size"]` is a contract if these names are static fields, or
properties, of the class. A layer's call compares them with its arrays.
"""

from __future__ import annotations

import functools as ft
from typing import Any

from pytreemod.errors import FieldWarning, warn
from pytreemod.module.naming_axes import array_texts, evaluated
from pytreemod.typing import class_of, is_instance


def declared_shapes(layer: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the configuration of a Module implies, by the names of its arrays.

    Warns:
        FieldWarning: at the first call, if an annotation cannot be evaluated.
    """
    declared = _contract(class_of(layer))
    return {n: sum((_sizes(layer, t) for t in tokens), ()) for n, tokens in declared.items()}


def size_names(cls: Any) -> list[str]:
    """Return the static fields of a Module class that shapes depend on."""
    used = {token.removeprefix("*") for tokens in _contract(cls).values() for token in tokens}
    return [name for name in cls.__record__.fields if name in used]


# Cached for the process, because JAX never frees the classes of its pytrees.
@ft.cache
def _contract(cls: Any) -> dict[str, list[str]]:
    """The axes of each array whose annotation names nothing but numbers and sizes of the class."""
    found: dict[str, list[str]] = {}
    static = cls.__record__.static
    for name, field in cls.__record__.fields.items():
        try:
            texts = array_texts(evaluated(cls, field))
        except Exception as error:
            fact = f"{cls.__qualname__}.{name}: its shape is not checked: {error}"
            warn(FieldWarning, fact, hint="import its names at the top of the module")
            continue
        tokens = texts[0].split() if texts else ["no array"]
        names = [token.removeprefix("*") for token in tokens if not token.isdigit()]
        if all(n in static or isinstance(getattr(cls, n, None), property) for n in names):
            found[name] = tokens
    return found


def _sizes(layer: Any, token: str) -> tuple[int, ...]:
    if token.isdigit():
        return (int(token),)
    size: Any = getattr(layer, token.removeprefix("*"))
    # "scalar" is the word of layers for no axis; their arrays have one entry there.
    return size if is_instance(size, tuple) else (1 if size == "scalar" else size,)
