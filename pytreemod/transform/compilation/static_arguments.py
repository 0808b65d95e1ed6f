"""Arguments whose arrays are part of the program: `filter_jit(static=...)`.

Anything but an array is static by itself. In an argument that is named in `static=`, NumPy's arrays
and numbers are, too: they are compared by what they hold, and arrive as they were passed.
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
    """A NumPy array or number as a static value: equal to one that holds the same bytes."""

    __slots__ = ("identity", "value")

    def __init__(self, value: Any):
        kind = class_of(value)
        if issubclass(kind, np.ndarray):
            # The caller may write to the array; what was traced must not change with it.
            value = value.copy()
            value.flags.writeable = False
        self.value: Any = value
        # By its bytes: NaN is equal to itself so, and zeros are distinguished by their signs.
        self.identity: Any = (kind, value.shape, value.dtype, value.tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        return repr(self.value)


def as_static(static: Any, fn: Any) -> tuple[str, ...]:
    """The names in `filter_jit(fn, static=...)`.

    Raises:
        ArgumentError: they are no names, or not those of arguments.
    """
    names: Any = (static,) if isinstance(static, str) else static
    if class_of(names) not in (tuple, list) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(
            "filter_jit(static)",
            "names of arguments",
            describe(static),
            hint=["write, for instance", '@pm.filter_jit(static=("size",))'],
        )
    check_names("filter_jit(static)", tuple(names), fn)
    return tuple(names)


def make_constant(
    static: tuple[str, ...], names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make static what is in the arguments that were named.

    Raises:
        ArgumentError: there is a JAX array in one; its path is named.
    """
    named = [(argument_name(names, i), x) for i, x in enumerate(args)]
    constant = tuple(_constant_in(x, name) if name in static else x for name, x in named)
    return constant, {k: _constant_in(x, k) if k in static else x for k, x in kwargs.items()}


def _constant_in(tree: PyTree, name: str) -> PyTree:
    leaves, treedef = jtu.tree_flatten(tree)
    # To look at its numbers would wait for the device, in every call: the user has to say so.
    if any(isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) for leaf in leaves):
        _refuse(tree, name)
    # As it was passed, mostly: numbers and texts are static by themselves.
    if not any(isinstance(leaf, _NUMPY) for leaf in leaves):
        return tree
    return treedef.unflatten(map(_as_constant, leaves))


def constant_as(tree: PyTree, other: PyTree) -> PyTree:
    """What `make_constant` makes of a tree, if `other` has some."""
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
        "NumPy arrays, and values that are no arrays",
        "an array of JAX",
        places=places,
        hint=[
            "looking at its numbers would mean to wait for the device; if that is meant:",
            f"{name} = jax.device_get({name})",
        ],
    )


def give_back(
    static: tuple[str, ...], names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `make_constant` was given."""
    named = [(argument_name(names, i), x) for i, x in enumerate(args)]
    out = tuple(given_back(x) if name in static else x for name, x in named)
    return out, {k: given_back(x) if k in static else x for k, x in kwargs.items()}


def given_back(tree: PyTree) -> PyTree:
    """A tree with what was held in it."""
    return jtu.tree_map(_value, tree)


def _value(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Constant) else leaf
