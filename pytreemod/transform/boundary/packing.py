"""The boundary between a call and JAX: a call is split into arrays and the rest, and assembled.

Every transform uses it. If nothing is cached between calls, and no key is needed, it uses `divide`
(see `tree.snapshots`):

    step(model, x)  ->  split: arrays, key  ->  jax.jit  ->  assemble  ->  user's code
    result          <-  unpack               <-  ...      <-  pack      <-  its result

Splitting walks the arguments once and returns a flat list of arrays and a key. The key is a tuple
that is equal for two calls exactly if the second may use the trace of the first. Records (Modules)
have a list of their arrays already (see `tree.snapshots`). So the walk is as long as the argument
list, not as the model.

*Packing* takes the result apart while it is traced, and stores in a `Plan` how to build it. The
traced function returns `{plan: arrays}`. JAX keeps the keys of dicts in its record of each trace,
so the right plan is returned with the arrays of each call, for any of a function's traces. No table
is needed. If JAX must know beforehand how to treat each array, they are returned in groups.
"""

from __future__ import annotations

import functools as ft
import weakref
from collections.abc import Callable, Container, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import jax
import numpy as np

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.records import set_fields
from pytreemod.transform.boundary.sowing import WithCollected, collecting, take_result
from pytreemod.tree.effects import TraceEffects
from pytreemod.tree.kinds import are_one, kind_of
from pytreemod.tree.nodes import is_node, is_plain_tuple, locations, record_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.pending import PRIVATE, Private
from pytreemod.tree.predicates import is_array, is_carried
from pytreemod.tree.snapshots import (
    AbstractState,
    Snapshot,
    Structure,
    are_one_treedef,
    container_paths,
    exact,
    node_kinds,
    snapshot_of,
    static_kind,
    structure_of,
)
from pytreemod.typing import PyTree, class_of, jtu

Handler = Callable[[Any, list[Any], list[Any]], None]


class _Word:
    """A word of the key's language."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name


_ARRAY = _Word("array")
_STATIC = _Word("static")
_NAMED = _Word("named arguments")


def _split_array(value: Any, arrays: list[Any], key: list[Any]) -> None:
    arrays.append(value)
    key.append(_ARRAY)


def _split_none(value: Any, arrays: list[Any], key: list[Any]) -> None:
    key.append(None)


def _split_record(value: Any, arrays: list[Any], key: list[Any]) -> None:
    snapshot = snapshot_of(value)
    arrays.extend(snapshot.arrays)
    key.append(snapshot.structure)


def _split_state(value: Any, arrays: list[Any], key: list[Any]) -> None:
    snapshot = value.__snapshot__()
    arrays.extend(snapshot.arrays)
    key.append(snapshot.structure)


def _split_sequence(value: Sequence[object], arrays: list[Any], key: list[Any]) -> None:
    key.append(type(value))
    key.append(len(value))
    for item in value:
        handlers.get(type(item), split_other)(item, arrays, key)


def _split_named_tuple(value: Any, arrays: list[Any], key: list[Any]) -> None:
    # With attributes it may be a node of a user's class, and the attributes are its data.
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
        # 1, 1.0 and True are one key in Python, but programs distinguish them.
        key.append(kind_of(names))
    for name in names:
        item = value[name]
        handlers.get(type(item), split_other)(item, arrays, key)


def _split_static(value: Any, arrays: list[Any], key: list[Any]) -> None:
    key.append(_STATIC)
    key.append(type(value))
    key.append(exact(value))


def _split_class(value: Any, arrays: list[Any], key: list[Any]) -> None:
    # It may be a spelling of a dtype.
    key.append(_STATIC)
    key.append(static_kind(value))
    key.append(exact(value))


def _split_function(value: Any, arrays: list[Any], key: list[Any]) -> None:
    # Equal only to itself, so it can be part of the key.
    key.append(_STATIC)
    key.append(value)


def _split_node(value: Any, arrays: list[Any], key: list[Any]) -> None:
    leaves, treedef = jtu.tree_flatten(value)
    key.append(treedef)
    key.append(node_kinds(treedef))
    for leaf in leaves:
        (_split_array if is_carried(leaf) else _split_static)(leaf, arrays, key)


def split_other(value: Any, arrays: list[Any], key: list[Any]) -> None:
    """Split a value of a new type."""
    kind = class_of(value)
    if is_carried(value):
        handlers[kind] = handler = _split_array
    elif record_of(value) is not None:
        handlers[kind] = handler = _split_record
    elif issubclass(kind, AbstractState):
        handlers[kind] = handler = _split_state
    elif is_plain_tuple(value):
        handlers[kind] = handler = _split_named_tuple
    elif is_node(value):
        # JAX's registry keeps the classes of nodes forever, so this table leaks nothing.
        handlers[kind] = handler = _split_node
    else:
        handler = _split_class
    handler(value, arrays, key)


handlers: dict[type, Handler] = {
    type(None): _split_none,
    tuple: _split_sequence,
    list: _split_sequence,
    dict: _split_dict,
    np.ndarray: _split_array,
    **dict.fromkeys((bool, int, float, complex, str, bytes), _split_static),
    type: _split_class,
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
"""How to split a value, by its exact type. Types are added when they are met."""


def split_call(
    head: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], tuple[Any, ...]]:
    """Split a call: all its arrays in one list, and the key of the rest.

    Args:
        head: values before the arguments (a function that is a pytree, or nothing).
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


