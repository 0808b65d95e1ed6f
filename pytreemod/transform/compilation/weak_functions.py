"""Tables of what transforms make for functions: nothing in them keeps the functions alive.

JAX finds what it has traced and compiled by the identity of the function that it is given: one
made anew for every call would be compiled anew for every call. So what is made for functions and
trees of one structure is cached (`cached`), and found by a key in which those objects that are
equal to themselves alone (functions, mostly) are weak references. The entry goes with the first of
them.
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
"""How many entries there are at most for steps and branches, which may be new in each call."""


class WeakTable:
    """A table of which each entry goes with the objects that it is for.

    Args:
        limit: how many entries there are at most; the oldest goes.
    """

    __slots__ = ("entries", "limit")

    def __init__(self, limit: int | None = None):
        self.limit = limit
        # With the references that remove each of them in time.
        self.entries: dict[Any, tuple[Any, list[Any]]] = {}

    def find(self, key: Any, objects: Sequence[Any], make: Callable[[], Any]) -> Any:
        """What `make` gives, or what it gave before for the same key.

        Args:
            key: has references to the objects, if anything of them.
            objects: what the entry goes with.
            make: makes it; the result must not hold the objects.

        Raises:
            TypeError: the key has no hash.
        """
        entries = self.entries
        found = entries.get(key)
        if found is None:

            def drop(reference: Any) -> None:
                entries.pop(key, None)

            while self.limit is not None and len(entries) >= self.limit:
                # A list, for another thread may add something in between.
                entries.pop(next(iter([*entries]), None), None)
            references = [weakref.ref(value, drop) for value in objects]
            # Of two threads, the second takes what the first has made.
            found = entries.setdefault(key, (make(), references))
        return found[0]


def _is_weak(value: Any) -> bool:
    """Whether a static value is equal to itself alone, and there are weak references to it."""
    kind = class_of(value)
    own = kind.__eq__ is not object.__eq__ or kind.__hash__ is not object.__hash__
    return not own and kind.__weakrefoffset__ != 0


def _is_weak_function(value: Any) -> bool:
    # Bound methods, which are made anew at each access, are equal to others.
    return _is_weak(value) or (callable(value) and class_of(value).__weakrefoffset__ != 0)


class Parts:
    """A tree taken apart: the values that JAX computes with, and the rest.

    Attributes:
        values: arrays, and whatever else was counted as a value.
        structure: gives the tree back, from values like these.
        key: equal for trees that differ in nothing but values; None if that cannot be known.
        weak: the objects to which the key has weak references.
        ids: theirs.
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
        """What gives the structure, and keeps none of the weak objects alive."""
        return weakly(self.structure, self.ids)


def functions(fns: Sequence[Callable[..., Any]]) -> Parts:
    """The functions that a transform was given, taken apart.

    Those that are pytrees (Modules, bound methods) are data, so that their arrays are inputs of
    the program. The others are weak.
    """
    parts = Parts(tuple(fns), is_weak=_is_weak_function)
    # To cache something for what cannot be weak would keep it alive for ever.
    if not all(is_node(fn) or id(fn) in parts.ids for fn in fns):
        parts.key = None
    return parts


# Weak references are equal as long as what they refer to is there; then each is equal to itself
# alone, so that nothing can be found by it.
class _Weak(weakref.ref[Any]):
    """Instead of a value that is weak: equal to another of the same value."""


def _key_of(structure: Structure, weak: Container[int]) -> tuple[Any, ...] | None:
    try:
        # (None is where the values are, which the positions say.)
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
    """What gives a structure, and does not keep alive the statics of these ids."""
    # Mostly there is none: then the structure itself can be stored.
    if not ids or not any(id(x) in ids for x in structure.statics):
        return lambda: structure
    treedef, positions = structure.treedef, structure.positions
    statics = [_Weak(x) if id(x) in ids else x for x in structure.statics]

    def give() -> Structure:
        return Structure(treedef, positions, tuple(x() if type(x) is _Weak else x for x in statics))

    return give


def weak_ids(*parts: Parts) -> Callable[[], set[int]]:
    """What gives the ids of the weak objects of some trees, as far as they are there."""
    references = [_Weak(x) for part in parts for x in part.weak]

    def ids() -> set[int]:
        return {id(x) for x in (reference() for reference in references) if x is not None}

    return ids


_steps = WeakTable(MAX_STEPS)


def cached(
    key: tuple[Any, ...], fns: Parts, parts: Sequence[Parts], make: Callable[[], Any]
) -> Any:
    """What `make` gives, or what it gave before for the same functions and equal keys.

    Args:
        key: all that it depends on besides the functions and trees.
        fns: the functions that it is made for.
        parts: the trees that it is made for. If one has no key, nothing is cached.
        make: makes it; the result must not hold the functions, nor what is weak in the trees.
    """
    parts = [fns, *parts]
    keys = [part.key for part in parts]
    # Nothing says when a function inside a pytree dies. It may hold tracers, so nothing is cached
    # for it from one trace to the next.
    is_traced = not fns.weak and any(isinstance(x, Tracer) for part in parts for x in part.values)
    if None in keys or is_traced:
        return make()
    try:
        return _steps.find((key, *keys), [x for part in parts for x in part.weak], make)
    except TypeError:
        return make()


def forget_steps() -> None:
    """Forget what is cached for steps and branches."""
    _steps.entries.clear()


def spec_key(spec: Any) -> Any:
    """What a key has for a spec, a tree of hashable things."""
    leaves, treedef = jtu.tree_flatten(spec, is_leaf=_is_none)
    return treedef, tuple(leaves)


def _is_none(value: Any) -> bool:
    return value is None
