"""Steps and branches as JAX's control flow takes them: functions of flat lists of arrays.

JAX finds what it has traced and compiled by the identity of the function that it is given: one
made anew for every call would be compiled anew for every call. So what is made for a function and
for trees of one structure is kept, as long as the function lives, and those objects among the
leaves that are told apart by identity (functions, mostly): nothing that is kept keeps them alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from pytreemod.errors import ArgumentError, describe, explain
from pytreemod.transform.boundary.agreement import same_static
from pytreemod.tree.nodes import is_node
from pytreemod.tree.predicates import is_array
from pytreemod.tree.selecting import Rule
from pytreemod.tree.snapshots import Structure, static_token
from pytreemod.typing import PyTree, Tracer, class_of, jtu

MAX_KEPT = 512
"""How many are kept at most; the oldest goes."""


def _is_lent(value: Any) -> bool:
    """Whether a static value is equal to itself alone, and can be held weakly."""
    kind = class_of(value)
    if kind.__weakrefoffset__ == 0:
        return False
    return kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__


class _Loan(weakref.ref[Any]):
    """Stands for a value that is lent: equal to another of the same value."""


def lend(structure: Structure, lenders: Sequence[Structure] | None = None) -> _Lent:
    """What gives a structure, and keeps nothing alive that is lent.

    Args:
        structure: the structure.
        lenders: by whom; what they do not have is not lent. None for the structure itself.
    """
    whose = [structure] if lenders is None else lenders
    lent = {id(x) for lender in whose for x in lender.statics if _is_lent(x)}
    if not any(id(x) in lent for x in structure.statics):
        return lambda: structure
    treedef, positions = structure.treedef, structure.positions
    statics = [_Loan(x) if id(x) in lent else x for x in structure.statics]

    def give_back() -> Structure:
        return Structure(treedef, positions, tuple(x() if type(x) is _Loan else x for x in statics))

    return give_back


_Lent = Callable[[], Structure]


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
        leaves, treedef = jtu.tree_flatten(tree)
        marks = [counts(leaf) for leaf in leaves]
        positions = tuple(i for i, mark in enumerate(marks) if mark)
        statics = tuple(None if m else x for m, x in zip(marks, leaves, strict=True))
        self.values = [leaves[i] for i in positions]
        self.structure = Structure(treedef, positions, statics)
        self.lent: list[Any] = []
        try:
            self.key = treedef, positions, tuple(map(self._token, statics))
        except TypeError:
            self.key = None

    def _token(self, static: Any) -> Any:
        if _is_lent(static):
            self.lent.append(static)
            return _Loan(static)
        return class_of(static), static_token(static)


class Callee:
    """The functions that a transform was given, as data and references.

    Functions that are pytrees (Modules, bound methods) are data, so that their arrays are inputs of
    the program. The others are held weakly by whatever is kept for them: it dies with them.
    """

    __slots__ = ("lasting", "nodes", "references")

    def __init__(self, fns: Sequence[Callable[..., Any]]):
        self.nodes = tuple(fn if is_node(fn) else None for fn in fns)
        self.lasting = True
        self.references = tuple(
            self._reference(fn) for fn, node in zip(fns, self.nodes, strict=True) if node is None
        )

    def _reference(self, fn: Callable[..., Any]) -> Callable[[], Any]:
        try:
            return weakref.ref(fn)
        except TypeError:
            self.lasting = False
            return lambda: fn

    def restorer(self) -> Callable[[Sequence[Any]], list[Any]]:
        """What gives the functions back from the data: it holds no function that is no pytree."""
        missing = tuple(node is None for node in self.nodes)
        references = self.references

        def restore(nodes: Sequence[Any]) -> list[Any]:
            found = iter(references)
            return [next(found)() if m else n for m, n in zip(missing, nodes, strict=True)]

        return restore


# With what drops each of them in time.
_kept: dict[Any, tuple[Any, list[Any]]] = {}


def keep(
    callee: Callee,
    key: tuple[Any, ...],
    parts: Sequence[Parts],
    values: Sequence[Any],
    make: Callable[[], Any],
) -> Any:
    """What `make` gives, or what it gave before for the same functions and an equal key.

    Args:
        callee: the functions that it is made for.
        key: all else that it depends on; with None in it, nothing is kept.
        parts: the trees whose keys are in it.
        values: the values of this call.
        make: makes it; the result must not hold the functions, nor what the trees have lent.
    """
    if not callee.lasting or any(part is None for part in key):
        return make()
    # Nothing tells when a function inside a pytree dies. It may hold tracers, so it is not kept
    # from one trace to the next.
    if not callee.references and any(isinstance(value, Tracer) for value in values):
        return make()
    try:
        found = _kept.get((callee.references, key))
    except TypeError:
        return make()
    if found is None:
        found = make()
        _put(callee, key, [x for part in parts for x in part.lent], found)
        return found
    return found[0]


def _put(callee: Callee, key: tuple[Any, ...], lent: Sequence[Any], made: Any) -> None:
    def drop(reference: Any, kept: dict[Any, Any] = _kept) -> None:
        kept.pop(entry, None)

    references = tuple(weakref.ref(reference(), drop) for reference in callee.references)
    entry = (references, key)
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


class Frame:
    """All of a result that is not arrays, with the axes that its arrays are to be moved to.

    Frames of equal results are equal, so that JAX, which compares what it is returned, can tell.
    """

    __slots__ = ("axes", "give_back", "positions")

    def __init__(
        self,
        structure: Structure,
        axes: tuple[int, ...] = (),
        lenders: Sequence[Structure] = (),
    ):
        # JAX keeps results with its traces. What they have from the arguments is the caller's.
        self.give_back = lend(structure, lenders)
        self.positions = structure.positions or ()
        self.axes = axes

    @property
    def structure(self) -> Structure:
        """What gives the result, from its arrays."""
        return self.give_back()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Frame):
            return NotImplemented
        mine, others = self.structure, other.structure
        return (
            self.axes == other.axes
            and mine.treedef == others.treedef
            and mine.positions == others.positions
            and all(map(same_static, mine.statics, others.statics))
        )

    def __hash__(self) -> int:
        return hash((self.axes, self.positions))


class Framed:
    """A result on its way through JAX: a node whose children are its arrays."""

    __slots__ = ("arrays", "frame")

    def __init__(self, arrays: Sequence[Any], frame: Frame):
        self.arrays = tuple(arrays)
        self.frame = frame

    def build(self) -> PyTree:
        """The result, its arrays moved from axis 0 to where they belong."""
        arrays = self.arrays
        if self.frame.axes:
            arrays = [
                array if axis == 0 else jnp.moveaxis(array, 0, axis)
                for array, axis in zip(arrays, self.frame.axes, strict=True)
            ]
        return self.frame.structure.assemble(arrays)


def _flatten(framed: Framed) -> tuple[tuple[Any, ...], Frame]:
    return framed.arrays, framed.frame


def _unflatten(frame: Frame, arrays: Any) -> Framed:
    return Framed(arrays, frame)


jtu.register_pytree_node(Framed, _flatten, _unflatten)


def refuse_uncallable(where: str, fn: Any) -> None:
    """Refuse a step or a branch that cannot be called.

    Raises:
        ArgumentError: `fn` is not callable.
    """
    if not callable(fn) or isinstance(fn, Rule):
        raise ArgumentError(explain(where, "something callable", describe(fn)))


def refuse_other_than_int(where: str, value: Any) -> None:
    """Refuse an axis that is no int.

    Raises:
        ArgumentError: it is none.
    """
    if type(value) is not int:
        raise ArgumentError(explain(where, "an int", describe(value)))