def unhashable(named: Sequence[tuple[str, Any]], error: TypeError) -> TypeError:
    """Return the error for a call with a static value that cannot be hashed; it names the path.

    Args:
        named: the arguments with their names.
        error: the error that hashing raised.

    Returns:
        A better error if the value was found, or else `error`.
    """
    for root, tree in named:
        for place in locations(tree):
            try:
                hash(None if is_carried(place.leaf) else place.leaf)
            except TypeError:
                return ArgumentError(
                    "static argument",
                    "a hashable value",
                    describe(place.leaf),
                    at=[path_text(place.path, root)],
                    hint=_hashable_form(place.leaf),
                )
    return error


def _hashable_form(value: Any) -> list[str] | str:
    why = "non-array values are static, and compared by hash; "
    if isinstance(value, (set, bytearray)):
        kind = "frozenset" if isinstance(value, set) else "bytes"
        return [f"{why}this one has no hash; pass", f"{kind}(...)"]
    return f"{why}give its class __hash__ and __eq__, or register it as a pytree"


Make = Callable[[list[Any]], Any]
"""Makes one leaf of a plan's tree from its arrays."""


Part = tuple[Make | None, Any, Any]
"""A leaf of a plan's tree: the function that makes it, its arrays (a slice), and the rest of it.
An array is None, its index, and None."""


class Plan:
    """The plan that builds a result from its arrays.

    Plans are equal if their results differ only in arrays. So JAX can compare the results of the
    branches of a program.
    """

    __slots__ = ("build", "effects", "gather", "hash", "parts", "successions", "treedef")

    def __init__(self, treedef: Any, parts: Sequence[Part], finish: Any = None):
        self.treedef = treedef
        self.parts = parts
        # The effects of the trace, for a surrounding one: JAX may have cached it.
        self.effects: TraceEffects | None = None
        # Those of `filter_jit`, whose calls need more of them; see `successors`.
        self.successions: Any = None
        self.gather: Callable[[Any], list[Any]] | None = None
        # Makes the result from these arrays.
        self.build = _builder(treedef, parts, finish)
        # Stored, because JAX asks for it in each call.
        self.hash = hash((treedef, len(parts)))

    def regroup(self, gather: Callable[[Any], list[Any]]) -> None:
        """Build from groups from now on; `gather` makes the arrays from them."""
        build: Callable[[Any], Any] = self.build
        self.gather = gather
        self.build = ft.partial(_build_gathered, build, gather)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return (
            are_one_treedef(self.treedef, other.treedef)
            and self.gather == other.gather
            and len(self.parts) == len(other.parts)
            # The functions that make them are not compared: they follow from the rest.
            and all(
                i == j and are_one(what, other_what)
                for (_, i, what), (_, j, other_what) in zip(self.parts, other.parts, strict=True)
            )
        )

    def __hash__(self) -> int:
        return self.hash

    def __repr__(self) -> str:
        return "result"


def _build_gathered(build: Any, gather: Any, groups: Any) -> PyTree:
    return build(gather(groups))


def _builder(treedef: Any, parts: Sequence[Part], finish: Any) -> Callable[[Any], PyTree]:
    """A function that builds a result from its arrays; one model, or only arrays, directly."""
    makers = [make for make, _, _ in parts]
    unflatten = treedef.unflatten

    def build_all(arrays: list[Any]) -> PyTree:
        # On Python 3.11 a comprehension would be one more function call, 0.15 us.
        leaves: list[Any] = []
        for make, i, _ in parts:
            leaves.append(arrays[i] if make is None else make(arrays[i]))
        return unflatten(leaves)

    build: Any = build_all if any(makers) else unflatten
    if len(makers) == 1 and jtu.treedef_is_leaf(treedef):
        build = makers[0] or build
    return build if finish is None else lambda arrays: finish(build(arrays))


