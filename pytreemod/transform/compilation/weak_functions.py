"""Tables of objects that transforms make for functions, without keeping the functions alive.

JAX finds traces and programs by the identity of the function it gets. A new function in every call
would be compiled in every call. So the objects made for functions and trees of one structure are
cached (`cached`). In their key, objects that equal only themselves (mostly functions) are weak
references. An entry is removed when the first of these objects is deleted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

from pytreemod.tree.nodes import is_node
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import Structure, divide, exact, node_kinds, static_kind
from pytreemod.typing import PyTree, Tracer, class_of, jtu

MAX_STEPS = 512
"""The largest number of entries for steps and branches, which may be new in each call."""


class WeakTable:
    """A table whose entries are removed together with the objects they are for.

    Args:
        limit: the largest number of entries; the oldest is removed.
    """

    __slots__ = ("entries", "limit")

    def __init__(self, limit: int | None = None):
        self.limit = limit
        # With the references that remove each entry in time.
        self.entries: dict[Any, tuple[Any, list[Any]]] = {}

    def find(self, key: Any, objects: Sequence[Any], make: Callable[[], Any]) -> Any:
        """Return the result of `make`, or its earlier result for the same key.

        Args:
            key: may refer to the objects only weakly.
            objects: the objects whose deletion removes the entry.
            make: makes the result, which must not refer to the objects.

        Raises:
            TypeError: if the key has no hash.
        """
        entries = self.entries
        found = entries.get(key)
        if found is None:

            def drop(reference: Any) -> None:
                entries.pop(key, None)

            while self.limit is not None and len(entries) >= self.limit:
                # A list, because another thread may add something meanwhile.
                entries.pop(next(iter([*entries]), None), None)
            references = [weakref.ref(value, drop) for value in objects]
            # If two threads arrive together, the second takes the object of the first.
            found = entries.setdefault(key, (make(), references))
        return found[0]


def _is_weak(value: Any) -> bool:
    """Whether a static value equals only itself, and supports weak references."""
    kind = class_of(value)
    own = kind.__eq__ is not object.__eq__ or kind.__hash__ is not object.__hash__
    return not own and kind.__weakrefoffset__ != 0


def _is_weak_function(value: Any) -> bool:
    # Each access makes a new bound method, and these are equal.
    return _is_weak(value) or (callable(value) and class_of(value).__weakrefoffset__ != 0)


class Parts:
    """A tree taken apart: the values that JAX computes with, and everything else.

    Attributes:
        values: arrays, and other leaves that count as values.
        structure: builds the tree from values like these.
        key: equal for trees that differ only in values; None if that cannot be known.
        weak: the objects to which the key has weak references.
        ids: their ids.
    """

    __slots__ = ("ids", "key", "structure", "values", "weak")

    def __init__(
        self,
        tree: PyTree,
        counts: Callable[[Any], bool] = is_array,
        is_weak: Callable[[Any], bool] = _is_weak,
    ):
        self.values, self.structure = divide(tree, counts)
        self.weak = [x for x in self.structure.statics if x is not None and is_weak(x)]
        self.ids = set(map(id, self.weak))
        self.key = _key_of(self.structure, self.ids)

    def weakly(self) -> Callable[[], Structure]:
        """A function that returns the structure, and keeps none of the weak objects alive."""
        return weakly(self.structure, self.ids)


def functions(fns: Sequence[Callable[..., Any]]) -> Parts:
    """Return the functions of a transform, taken apart.

    Those that are pytrees (Modules, bound methods) are data, so their arrays are inputs of the
    program. The others are weak.
    """
    parts = Parts(tuple(fns), is_weak=_is_weak_function)
    # A cache entry for a value without a weak reference would keep it alive forever.
    if not all(is_node(fn) or id(fn) in parts.ids for fn in fns):
        parts.key = None
    return parts


# Weak references are equal as long as their objects exist. Afterwards each equals only itself, so
# that nothing is found by it.
class _Weak(weakref.ref[Any]):
    """Replaces a weak value: equal to another for the same value."""


def _key_of(structure: Structure, weak: Container[int]) -> tuple[Any, ...] | None:
    try:
        # (None marks the values; their positions are known.)
        tokens = tuple(
            [
                _Weak(x) if id(x) in weak else (static_kind(x), exact(x))
                for x in structure.statics
                if x is not None
            ]
        )
    except TypeError:
        return None
    return structure.treedef, structure.positions, tokens, node_kinds(structure.treedef)


def weakly(structure: Structure, ids: Container[int]) -> Callable[[], Structure]:
    """A function that returns a structure, and does not keep the statics of these ids alive."""
    # Most have none, so the structure itself can be stored.
    if not ids or not any(id(x) in ids for x in structure.statics):
        return lambda: structure
    treedef, positions = structure.treedef, structure.positions
    statics = [_Weak(x) if id(x) in ids else x for x in structure.statics]

    def give() -> Structure:
        return Structure(treedef, positions, tuple(x() if type(x) is _Weak else x for x in statics))

    return give


def weak_ids(*parts: Parts) -> Callable[[], set[int]]:
    """A function that returns the ids of those weak objects of some trees that still exist."""
    references = [_Weak(x) for part in parts for x in part.weak]

    def ids() -> set[int]:
        return {id(x) for x in (reference() for reference in references) if x is not None}

    return ids


_steps = WeakTable(MAX_STEPS)


def cached(
    key: tuple[Any, ...], fns: Parts, parts: Sequence[Parts], make: Callable[[], Any]
) -> Any:
    """Return the result of `make`, or its earlier result for the same functions and equal keys.

    Args:
        key: everything it depends on besides the functions and trees.
        fns: the functions it is made for.
        parts: the trees it is made for. If one has no key, nothing is cached.
        make: makes the result, which must not refer to the functions or the weak parts of trees.
    """
    parts = [fns, *parts]
    keys = [part.key for part in parts]
    # Nothing reports the deletion of a function inside a pytree. It may contain tracers, so
    # nothing is cached for it from one trace to the next.
    is_traced = not fns.weak and any(isinstance(x, Tracer) for part in parts for x in part.values)
    if None in keys or is_traced:
        return make()
    try:
        return _steps.find((key, *keys), [x for part in parts for x in part.weak], make)
    except TypeError:
        return make()


def forget_steps() -> None:
    """Forget the cache of steps and branches."""
    _steps.entries.clear()


def spec_key(spec: Any) -> Any:
    """Return the key of a spec: a tree of hashable things."""
    leaves, treedef = jtu.tree_flatten(spec, is_leaf=_is_none)
    return treedef, tuple(leaves)


def _is_none(value: Any) -> bool:
    return value is None
