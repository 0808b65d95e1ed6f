"""Functions of JAX in pickles: by module and name, as pickle refers to a `def`.

Pickle does not know that `jax.nn.relu` or `jnp.add` can be found by their names. It tries to take
apart the object that JAX made of them, which fails. So `classes` registers their classes with
`copyreg`. Reading a pickle gives the same function, so that the model has the same structure.
"""

from __future__ import annotations

import pkgutil
import sys
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

JAX_FUNCTIONS: tuple[Any, ...] = (
    *(jax.custom_jvp, jax.custom_vjp),
    *(jnp.ufunc, type(jax.jit(lambda: None))),
)


def reduce_by_name(function: Any) -> Any:
    """Return what pickle stores for a function of JAX: its name, if it can be found by that."""
    place = _place_of(function)
    if place is None or is_by_value(place[0]):
        return function.__reduce_ex__(2)
    return pkgutil.resolve_name, (":".join(place),)


def _place_of(function: Any) -> tuple[str, str] | None:
    """Return the module and the name of a function."""
    module = getattr(function, "__module__", None)
    for name in (getattr(function, "__qualname__", None), getattr(function, "__name__", None)):
        if isinstance(module, str) and isinstance(name, str):
            for loaded in (*_public_names(module), module):
                if look_up(sys.modules.get(loaded), name) is function:
                    return loaded, name
    return None


def _public_names(module: str) -> list[str]:
    """The public modules for a private one: `jax.nn` for `jax._src.nn`.

    Private names change from one release to the next, and a pickle must be readable in both.
    """
    start = f"{module.partition('.')[0]}."
    public = [name for name in sys.modules if name.startswith(start) and "._" not in name]
    return sorted(public, key=lambda name: (len(name), name)) if "._" in module else []


def look_up(module: ModuleType | None, name: str) -> Any:
    """Return what a module has under a name with dots; None if there is no such thing."""
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
