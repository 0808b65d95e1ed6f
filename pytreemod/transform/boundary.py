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

from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import jax
import numpy as np

from pytreemod.errors import ArgumentError, describe, explain
from pytreemod.module.records import make_record
from pytreemod.transform.sowing import Sown, release
from pytreemod.tree.nodes import is_node, is_plain_tuple, places, record_of, stop_below
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

    __slots__ = ("build",)

    def __init__(self, build: Callable[[Sequence[Any]], Any]):
        self.build = build

    def __repr__(self) -> str:
        return "result"


def pack(result: PyTree) -> dict[Plan, list[Any]]:
    """Take a traced result apart: `{plan: arrays}`, for JAX to carry through the transform."""
    writer = _PlanWriter()
    expression = writer.write(result)
    if type(result) is Sown:
        expression = f"{writer.constant(release)}({expression})"
    return {Plan(writer.compile(expression)): writer.arrays}


def unpack(packed: Any) -> PyTree:
    """Build the result that `pack` took apart (or `grouping.group`)."""
    ((plan, arrays),) = packed.items()
    return plan.build(arrays)


def make_pending(
    cls: type, early: dict[str, Any], structure: Structure, paths: Any, arrays: list[Any]
) -> Any:
    """A record with these arrays, whose fields are built when they are read."""
    return make_record(cls, {PENDING: Snapshot(arrays, structure, (), paths), **early})


# Python's parser gives up on expressions nested much deeper.
MAX_DEPTH = 30

_TEXT = -1

_Opened = tuple[str, Sequence[Any], str]
"""What stands before the expressions of a node's children, the children, and what stands after."""


class _PlanWriter:
    """Writes the expression that builds a result; `o` is the list of its arrays."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self.scope: dict[str, Any] = {"pending": make_pending}

    def compile(self, expression: str) -> Callable[[Sequence[Any]], Any]:
        return eval(
            compile(f"lambda o: {expression}", "<generated for a result>", "eval"), self.scope
        )

    def constant(self, value: Any) -> str:
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name

    def write(self, root: Any) -> str:
        """The expression that builds `root`."""
        pieces: list[str] = []
        # What is still to be written, the next last: text, or a node at some depth. Not a
        # recursion: what Python's stack holds here is missing where JAX takes deep trees apart.
        waiting: list[tuple[int, Any]] = [(0, root)]
        while waiting:
            depth, node = waiting.pop()
            if depth == _TEXT:
                pieces.append(node)
                continue
            opening, children, closing = self._open(node, depth)
            pieces.append(opening)
            waiting.append((_TEXT, closing))
            for child in reversed(children):
                waiting += [(_TEXT, ", "), (depth + 1, child)]
        return "".join(pieces)

    def _open(self, node: Any, depth: int) -> _Opened:
        """The expression for `node`, around those for its children."""
        if depth >= MAX_DEPTH:
            return self.write_whole(node), (), ""
        if is_array(node):
            self.arrays.append(node)
            return f"o[{len(self.arrays) - 1}]", (), ""
        if node is None:
            return "None", (), ""
        kind = class_of(node)
        if kind is tuple:
            return "(", node, ")"
        if kind is list:
            return "[", node, "]"
        if record_of(node) is not None:
            return self.write_record(node)
        if isinstance(node, AbstractKeeper):
            return self.write_keeper(node)
        if not is_node(node):
            return self.constant(node), (), ""
        return self.write_node(node)

    def write_record(self, node: Any) -> _Opened:
        """A node that is built when it is read, with all that is below it."""
        record = record_of(node)
        early = None if record is None else record.early(node)
        if early is None:
            return self.write_node(node)
        leaves, treedef = jtu.tree_flatten(node)
        try:
            arrays, structure = structure_of(leaves, treedef)
        except TypeError:
            return self.write_node(node)
        start = len(self.arrays)
        self.arrays += arrays
        fixed = self.constant((type(node), early, structure, container_paths(node)))
        return f"pending(*{fixed}, o[{start}:{len(self.arrays)}])", (), ""

    def write_keeper(self, node: AbstractKeeper) -> _Opened:
        """A node that keeps its snapshot, with all that is below it."""
        try:
            snapshot = node.__snapshot__()
        except TypeError:
            return self.write_node(node)
        start = len(self.arrays)
        self.arrays += snapshot.arrays
        make, structure = self.constant(node.__pending__()), self.constant(snapshot.structure)
        return f"{make}({structure}, o[{start}:{len(self.arrays)}])", (), ""

    def write_whole(self, node: Any) -> str:
        """A node with all that is below it, put together by JAX."""
        arrays, structure = divide(node)
        start = len(self.arrays)
        self.arrays += arrays
        return f"{self.constant(structure.assemble)}(o[{start}:{len(self.arrays)}])"

    def write_node(self, node: Any) -> _Opened:
        """A node of another kind: its children by expression, put together by JAX."""
        children, treedef = jtu.tree_flatten(node, is_leaf=stop_below(node))
        return f"{self.constant(treedef.unflatten)}((", children, "))"
