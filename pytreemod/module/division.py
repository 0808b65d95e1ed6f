"""What is data and what is configuration, judged by a field's value.

Strings, classes and callables that are no pytrees (functions, built-ins, jitted functions, ufuncs,
`functools.partial`) can never be data for JAX, so a field that holds one is configuration.
Everything else is data unless it was declared `static`. The judgment is made once, when an
instance is built; unflattening restores it and never judges again.
"""

from __future__ import annotations

import copy
import functools as ft
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from pytreemod.errors import FieldError, describe, explain
from pytreemod.tree.kinds import are_one
from pytreemod.tree.nodes import is_node
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

# Types of data that are met often: the generated code of a class looks here first. Array types
# and Module classes join as they are met, so that importing does not start JAX's backend.
KNOWN_DATA: set[type] = {bool, int, float, complex, type(None), list, tuple, dict, np.ndarray}

# The same for the values of static fields: types whose instances cannot hold an array.
KNOWN_STATIC: set[type] = {
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    type(None),
    types.BuiltinFunctionType,
    np.ufunc,
}


def is_configuration(value: object) -> bool:
    """Whether a field that is not declared static is configuration because of its value."""
    kind = type(value)
    if kind in KNOWN_DATA:
        return False
    if kind in _CONFIGURATION or isinstance(value, (str, type)):
        return True
    if isinstance(value, jax.Array):
        KNOWN_DATA.add(kind)
        return False
    return callable(value) and not is_array(value) and not is_node(value)


_SEQUENCES: frozenset[Any] = frozenset({list, tuple})


def _copied(value: Any) -> Any:
    """Containers copied, what they hold shared: a copy of a function would be another function."""
    kind = class_of(value)
    if kind in _SEQUENCES:
        return kind(map(_copied, value))
    if kind is dict:
        return {key: _copied(value[key]) for key in value}
    return copy.copy(value) if issubclass(kind, Held.TYPES) else value


class Held:
    """Configuration that could be changed in place (a list, a dict, a set), as it was.

    The structure of a tree must not change under JAX's hands, so it gets a copy, and whoever
    rebuilds the tree gets another. Two are compared by all that they hold, for its kinds may have
    changed since the instance was built.
    """

    __slots__ = ("value",)

    TYPES = (list, dict, set, bytearray)

    def __init__(self, value: Any):
        self.value = _copied(value)

    def give(self) -> Any:
        """A copy of the value."""
        return _copied(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and are_one(self.value, other.value)

    def __hash__(self) -> int:
        return hash(class_of(self.value))

    def __repr__(self) -> str:
        return repr(self.value)


def refuse_arrays(cls: type, name: str, value: Any) -> None:
    """Refuse configuration that holds arrays.

    Raises:
        FieldError: an array stands in a static field, or inside a callable that JAX wrapped.
    """
    if type(value) in KNOWN_STATIC:
        return
    for inside, found in _arrays_in(value, ""):
        what = f"{cls.__qualname__}.{name}"
        if callable(value) and not isinstance(value, type) and not is_node(value):
            raise FieldError(
                explain(
                    what,
                    "a callable without arrays inside, or a pytree",
                    f"{describe(value)}, which hides {found}",
                    places=[f"{name}{inside}: {found}"],
                    cure=[
                        "configuration cannot be traced; use what keeps the arrays visible:",
                        "pm.filter_jit(f), pm.filter_vmap(f), ... "
                        "instead of jax.jit(f), jax.vmap(f)",
                        "pm.Partial(f, array) instead of functools.partial(f, array)",
                    ],
                )
            )
        raise FieldError(
            explain(
                what,
                "no array in a static field",
                f"{found}",
                places=[f"{name}{inside}: {found}"] if inside else [],
                cure=[
                    "declare it as data that training leaves alone, or keep plain numbers:",
                    f"{name}: jax.Array = pm.buffer()",
                    f"{name}: tuple[float, ...] = pm.field(static=True)",
                ],
            )
        )


def _arrays_in(value: Any, path: str) -> Iterator[tuple[str, str]]:
    within: Any = value  # A checker narrows `value` to containers of it knows not what.
    if is_array(value):
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
            if is_array(leaf):
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
