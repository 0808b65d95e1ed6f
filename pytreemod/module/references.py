"""Functions of a module, pickled by reference, whatever kind of object they are.

Pickle refers to a `def` by its module and name. It does not know that `jax.nn.relu` or
`jnp.add` can be found in the same way. It tries to take apart the object that JAX made of them,
which fails. So in the pickle of a Module a [`Reference`][pytreemod.module.references.Reference]
represents such a function, or a container that has one. Reading it back gives the same function,
so that the model has the same structure.
"""

from __future__ import annotations

import functools as ft
import pkgutil
import sys
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np

from pytreemod.tree.nodes import is_node
from pytreemod.typing import class_of

# Pickle itself refers to these by name, if they can be found.
_REFERRED: frozenset[type] = frozenset({FunctionType, BuiltinFunctionType, np.ufunc})


class Reference:
    """Represents a value in the result of `__reduce__`, and never in an unpickled object.

    `copy.copy` passes it on unchanged: `referred` gives the value.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __reduce__(self) -> Any:
        within: Any = self.value
        kind = class_of(within)
        parts = _parts(within)
        if kind is dict:
            return dict, ([(key, referring(value)) for key, value in within.items()],)
        if kind is ft.partial:
            func, args, keywords = map(referring, parts)
            return ft.partial, (func,), (func, args, keywords, vars(within) or None)
        if parts:
            make = kind if kind in (tuple, list) else kind._make
            return make, ([referring(value) for value in parts],)
        return pkgutil.resolve_name, (":".join(_place_of(within) or ()),)


def referring(value: Any) -> Any:
    """The object to pickle instead of a value: itself, or one with references to its functions."""
    return Reference(value) if _has_reference(value) else value


def referred(value: Any) -> Any:
    """Return the value that was passed to `referring`."""
    return value.value if class_of(value) is Reference else value


def _has_reference(value: Any) -> bool:
    if class_of(value) in _REFERRED:
        return False
    if any(map(_has_reference, _parts(value))):
        return True
    if not callable(value) or isinstance(value, (type, ft.partial)) or is_node(value):
        return False
    place = _place_of(value)
    return place is not None and not is_by_value(place[0])


def _parts(value: Any) -> Iterable[Any]:
    """Return the contents of a container that can be rebuilt from other items."""
    kind = class_of(value)
    if kind is dict:
        return value.values()
    if kind is ft.partial:
        return value.func, value.args, value.keywords
    is_named_tuple = tuple in kind.__mro__ and hasattr(kind, "_make")
    return value if kind in (tuple, list) or is_named_tuple else ()


def _place_of(function: Any) -> tuple[str, str] | None:
    """Return the module and the name of a function."""
    module = getattr(function, "__module__", None)
    for name in (getattr(function, "__qualname__", None), getattr(function, "__name__", None)):
        if isinstance(module, str) and isinstance(name, str):
            for loaded in (*_public_names(module), module):
                if _look_up(sys.modules.get(loaded), name) is function:
                    return loaded, name
    return None


def _public_names(module: str) -> list[str]:
    """The public modules for a private one: `jax.nn` for `jax._src.nn`.

    Private names change from one release to the next, and a pickle must be readable in both.
    """
    start = f"{module.partition('.')[0]}."
    public = [name for name in sys.modules if name.startswith(start) and "._" not in name]
    return sorted(public, key=lambda name: (len(name), name)) if "._" in module else []


def _look_up(module: ModuleType | None, name: str) -> Any:
    first, *rest = name.split(".")
    # In its dict: reading a deprecated attribute of a module may warn.
    found: Any = None if module is None else vars(module).get(first)
    for part in rest:
        found = getattr(found, part, None)
    return found


def is_by_value(module: str) -> bool:
    """Whether the contents of a module are being pickled by value: a script's, by cloudpickle.

    Another process cannot import them. Any copy of cloudpickle counts; some packages bring their
    own.
    """
    frame: Any = sys._getframe()  # pyright: ignore[reportPrivateUsage]  (public in effect)
    while frame is not None:
        if "cloudpickle" in frame.f_globals.get("__name__", ""):
            # Modules that the user has registered; a package's name includes its submodules.
            named = frame.f_globals.get("list_registry_pickle_by_value", set[str])()
            return any(f"{module}.".startswith(f"{name}.") for name in {"__main__", *named})
        frame = frame.f_back
    return False
