"""The one boundary between a call and JAX: a call is split into arrays and the rest, and back.

Every transform goes this way:

    step(model, x)  ->  split: arrays, key  ->  jax.jit, jax.vmap, ...  ->  join  ->  user's code
    result          <-  build                <-  ...                    <-  pack  <-  its result

*Splitting* walks the arguments once and gives a flat list of arrays and a *key*: a tuple that is
equal for two calls exactly if the second may use what was traced for the first. Records
(Modules) come with their arrays already in a list (see `tree.snapshots`), so the walk is as long
as the argument list, not as the model.

*Packing* takes the result apart while it is traced and writes down, as a `Plan`, how to build it.
The traced function returns `{plan: arrays}`: JAX keeps the keys of dicts in its own record of
each trace, so the right plan comes back with the arrays of each call, whichever of a function's
traces ran, and no table of ours has to be consulted.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import jax
import numpy as np

from pytreemod.errors import ArgumentError, describe, explain
from pytreemod.module.records import make_record
from pytreemod.transform.boundary.sowing import Sown, reaping, release
from pytreemod.tree.nodes import is_node, is_plain_tuple, places, record_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.pending import PENDING
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import (
    AbstractKeeper,
    Snapshot,
    Structure,
    container_paths,
    divide,
    snapshot_of,
    static_token,
    structure_of,
)
from pytreemod.typing import PyTree, class_of, jtu

Handler = Callable[[Any, list[Any], list[Any]], None]


class _Token:
    """A word of the key's language."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name


_ARRAY = _Token("array")
_STATIC = _Token("static")
_NAMED = _Token("named arguments")


def _split_array(value: Any, arrays: list[Any], key: list[Any]) -> None:
    arrays.append(value)
    key.append(_ARRAY)


def _split_none(value: Any, arrays: list[Any], key: list[Any]) -> None:
    key.append(None)


def _split_record(value: Any, arrays: list[Any], key: list[Any]) -> None:
    snapshot = snapshot_of(value)
    arrays.extend(snapshot.arrays)
    key.append(snapshot.structure)


def _split_keeper(value: Any, arrays: list[Any], key: list[Any]) -> None:
    snapshot = value.__snapshot__()
    arrays.extend(snapshot.arrays)
    key.append(snapshot.structure)


def _split_sequence(value: Sequence[object], arrays: list[Any], key: list[Any]) -> None:
    key.append(type(value))
    key.append(len(value))
    for item in value:
        handlers.get(type(item), split_other)(item, arrays, key)


def _split_named_tuple(value: Any, arrays: list[Any], key: list[Any]) -> None:
    # With attributes it may be a node of the user's own kind, of which they are data.
    split = _split_node if getattr(value, "__dict__", None) else _split_sequence
    split(value, arrays, key)


def _split_dict(value: dict[Any, object], arrays: list[Any], key: list[Any]) -> None:
    names = tuple(value)
    try:
        names = tuple(sorted(names))
    except TypeError:
        _split_node(value, arrays, key)
        return
    key.append(dict)
    key.append(names)
    if any(type(name) is not str for name in names):
        # 1, 1.0 and True are one key to Python, but programs tell them apart.
        key.append(tuple(map(type, names)))
    for name in names:
        item = value[name]
        handlers.get(type(item), split_other)(item, arrays, key)


def _split_static(value: Any, arrays: list[Any], key: list[Any]) -> None:
    key.append(_STATIC)
    key.append(type(value))
    key.append(static_token(value))


def _split_function(value: Any, arrays: list[Any], key: list[Any]) -> None:
    # Equal to nothing but itself: it can stand in the key as it is.
    key.append(_STATIC)
    key.append(value)


def _split_node(value: Any, arrays: list[Any], key: list[Any]) -> None:
    leaves, treedef = jtu.tree_flatten(value)
    key.append(treedef)
    for leaf in leaves:
        (_split_array if is_array(leaf) else _split_static)(leaf, arrays, key)


def split_other(value: Any, arrays: list[Any], key: list[Any]) -> None:
    """Split a value of a type that was not met before."""
    kind = class_of(value)
    if is_array(value):
        handlers[kind] = handler = _split_array
    elif record_of(value) is not None:
        handlers[kind] = handler = _split_record
    elif issubclass(kind, AbstractKeeper):
        handlers[kind] = handler = _split_keeper
    elif is_plain_tuple(value):
        handlers[kind] = handler = _split_named_tuple
    elif is_node(value):
        # JAX's registry keeps the classes of nodes for good, so keeping them here leaks nothing.
        handlers[kind] = handler = _split_node
    else:
        handler = _split_static
    handler(value, arrays, key)


handlers: dict[type, Handler] = {
    type(None): _split_none,
    tuple: _split_sequence,
    list: _split_sequence,
    dict: _split_dict,
    np.ndarray: _split_array,
    **dict.fromkeys((bool, int, float, complex, str, bytes, type), _split_static),
    **dict.fromkeys(
        (
            FunctionType,
            BuiltinFunctionType,
            type(jax.jit(is_array)),
            jax.custom_jvp,
            jax.custom_vjp,
        ),
        _split_function,
    ),
}
"""How to split a value, by its exact type. Types join as they are met."""


