"""What is kept of steps and branches from one call to the next.

JAX finds what it has traced and compiled by the identity of the function that it is given: one
made anew for every call would be compiled anew for every call. So what is made for a function and
for trees of one structure is kept, as long as the function lives, and those objects among the
leaves that are told apart by identity (functions, mostly): nothing that is kept keeps them alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

from pytreemod.tree.nodes import is_node
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import Structure, divide, exact, node_kinds, static_kind
from pytreemod.typing import PyTree, Tracer, class_of, jtu

MAX_KEPT = 512
"""How many are kept at most; the oldest goes."""


class Parts:
    """A tree taken apart: the values that JAX computes with, and the rest.

    Attributes:
        values: arrays, and whatever else was counted as a value.
        structure: gives the tree back, from values like these.
        key: equal for trees that differ in nothing but values; None if that cannot be told.
        lent: what is in the key, and is not kept alive by it.
    """

    __slots__ = ("key", "lent", "structure", "values")

    def __init__(self, tree: PyTree, counts: Callable[[Any], bool] = is_array):
        self.values, self.structure = divide(tree, counts)
        self.lent = [x for x in self.structure.statics if x is not None and _is_lent(x)]
        self.key = _key_of(self.structure)

    def lend(self) -> Lent:
        """What gives the structure, and keeps nothing alive that is lent."""
        return lend(self.structure, set(map(id, self.lent)))


class Callee(Parts):
    """The functions that a transform was given, as data and references.

    Attributes:
        lasting: whether what is made for them may be kept at all.
        references: what gives those that are no pytrees, as long as they are there.

    Functions that are pytrees (Modules, bound methods) are data, so that their arrays are inputs of
    the program. The others are held weakly by whatever is kept for them: it dies with them.
    """

    __slots__ = ("lasting", "references")

    def __init__(self, fns: Sequence[Callable[..., Any]], *, lasting: bool = True):
        # None, a node without leaves, keeps the place of one that is referred to.
        super().__init__(tuple(fn if is_node(fn) else None for fn in fns))
        self.lasting = lasting
        self.references = tuple(self._reference(fn) for fn in fns if not is_node(fn))

    def _reference(self, fn: Callable[..., Any]) -> Callable[[], Any]:
        try:
            return weakref.ref(fn)
        except TypeError:
            # To keep something for it would be to keep it, for good.
            self.lasting = False
            return lambda: fn

    def restorer(self) -> Callable[[Sequence[Any]], list[Any]]:
        """What gives the functions back from the values: it holds none that is no pytree."""
        references, structure_of = self.references, self.lend()

        def restore(values: Sequence[Any]) -> list[Any]:
            found = iter(references)
            nodes = structure_of().assemble(values)
            return [next(found)() if node is None else node for node in nodes]

        return restore


def _is_lent(value: Any) -> bool:
    """Whether a static value is equal to itself alone, and can be held weakly."""
    kind = class_of(value)
    own = kind.__eq__ is not object.__eq__ or kind.__hash__ is not object.__hash__
    return not own and kind.__weakrefoffset__ != 0


# Weak references are equal as long as what they refer to is there; then each is equal to itself
# alone, so that nothing that is kept can be found by it.
class _Loan(weakref.ref[Any]):
    """Stands for a value that is lent: equal to another of the same value."""


def _key_of(structure: Structure) -> tuple[Any, ...] | None:
    try:
        # What is lent is told apart by identity, which a reference can do as well. (None is where
        # the values are, which the positions say.)
        tokens = tuple(
            [
                _Loan(x) if _is_lent(x) else (static_kind(x), exact(x))
                for x in structure.statics
                if x is not None
            ]
        )
    except TypeError:
        return None
    return structure.treedef, structure.positions, tokens, node_kinds(structure.treedef)


Lent = Callable[[], Structure]


def lend(structure: Structure, lent: Container[int]) -> Lent:
    """What gives a structure, and keeps nothing alive that is lent.

    Args:
        structure: the structure.
        lent: the ids of what is lent.
    """
    # Mostly nothing is lent: then the structure itself is what is kept.
    if not lent or not any(id(x) in lent for x in structure.statics):
        return lambda: structure
    treedef, positions = structure.treedef, structure.positions
    statics = [_Loan(x) if id(x) in lent else x for x in structure.statics]

    def give_back() -> Structure:
        return Structure(treedef, positions, tuple(x() if type(x) is _Loan else x for x in statics))

    return give_back


def lent_by(*parts: Parts) -> Callable[[], set[int]]:
    """What gives the ids of what trees have lent, as far as it is there; it keeps none alive."""
    loans = [_Loan(x) for part in parts for x in part.lent]

    def ids() -> set[int]:
        return {id(x) for x in (loan() for loan in loans) if x is not None}

    return ids


# With what drops each of them in time.
_kept: dict[Any, tuple[Any, list[Any]]] = {}


def keep(
    key: tuple[Any, ...], callee: Callee, parts: Sequence[Parts], make: Callable[[], Any]
) -> Any:
    """What `make` gives, or what it gave before for the same functions and equal keys.

    Args:
        key: all that it depends on besides the functions and trees.
        callee: the functions that it is made for.
        parts: the trees that it is made for. If one has no key, nothing is kept.
        make: makes it; the result must not hold the functions, nor what the trees have lent.
    """
    parts = [callee, *parts]
    keys = [part.key for part in parts]
    if not callee.lasting or None in keys:
        return make()
    # Nothing tells when a function inside a pytree dies. It may hold tracers, so it is not kept
    # from one trace to the next.
    values = (value for part in parts for value in part.values)
    if not callee.references and any(isinstance(value, Tracer) for value in values):
        return make()
    key = (*key, *keys)
    try:
        # By references, which have the hash and the equality of what they refer to.
        found = _kept.get((callee.references, key))
    except TypeError:
        return make()
    if found is None:
        found = make()
        _put(callee, key, [x for part in parts for x in part.lent], found)
        return found
    return found[0]


def _put(callee: Callee, key: tuple[Any, ...], lent: Sequence[Any], made: Any) -> None:
    # The dict as a default: at exit, the file's own names may be gone before the last reference.
    def drop(reference: Any, kept: dict[Any, Any] = _kept) -> None:
        kept.pop(entry, None)

    # New ones, equal to those of the callee; these take what is kept away in time.
    references = tuple(weakref.ref(reference(), drop) for reference in callee.references)
    entry = (references, key)
    # Steps written inline are new functions at each call: without a bound they would pile up until
    # they die.
    while len(_kept) >= MAX_KEPT:
        # A list, for another thread may put something in between.
        _kept.pop(next(iter(list(_kept)), None), None)
    _kept[entry] = made, [weakref.ref(value, drop) for value in lent]


def forget() -> None:
    """Forget everything that is kept."""
    _kept.clear()


def spec_key(spec: Any) -> Any:
    """What stands for a spec, a tree of hashable things, in a key."""
    leaves, treedef = jtu.tree_flatten(spec, is_leaf=_is_none)
    return treedef, tuple(leaves)


def _is_none(value: Any) -> bool:
    return value is None
