"""Dividing fields into data and configuration, by their values.

Strings, classes and callables that are not pytrees (functions, built-ins, jitted functions, ufuncs,
`functools.partial`) can never be data for JAX, so a field with such a value is configuration.
Everything else is data unless it was declared `static`. The decision is made once, when an
instance is built; unflattening restores it and never decides again.
"""

from __future__ import annotations

import copy
import functools as ft
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import FieldWarning, describe, explain, warn
from pytreemod.tree.kinds import PLAIN, are_one
from pytreemod.tree.nodes import is_node, record_of
from pytreemod.tree.predicates import is_array
from pytreemod.typing import class_of, jtu

_CONFIGURATION = frozenset(
    {
        str,
        type,
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodType,
        ft.partial,
        np.ufunc,
        type(jax.jit(lambda: None)),
    }
)

_DATA = frozenset({bool, int, float, complex, type(None), list, tuple, dict, np.ndarray})

_ARRAYLESS = PLAIN | {complex, type, types.BuiltinFunctionType, np.ufunc}

# Configuration of these types may hide arrays behind `__wrapped__`.
WRAPPERS: frozenset[type] = frozenset(
    {types.FunctionType, type(jax.jit(lambda: None)), jax.custom_jvp, jax.custom_vjp, jnp.ufunc}
)

# For these types, `==` suffices.
EXACT: frozenset[type] = (_ARRAYLESS - {float, complex, type}) | WRAPPERS


def is_configuration(value: object) -> bool:
    """Whether a field that is not declared static is configuration because of its value."""
    kind = type(value)
    if kind in _DATA:
        return False
    if kind in _CONFIGURATION or isinstance(value, (str, type)):
        return True
    # Check for a Module by its record (0.1 us), before asking JAX's registry (0.3 us).
    if not callable(value) or record_of(value) is not None:
        return False
    return not is_array(value) and not is_node(value)


def is_clear_data(value: object) -> bool:
    """Whether all values of this type are data, and none can be the instance's own method.

    Such types never change: arrays, Python's own, Modules.
    """
    return type(value) in _DATA or isinstance(value, jax.Array) or record_of(value) is not None


def holds_nothing(value: object) -> bool:
    """Whether no value of this type can contain the instance that it is assigned to.

    A transformed function can; that is checked when the instance is finished.
    """
    kind = type(value)
    return (
        kind in _ARRAYLESS or kind in WRAPPERS or kind is np.ndarray or isinstance(value, jax.Array)
    )


def lasts(made: Any) -> bool:
    """Whether a class or a function is permanent: Python, or a module, has it."""
    home = getattr(made, "__module__", None)
    found: Any = sys.modules.get(home) if isinstance(home, str) else None
    for name in str(getattr(made, "__qualname__", "")).split("."):
        found = getattr(found, name, None)
    return found is made or (home == "builtins" and isinstance(made, type))


_SEQUENCES: frozenset[Any] = frozenset({list, tuple})


def _copied(value: Any) -> Any:
    """Copy containers and share their contents: a copied function would be another function."""
    kind = class_of(value)
    if kind in _SEQUENCES:
        return kind(map(_copied, value))
    if kind is dict:
        return {key: _copied(value[key]) for key in value}
    return copy.copy(value) if issubclass(kind, (*Held.TYPES, np.ndarray)) else value


def _is_of_arrays(value: Any) -> bool:
    within: Any = value
    if isinstance(value, tuple):
        return any(map(_is_of_arrays, within))
    if isinstance(value, (np.ndarray, jax.Array)):
        return True
    return is_node(value) and any(_arrays_in(value, ""))


class Held:
    """A copy of configuration that could be changed in place (a list, a dict, a set).

    The structure of a tree must not change while JAX uses it. So the structure has one copy, and
    each rebuilt tree gets another. Two are compared with all their contents and kinds, because
    these may have changed since the instance was built.
    """

    __slots__ = ("value",)

    TYPES = (list, dict, set, bytearray)

    @classmethod
    def suits(cls, value: Any) -> bool:
        """Whether configuration is held: mutable values, and arrays, which `==` cannot compare."""
        return isinstance(value, cls.TYPES) or (
            class_of(value) not in _ARRAYLESS and _is_of_arrays(value)
        )

    def __init__(self, value: Any):
        self.value = _copied(value)

    def give(self) -> Any:
        """Return a copy of the value."""
        return _copied(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and are_one(self.value, other.value)

    def __hash__(self) -> int:
        return hash(class_of(self.value))

    def __repr__(self) -> str:
        return repr(self.value)


def warn_of_arrays(cls: type, name: str, value: Any) -> None:
    """Warn of configuration that contains arrays, once for each field.

    The array is in a static field, or inside a callable that JAX or `functools` wrapped.
    """
    if type(value) in _ARRAYLESS:
        return
    for inside, found in _arrays_in(value, ""):
        what = f"{cls.__qualname__}.{name}"
        if callable(value) and not isinstance(value, type) and not is_node(value):
            text = explain(
                f"{what}: {describe(value)} hides an array, which is compiled in as a constant",
                at=[f"{name}{inside}: {found}"],
                hint="pm.Partial(f, array), pm.filter_jit(f) in place of functools and jax.jit",
            )
        else:
            text = explain(
                f"{what} is static and holds an array, which is compiled in as a constant",
                at=[f"{name}{inside}: {found}"],
                hint=f"{name}: jax.Array = pm.buffer()",
            )
        warn(FieldWarning, text)
        return


def may_hide_arrays(value: object) -> bool:
    """Whether some values of this type contain arrays."""
    return type(value) not in _ARRAYLESS and (
        isinstance(value, (tuple, list, dict))
        or callable(value)
        or is_array(value)
        or is_node(value)
    )


def hides_arrays(value: Any) -> bool:
    """Whether configuration contains arrays; see `warn_of_arrays`."""
    kind = class_of(value)
    # Written out for the most common types, because it runs for each new instance.
    while kind in WRAPPERS:
        value = getattr(value, "__wrapped__", None)
        kind = class_of(value)
    if kind in _ARRAYLESS:
        return False
    if kind is tuple:
        return not _ARRAYLESS.issuperset(map(class_of, value)) and any(map(hides_arrays, value))
    if kind is ft.partial:
        return hides_arrays((*value.args, *value.keywords.values())) or hides_arrays(value.func)
    return any(_arrays_in(value, ""))


def _arrays_in(value: Any, path: str) -> Iterator[tuple[str, str]]:
    within: Any = value  # Type checkers would narrow `value` to containers of unknown items.
    if isinstance(value, np.generic):
        return  # A number: it has a hash and an `==`.
    elif is_array(value):
        yield path, describe(value)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(within):
            yield from _arrays_in(item, f"{path}[{i}]")
    elif isinstance(value, dict):
        for key, item in within.items():
            yield from _arrays_in(item, f"{path}[{key!r}]")
    elif isinstance(value, type):
        return
    elif is_node(value):
        for leaf in jtu.tree_leaves(value):
            if is_array(leaf) and not isinstance(leaf, np.generic):
                yield path, describe(leaf)
                return
    elif isinstance(value, ft.partial):
        yield from _arrays_in(value.args, f"{path}.args")
        yield from _arrays_in(value.keywords, f"{path}.keywords")
        yield from _arrays_in(value.func, f"{path}.func")
    elif isinstance(value, types.MethodType):
        yield from _arrays_in(value.__self__, f"{path}.__self__")
    elif callable(value) and hasattr(value, "__wrapped__"):
        yield from _arrays_in(within.__wrapped__, f"{path}.__wrapped__")
