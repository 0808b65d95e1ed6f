"""Arguments whose arrays are part of the program: `filter_jit(static=...)`.

Values other than arrays are always static. In an argument named in `static=`, NumPy arrays and
numbers are static, too. They are compared by value, and the function gets them unchanged.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pytreemod.errors import ArgumentError, describe
from pytreemod.transform.boundary.signatures import check_names
from pytreemod.transform.boundary.wrapping import argument_name
from pytreemod.tree.paths import path_text
from pytreemod.typing import PyTree, class_of, jtu

_NUMPY = (np.ndarray, np.generic)


class Constant:
    """A NumPy array or number as a static value: equal to one with the same bytes."""

    __slots__ = ("identity", "value")

    def __init__(self, value: Any):
        kind = class_of(value)
        if issubclass(kind, np.ndarray):
            # The caller may write to the array, which must not change a traced program.
            value = value.copy()
            value.flags.writeable = False
        self.value: Any = value
        # By its bytes: NaN equals itself then, and zeros are distinguished by their signs.
        self.identity: Any = (kind, value.shape, value.dtype, value.tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        return repr(self.value)


def as_static(static: Any, fn: Any) -> tuple[str, ...]:
    """Return the names in `filter_jit(fn, static=...)`.

    Raises:
        ArgumentError: if a value is not a name, or not that of an argument.
    """
    names: Any = (static,) if isinstance(static, str) else static
    if class_of(names) not in (tuple, list) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(
            "filter_jit(static)",
            "names of arguments",
            describe(static),
            hint=["for example:", '@pm.filter_jit(static=("size",))'],
        )
    check_names("filter_jit(static)", tuple(names), fn)
    return tuple(names)


def make_constant(
    static: tuple[str, ...], names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make the values in the named arguments static.

    Raises:
        ArgumentError: if one contains a JAX array; the error names its path.
    """
    named = [(argument_name(names, i), x) for i, x in enumerate(args)]
    constant = tuple(_constant_in(x, name) if name in static else x for name, x in named)
    return constant, {k: _constant_in(x, k) if k in static else x for k, x in kwargs.items()}


def _constant_in(tree: PyTree, name: str) -> PyTree:
    leaves, treedef = jtu.tree_flatten(tree)
    # Reading its numbers would wait for the device in every call, so the user must ask for it.
    if any(isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) for leaf in leaves):
        _refuse(tree, name)
    # Numbers and strings are static already, so most arguments are returned unchanged.
    if not any(isinstance(leaf, _NUMPY) for leaf in leaves):
        return tree
    return treedef.unflatten(map(_as_constant, leaves))


def constant_as(tree: PyTree, other: PyTree) -> PyTree:
    """Return a tree with `make_constant` applied, if `other` has constants."""
    has_some = any(isinstance(leaf, Constant) for leaf in jtu.tree_leaves(other))
    return jtu.tree_map(_as_constant, tree) if has_some else tree


def _as_constant(leaf: Any) -> Any:
    return Constant(leaf) if isinstance(leaf, _NUMPY) else leaf


def _refuse(tree: PyTree, name: str) -> None:
    places = [
        f"{path_text(path, name)}: {describe(leaf)}"
        for path, leaf in jtu.tree_leaves_with_path(tree)
        if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
    ]
    raise ArgumentError(
        f"filter_jit(static) for {name}",
        "NumPy arrays and non-array values",
        "a JAX array",
        at=places,
        hint=[
            "reading it waits for the device; to do so, write:",
            f"{name} = jax.device_get({name})",
        ],
    )


def give_back(
    static: tuple[str, ...], names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inverse of `make_constant`."""
    named = [(argument_name(names, i), x) for i, x in enumerate(args)]
    out = tuple(given_back(x) if name in static else x for name, x in named)
    return out, {k: given_back(x) if k in static else x for k, x in kwargs.items()}


def given_back(tree: PyTree) -> PyTree:
    """Return a tree with the arrays of its constants instead of the constants."""
    return jtu.tree_map(_value, tree)


def _value(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Constant) else leaf
