"""The boundary between a call and JAX: arrays on one side, everything else on the other.

Every transform has these two steps:

    args    ->  split: a list of arrays for each argument, and a key  ->  JAX  ->  join  ->  fn
    result  <-  unpack                                                <-  JAX  <-  pack  <-  result

The *key* is a tuple that is equal for two calls exactly if the second may use the trace of the
first. Modules have a list of their arrays, and an interned structure, already (`tree.snapshots`),
so splitting takes as long as the list of arguments, not as the model. Transforms that keep nothing
between calls need no key: they use `divide`.

*Packing* takes the result apart while it is traced, and puts the way to build it again into a
`Plan`. The traced function returns `{plan: arrays}`: JAX keeps the keys of dicts with each trace,
so the arrays of each call come back with their plan.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, describe
from pytreemod.transform.sowing import WithSown, collecting, take_result
from pytreemod.tree import snapshots
from pytreemod.tree.nodes import is_module, is_node, is_plain_tuple, locations
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_carried, same_static
from pytreemod.tree.snapshots import AbstractState
from pytreemod.typing import PyTree, class_of, jtu

# ---- a call

Handler = Callable[[Any, list[Any]], list[Any]]
"""Appends to the key, and returns the arrays."""


def split_call(
    trees: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[list[Any]], tuple[Any, ...]]:
    """Split a call: a list of arrays for each argument, and the key of everything else."""
    key: list[Any] = []
    get: Any = handlers.get
    lists = [get(type(value), split_other)(value, key) for value in trees]
    for name in sorted(kwargs):
        key.append(name)
        value = kwargs[name]
        lists.append(get(type(value), split_other)(value, key))
    return lists, tuple(key)


def _split_array(value: Any, key: list[Any]) -> list[Any]:
    key.append("array")
    return [value]


def _split_none(value: None, key: list[Any]) -> list[Any]:
    key.append(None)
    return []


def _split_module(value: Any, key: list[Any]) -> list[Any]:
    snapshot = snapshots.snapshot_of(value)
    key.append(snapshot.structure)
    return snapshot.arrays


def _split_state(value: Any, key: list[Any]) -> list[Any]:
    snapshot = value.__snapshot__()
    key.append(snapshot.structure)
    return snapshot.arrays


def _split_sequence(value: Sequence[Any], key: list[Any]) -> list[Any]:
    key.append((class_of(value), len(value)))
    arrays: list[Any] = []
    for item in value:
        arrays += handlers.get(class_of(item), split_other)(item, key)
    return arrays


def _split_dict(value: dict[Any, Any], key: list[Any]) -> list[Any]:
    if not all(type(name) is str for name in value):
        return _split_node(value, key)
    key.append((dict, *sorted(value)))
    arrays: list[Any] = []
    for name in sorted(value):
        arrays += handlers.get(class_of(value[name]), split_other)(value[name], key)
    return arrays


def _split_node(value: Any, key: list[Any]) -> list[Any]:
    arrays, structure = snapshots.structure_of(*jtu.tree_flatten(value))
    key.append(structure)
    return arrays


def _split_static(value: Any, key: list[Any]) -> list[Any]:
    # With its type: programs distinguish 1, 1.0 and True.
    key.append((type(value), value))
    return []


def split_other(value: Any, key: list[Any]) -> list[Any]:
    """Split a value of a type that was not met before."""
    kind = class_of(value)
    if is_carried(value):
        handler = _split_array
    elif is_module(value):
        handler = _split_module
    elif issubclass(kind, AbstractState):
        handler = _split_state
    elif is_plain_tuple(value):
        handler = _split_sequence
    elif is_node(value):
        handler = _split_node
    else:
        # Not added: the table would keep the classes of all static values alive.
        return _split_static(value, key)
    handlers[kind] = handler
    return handler(value, key)


_STATIC = (bool, int, float, complex, str, bytes, type, FunctionType, BuiltinFunctionType)
_STATIC_OF_JAX = (type(jax.jit(is_carried)), jax.custom_jvp, jax.custom_vjp)
handlers: dict[type, Handler] = {
    type(None): _split_none,
    tuple: _split_sequence,
    list: _split_sequence,
    dict: _split_dict,
    np.ndarray: _split_array,
    **dict.fromkeys((*_STATIC, *_STATIC_OF_JAX), _split_static),
}
"""How to split a value, by its exact type. Types are added when they are met."""


def unhashable(named: Sequence[tuple[str, Any]], error: TypeError) -> TypeError:
    """Return the error for a call with a static value that has no hash; it names the path."""
    for root, tree in named:
        for place in locations(tree):
            try:
                hash(None if is_carried(place.leaf) else place.leaf)
            except TypeError:
                fact = "a static value has no hash, by which calls are compared"
                at = [f"{path_text(place.path, root)}: {describe(place.leaf)}"]
                hint = "frozenset(...)" if class_of(place.leaf) is set else ""
                return ArgumentError(fact, at=at, hint=hint)
    return error


# ---- a result

Part = tuple[Callable[[list[Any]], Any] | None, Any, Any]
"""A leaf of a plan's tree: how to make it, from which arrays (an index or slice), and its rest."""