def split_call(
    head: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], tuple[Any, ...]]:
    """Split a call: all its arrays in one list, and the key of all else.

    Args:
        head: what comes before the arguments (a function that is a pytree, or nothing).
        args: the positional arguments.
        kwargs: the arguments by keyword.

    Returns:
        The arrays, in JAX's order of leaves, and the key.
    """
    arrays: list[Any] = []
    key: list[Any] = []
    get: Any = handlers.get
    for value in head:
        get(type(value), split_other)(value, arrays, key)
    for value in args:
        get(type(value), split_other)(value, arrays, key)
    if kwargs:
        key.append(_NAMED)
        for name in sorted(kwargs):
            key.append(name)
            value = kwargs[name]
            get(type(value), split_other)(value, arrays, key)
    return arrays, tuple(key)


def structure_of_call(
    head: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], Structure]:
    """The arrays of a call, and the structure that gives back `(head, args, kwargs)`.

    Raises:
        TypeError: a value that is no array cannot be hashed.
    """
    arrays, structure = divide((tuple(head), tuple(args), kwargs))
    hash(structure.statics)
    return arrays, structure


def unhashable(named: Sequence[tuple[str, Any]], error: TypeError) -> TypeError:
    """The error for a call with a static value that cannot be hashed: its path is named.

    Args:
        named: the arguments with their names.
        error: what hashing raised.

    Returns:
        A better error if the value was found, or else `error`.
    """
    for root, tree in named:
        for place in places(tree):
            try:
                hash(None if is_array(place.leaf) else place.leaf)
            except TypeError:
                return ArgumentError(
                    explain(
                        "static argument",
                        "a hashable value",
                        describe(place.leaf),
                        places=[path_text(place.path, root)],
                        cure="what is no array becomes part of the program, found by its hash; "
                        "give its class __hash__ and __eq__, or register it as a pytree",
                    )
                )
    return error


class Plan:
    """How to build a result from its arrays. Compared by identity."""

    __slots__ = ("finish", "gather", "treedef", "wholes")

    def __init__(self, treedef: Any, wholes: Sequence[Whole], finish: Any):
        self.treedef = treedef
        self.wholes = wholes
        self.finish = finish
        self.gather: Callable[[Any], list[Any]] | None = None

    def build(self, arrays: list[Any]) -> PyTree:
        """The result, with these arrays."""
        if self.gather is not None:
            arrays = self.gather(arrays)
        leaves: list[Any] = []
        done = 0
        for make, start, stop in self.wholes:
            leaves += arrays[done:start]
            leaves.append(make(arrays[start:stop]))
            done = stop
        leaves += arrays[done:]
        result = self.treedef.unflatten(leaves)
        return result if self.finish is None else self.finish(result)

    def __repr__(self) -> str:
        return "result"


Whole = tuple[Callable[[list[Any]], Any], int, int]
"""A leaf of the tree above: what makes it, and from which arrays, first and past the last."""


def pack(result: PyTree) -> dict[Plan, list[Any]]:
    """Take a traced result apart: `{plan: arrays}`, for JAX to carry through the transform."""
    arrays: list[Any] = []
    wholes: list[Whole] = []
    makers: dict[int, Any] = {}

    def is_whole(node: Any) -> bool:
        make = _maker(node)
        if make is not None:
            makers[id(node)] = make
        return make is not None

    leaves, treedef = jtu.tree_flatten(result, is_leaf=is_whole)
    for leaf in leaves:
        if is_array(leaf):
            arrays.append(leaf)
            continue
        inside, make = makers[id(leaf)]
        wholes.append((make, len(arrays), len(arrays) + len(inside)))
        arrays += inside
    return {Plan(treedef, wholes, release if type(result) is Sown else None): arrays}


def pack_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[Plan, list[Any]]:
    """Call a function inside a transform, and pack what it returns."""
    return pack(reaping(fn)(*args, **kwargs))


def _maker(node: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The arrays of a node that is built as a whole, and what builds it; None for others."""
    record = record_of(node)
    if record is not None:
        early = record.early(node)
        if early is None:
            return None
        try:
            arrays, structure = structure_of(*jtu.tree_flatten(node))
        except TypeError:
            return None
        paths = container_paths(node)
        return arrays, ft.partial(make_pending, type(node), early, structure, paths)
    if isinstance(node, AbstractKeeper):
        try:
            snapshot = node.__snapshot__()
        except TypeError:
            return None
        return snapshot.arrays, ft.partial(node.__pending__(), snapshot.structure)
    if is_array(node) or is_node(node):
        return None
    return [], ft.partial(_given, node)


def _given(value: Any, arrays: list[Any]) -> Any:
    return value


def unpack(packed: Any) -> PyTree:
    """Build the result that `pack` took apart (or `grouping.group`)."""
    ((plan, arrays),) = packed.items()
    return plan.build(arrays)


def make_pending(
    cls: type, early: dict[str, Any], structure: Structure, paths: Any, arrays: list[Any]
) -> Any:
    """A record with these arrays, whose fields are built when they are read."""
    return make_record(cls, {PENDING: Snapshot(arrays, structure, (), paths), **early})