def pack(result: PyTree, weak: Container[int] = ()) -> dict[Plan, list[Any]]:
    """Take a traced result apart: `{plan: arrays}`, which JAX carries through the transform.

    Args:
        result: the result of the traced function.
        weak: the ids of static values to which the plan has weak references. JAX stores the plan as
            long as its trace.
    """
    arrays: list[Any] = []
    parts: list[Part] = []
    makers: dict[int, Any] = {}

    def is_made(node: Any) -> bool:
        # First, because most nodes of most results are arrays.
        if is_carried(node):
            return False
        maker = _maker(node, weak)
        if maker is not None:
            makers[id(node)] = maker
        return maker is not None

    leaves, treedef = jtu.tree_flatten(result, is_leaf=is_made)
    for leaf in leaves:
        maker = makers.get(id(leaf))
        # Every other leaf has a maker.
        if maker is None:
            parts.append((None, len(arrays), None))
            arrays.append(leaf)
            continue
        inside, make, what = maker
        parts.append((make, slice(len(arrays), len(arrays) + len(inside)), what))
        arrays += inside
    return {Plan(treedef, parts, take_result if type(result) is WithCollected else None): arrays}


def pack_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[Plan, list[Any]]:
    """Call a function inside a transform, and pack its result."""
    return pack(collecting(fn)(*args, **kwargs))


def _maker(node: Any, weak: Container[int]) -> tuple[list[Any], Make, Any] | None:
    """Return the function that makes a node from its arrays, and the rest of the node."""
    record = record_of(node)
    if record is not None:
        early = record.early(node)
        if early is None:
            return None
        try:
            arrays, structure = structure_of(*jtu.tree_flatten(node))
        except TypeError:
            return None
        if _has(structure, weak):
            return None
        return (
            arrays,
            _pending_maker(class_of(node), early, structure, container_paths(node)),
            structure,
        )
    if isinstance(node, AbstractState):
        try:
            snapshot = node.__snapshot__()
        except TypeError:
            return None
        structure = snapshot.structure
        if _has(structure, weak):
            return None
        return snapshot.arrays, ft.partial(node.__pending__(), structure), structure
    if is_node(node):
        return None
    if id(node) not in weak:
        return [], lambda _: node, node
    reference = weakref.ref(node)
    return [], lambda _: reference(), reference


def _pending_maker(cls: type, early: dict[str, Any], structure: Structure, paths: Any) -> Make:
    """A function that makes records from arrays; their fields are built when they are read."""
    new: Any = object.__new__
    layout = early[PRIVATE]

    def make(arrays: list[Any]) -> Any:
        # `make_record`, written out: one function call less for each model in a result.
        made = new(cls)
        set_fields(
            made, {**early, PRIVATE: Private(layout, Snapshot(arrays, structure, (), paths))}
        )
        return made

    return make


def _has(structure: Structure, weak: Container[int]) -> bool:
    """Whether a structure has a weak value, so that it cannot be stored."""
    return bool(weak) and any(id(static) in weak for static in structure.statics)


def unpack(packed: Any) -> PyTree:
    """Build a result after `pack` or `group`."""
    ((plan, arrays),) = packed.items()
    if plan.effects is not None:
        plan.effects.record()
    return plan.build(arrays)


def unpack_structs(packed: Any) -> PyTree:
    """Build a result with structs instead of arrays.

    JAX builds it: records that `unpack` makes would have structs as arrays, and a transform would
    treat them as arrays.
    """
    leaves, treedef = jtu.tree_flatten(unpack(packed))
    return treedef.unflatten(leaves)


class Grouped(NamedTuple):
    """A packed result in groups; unpacked like that of `pack`.

    JAX's transforms need to know the treatment of each output before the function runs: the axis to
    stack it on, or its sharding. But only the run shows the result of a function of any trees. So a
    traced function returns its arrays in groups, one for each treatment that the spec can name.
    These are known beforehand. The plan records the group of each array.

    With a tree of treatments instead of `groups`, and None instead of `plan`, it is also the prefix
    for JAX.
    """

    plan: dict[Plan, Any] | None
    groups: list[Any]

    def items(self) -> list[tuple[Plan, list[Any]]]:
        """Return the plan, and the groups from which it builds the result."""
        return [(plan, self.groups) for plan in self.plan or ()]


def group(
    result: PyTree,
    positions: Sequence[int],
    count: int,
    finish: Callable[[list[Any]], list[Any]] | None = None,
) -> Grouped:
    """Pack a traced result in groups.

    Args:
        result: the result of the traced function.
        positions: the number of the group of each array.
        count: the number of groups.
        finish: changes the arrays after the transform, before the result is built.
    """
    ((plan, arrays),) = pack(result).items()
    groups: list[list[Any]] = [[] for _ in range(count)]
    targets: list[tuple[int, int]] = []
    for array, position in zip(arrays, positions, strict=True):
        targets.append((position, len(groups[position])))
        groups[position].append(array)

    def gather(groups: Sequence[Any]) -> list[Any]:
        arrays = [groups[position][i] for position, i in targets]
        return arrays if finish is None else finish(arrays)

    plan.regroup(gather)
    return Grouped({plan: []}, groups)