class Plan:
    """How to build a result from its arrays; plans are equal if results differ only in arrays."""

    __slots__ = ("build", "hash", "order", "parts", "treedef")

    def __init__(self, treedef: Any, parts: Sequence[Part], finish: Any = None):
        self.treedef, self.parts = treedef, parts
        # For arrays in groups: the group of each, its position in that, and the axis to move to.
        self.order: tuple[tuple[int, int, int | None], ...] = ()
        self.build = _builder(treedef, parts, finish)
        # Stored, because JAX asks for it in each call.
        self.hash = hash((treedef, len(parts)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Plan)
            and self.treedef == other.treedef
            and self.order == other.order
            and len(self.parts) == len(other.parts)
            # The functions that make them are not compared: they follow from the rest.
            and all(
                i == j and same_static(what, other_what)
                for (_, i, what), (_, j, other_what) in zip(self.parts, other.parts, strict=True)
            )
        )

    def __hash__(self) -> int:
        return self.hash

    def __repr__(self) -> str:
        # JAX writes it into programs. An address in it would differ between processes, and none
        # would find its program in JAX's compilation cache.
        return "result"


def _builder(treedef: Any, parts: Sequence[Part], finish: Any) -> Callable[[Any], PyTree]:
    """A function that builds a result from its arrays; one model, or only arrays, directly."""
    makers = [make for make, _, _ in parts]
    unflatten = treedef.unflatten

    def build_all(arrays: list[Any]) -> PyTree:
        return unflatten([arrays[i] if make is None else make(arrays[i]) for make, i, _ in parts])

    build: Any = build_all if any(makers) else unflatten
    if len(makers) == 1 and jtu.treedef_is_leaf(treedef):
        build = makers[0] or build
    return build if finish is None else lambda arrays: finish(build(arrays))


def pack(result: PyTree) -> dict[Plan, list[Any]]:
    """Take a traced result apart: `{plan: arrays}`, which JAX carries through the transform."""
    arrays: list[Any] = []
    parts: list[Part] = []
    made: dict[int, Any] = {}

    def is_made(node: Any) -> bool:
        # First, because most nodes of most results are arrays.
        if node is None or is_carried(node):
            return False
        maker = _maker(node)
        if maker is not None:
            made[id(node)] = maker
        return maker is not None

    leaves, treedef = jtu.tree_flatten(result, is_leaf=is_made)
    for leaf in leaves:
        if id(leaf) not in made:
            parts.append((None, len(arrays), None))
            arrays.append(leaf)
            continue
        inside, make, what = made[id(leaf)]
        parts.append((make, slice(len(arrays), len(arrays) + len(inside)), what))
        arrays += inside
    return {Plan(treedef, parts, take_result if type(result) is WithSown else None): arrays}


def _maker(node: Any) -> tuple[list[Any], Any, Any] | None:
    """Return the arrays of a node, the function that makes it from them, and the rest of it."""
    try:
        if is_module(node):
            return snapshots.pending_maker(node)
        if isinstance(node, AbstractState):
            found = node.__snapshot__()
            return found.arrays, ft.partial(node.__pending__(), found.structure), found.structure
    except TypeError:
        return None  # A static value has no hash: JAX opens the node, and says so.
    return None if is_node(node) else ([], ft.partial(_same, node), node)


def _same(value: Any, _: list[Any]) -> Any:
    return value


def as_function_of_arrays(
    fn: Any, args: Any, kwargs: Any, counts: Callable[[Any], bool] = is_carried
) -> tuple[Callable[[list[Any]], Any], list[Any]]:
    """Return a call as a function of all its arrays, to the packed result; and these arrays."""
    arrays, structure = snapshots.divide((fn, args, kwargs), counts)

    def run(values: list[Any]) -> Any:
        # The function, too: the arrays of a Module are arguments.
        fn, args, kwargs = structure.assemble(values)
        return pack(collecting(fn)(*args, **kwargs))

    run.__name__ = run.__qualname__ = getattr(fn, "__name__", type(fn).__name__)
    return run, arrays


def unpack(packed: Any) -> PyTree:
    """Build a result after `pack`."""
    ((plan, arrays),) = packed.items()
    return plan.build(arrays)


def unpack_structs(packed: Any) -> PyTree:
    """Build a result with structs instead of arrays; Modules must not take these for arrays."""
    leaves, treedef = jtu.tree_flatten(unpack(packed))
    return treedef.unflatten(leaves)


class Grouped(NamedTuple):
    """A packed result in groups; unpacked like that of `pack`.

    JAX asks how to treat each output (its axis, its sharding) before the function runs, when the
    structure of the result is unknown. So arrays are returned in groups, one for each treatment.
    With a treatment for each group, and one instead of the plan, it is also the prefix for JAX.
    """

    plan: Any
    groups: list[Any]

    def items(self) -> list[tuple[Plan, list[Any]]]:
        """Return the plan, and the groups from which it builds the result."""
        return [(plan, self.groups) for plan in self.plan]


def pack_groups(
    result: PyTree, groups: Sequence[int], count: int, axes: Sequence[int | None] | None = None
) -> Grouped:
    """Pack a traced result in groups.

    Args:
        result: the result of the traced function.
        groups: the number of the group of each array.
        count: the number of groups.
        axes: for arrays that JAX stacks on axis 0, the axis to which each is moved then.
    """
    ((plan, arrays),) = pack(result).items()
    lists: list[list[Any]] = [[] for _ in range(count)]
    order: list[tuple[int, int, int | None]] = []
    for array, i, axis in zip(arrays, groups, axes or [None] * len(arrays), strict=True):
        order.append((i, len(lists[i]), axis))
        lists[i].append(array)
    plan.order = tuple(order)
    plan.build = ft.partial(_build_gathered, plan.build, plan.order)
    return Grouped({plan: ()}, lists)


def _build_gathered(build: Any, order: Any, lists: Any) -> PyTree:
    return build([moved(lists[i][j], axis) for i, j, axis in order])


def moved(array: Any, axis: int | None) -> Any:
    """Return an array whose axis 0 is moved to `axis`; None leaves it."""
    return jnp.moveaxis(array, 0, axis) if axis else array
