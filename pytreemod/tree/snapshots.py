"""The arrays of a Module as one flat list, cached with the instance.

A Module never changes, so flattening it always gives the same result, and the second call with
the same model need not flatten it again. Only containers of other kinds inside it could have
changed: lists and dicts are stored with their contents, and compared, element by element, by
identity, before a snapshot is used again. A tree with nodes of unknown kinds is never cached.

An instance that a transform returns has its snapshot from the start, and nothing else: its nodes
are built when a field is read (see `instances`).
"""

from __future__ import annotations

import atexit
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from operator import is_
from typing import Any

import jax
import numpy as np

from pytreemod.tree.instances import get_cached, is_finished, is_module, set_cached
from pytreemod.tree.nodes import is_node, is_plain_tuple
from pytreemod.tree.predicates import is_array, is_carried, same_static
from pytreemod.typing import PyTree, class_of, jtu


class Structure:
    """A tree without its arrays.

    `structure_of` returns the same object for equal trees: comparing two of them, and hashing one,
    costs nothing. `divide` returns a new object each time.
    """

    __slots__ = ("__weakref__", "count", "positions", "statics", "treedef")

    def __init__(self, treedef: Any, positions: tuple[int, ...] | None, statics: tuple[Any, ...]):
        self.treedef, self.positions, self.statics = treedef, positions, statics
        self.count = treedef.num_leaves if positions is None else len(positions)

    @property
    def key(self) -> Any:
        """A hashable value that is equal for equal structures, also if they are not one object.

        Raises:
            TypeError: if a static value cannot be hashed.
        """
        return self.treedef, self.positions, _with_types(self.statics)

    def assemble(self, arrays: Sequence[Any]) -> PyTree:
        """Build the tree from its arrays."""
        # In most models every leaf is an array, and there are no values to insert.
        if self.positions is None:
            return self.treedef.unflatten(arrays)
        leaves = list(self.statics)
        for position, array in zip(self.positions, arrays, strict=True):
            leaves[position] = array
        return self.treedef.unflatten(leaves)

    def matches(self, other: Structure) -> bool:
        """Whether another structure equals this one, even if they cannot be hashed."""
        return self is other or (
            self.treedef == other.treedef
            and self.positions == other.positions
            and all(map(same_static, self.statics, other.statics))
        )

    def place(self, values: Sequence[Any], rest: Any = None) -> PyTree:
        """A tree of this structure with a value for each array, and `rest` for all other leaves."""
        others = (rest,) * self.treedef.num_leaves
        return Structure(self.treedef, self.positions, others).assemble(values)


def divide(
    tree: PyTree, counts: Callable[[Any], bool] | Sequence[bool] = is_array
) -> tuple[list[Any], Structure]:
    """Split a tree into its values and a new structure; nothing need be hashable.

    Args:
        tree: any tree.
        counts: a function that says whether a leaf is a value, or a bool for each leaf; all other
            leaves belong to the structure.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    marks = [counts(leaf) for leaf in leaves] if callable(counts) else counts
    arrays, positions, statics = _divided(leaves, marks)
    return arrays, Structure(treedef, positions, statics)


def _divided(leaves: Sequence[Any], marks: Sequence[bool]) -> tuple[list[Any], Any, Any]:
    """Return the marked leaves, their positions, and the other leaves, with None between them."""
    # From a list: a generator would add a call for each leaf.
    positions = tuple([i for i, mark in enumerate(marks) if mark])
    statics = tuple([None if mark else leaf for mark, leaf in zip(marks, leaves, strict=True)])
    return [leaves[i] for i in positions], positions, statics


# Weak: a structure lives as long as a tree, or a compiled function, that has it.
_structures: weakref.WeakValueDictionary[Any, Structure] = weakref.WeakValueDictionary()
# When Python exits, removing a structure would compare it with others. That would fail, with a
# printed error, because the modules that it needs are gone.
atexit.register(_structures.clear)
# Reentrant: the lock is held while static values are compared, by code that may flatten a tree.
_interning = threading.RLock()


def _with_types(statics: Sequence[Any]) -> tuple[Any, ...]:
    """Return static values as part of a key, in which 1, 1.0 and True differ."""
    return tuple([(class_of(value), value) for value in statics])


def structure_of(leaves: Sequence[Any], treedef: Any) -> tuple[list[Any], Structure]:
    """Divide flattened leaves into arrays and the structure, which contains everything else.

    Args:
        leaves: as JAX gives them.
        treedef: their tree.

    Raises:
        TypeError: if a non-array leaf cannot be hashed.
    """
    marks = [is_carried(leaf) for leaf in leaves]
    arrays, positions, statics = (list(leaves), None, ()) if all(marks) else _divided(leaves, marks)
    key = (treedef, positions, _with_types(statics))
    structure = _structures.get(key)
    if structure is None:
        # Two threads may both get here, and must agree; `setdefault` of such a dictionary is not
        # atomic.
        with _interning:
            structure = _structures.setdefault(key, Structure(treedef, positions, statics))
    return arrays, structure


class AbstractState:
    """A node that is no Module, but never changes either, and caches its own snapshot."""

    __slots__ = ()

    # Its snapshot, if it is cached; no method, which each jitted call would have to call.
    __cached_snapshot__: Snapshot | None

    # Return its arrays and structure; TypeError if a non-array leaf cannot be hashed.
    __snapshot__: Callable[[], Snapshot]

    # Return a function `(structure, arrays) -> node` that makes one like this, pending.
    __pending__: Callable[[], Any]

    # Whether it may still be flattened.
    __usable__: Callable[[], bool]

    # Return its values by identity; also those of a used State.
    __values__: Callable[[], Mapping[Any, PyTree]]

    # The identities of the values that were replaced: all, of a State that was used up.
    __replaced__: Callable[[], Set[Any]]

    # Note the values that a copy has replaced, which a transform made for its function.
    __note_copy__: Callable[[Any], None]

    # The names of the random streams that were drawn from until a later State.
    __drawn__: Callable[[Any], list[str]]


# Its `mark` is an object for the last moment at which any State was used up. A transform compares
# it before and after a call: most calls use none up.
last_use = types.SimpleNamespace(mark=object())


def is_state(node: Any) -> bool:
    """Whether a node of a tree is a State."""
    return isinstance(node, AbstractState)


def states_in(tree: PyTree) -> list[AbstractState]:
    """Return the States in a tree, including those that were used up."""
    # Treat them as leaves: a used State refuses to be flattened.
    return [leaf for leaf in jtu.tree_leaves(tree, is_leaf=is_state) if is_state(leaf)]


# Objects that could have changed, each with its contents (see `_contents`).
Containers = tuple[tuple[Any, tuple[Any, ...]], ...]


class Snapshot:
    """The arrays of a Module or a State as one list, and the rest of it.

    Args:
        arrays: of the whole tree.
        structure: the tree without them.
        containers: what must not have changed; None for what a transform returned and nobody has
            read.
    """

    __slots__ = ("arrays", "containers", "structure")

    def __init__(self, arrays: list[Any], structure: Structure, containers: Containers | None = ()):
        self.arrays, self.structure, self.containers = arrays, structure, containers

    def assemble(self) -> Any:
        """Build the tree."""
        return self.structure.assemble(self.arrays)

    def is_current(self) -> bool:
        """Whether the stored containers still have the same contents."""
        for container, old in self.containers or ():
            now = _contents(container)
            # By identity: `==` would call the user's code, and wait for arrays.
            if len(now) != len(old) or not all(map(is_, now, old)):
                return False
        return True


def snapshot_of(node: Any) -> Snapshot:
    """Return the snapshot of a Module: the cached one if it is still valid, or a new one.

    Raises:
        TypeError: if a non-array leaf cannot be hashed.
    """
    try:
        cached: Snapshot | None = get_cached(node)
    except AttributeError:
        cached = None
    if cached is not None and (not cached.containers or cached.is_current()):
        return cached
    snapshot, is_cached = take_snapshot(node)
    if is_cached:
        set_cached(node, snapshot)
    return snapshot


def pending_maker(node: Any) -> tuple[list[Any], Callable[[list[Any]], Any], Structure]:
    """Return the arrays of a Module that a call returns, and how to make it from such arrays.

    Raises:
        TypeError: if a non-array leaf cannot be hashed.
    """
    snapshot, is_known = take_snapshot(node)
    structure, cls, new = snapshot.structure, class_of(node), _new
    # Once it is read, its containers have to be found first.
    containers = None if snapshot.containers or not is_known else ()

    def make(arrays: list[Any]) -> Any:
        made = new(cls)
        set_cached(made, Snapshot(arrays, structure, containers))
        return made

    return snapshot.arrays, make, structure


_new: Any = object.__new__


def _contents(container: Any) -> tuple[Any, ...]:
    kind = class_of(container)
    if kind is list:
        return tuple(container)
    # The order of keys counts: a program that iterates over a dict depends on it.
    if kind is dict:
        return (*container, *container.values())
    # The values of a State never change; but once it is used up, flattening has to refuse.
    return (container.__usable__(),)


class _Spy:
    """Notes the containers that could change, while a tree is flattened."""

    def __init__(self, root: Any):
        self.root = root
        self.containers: list[tuple[Any, tuple[Any, ...]]] = []
        self.is_known = True

    def __call__(self, node: Any) -> bool:
        kind = class_of(node)
        if is_module(node):
            self.is_known = self.is_known and is_finished(node)
        elif kind is list or kind is dict or isinstance(node, AbstractState):
            # The State that is being flattened takes care of itself.
            if node is not self.root:
                self.containers.append((node, _contents(node)))
        elif isinstance(node, (jax.Array, np.ndarray)) or node is None or is_plain_tuple(node):
            pass
        elif is_node(node):
            self.is_known = False
        # Never a leaf: this function only looks at the nodes.
        return False


def take_snapshot(node: Any) -> tuple[Snapshot, bool]:
    """Return a new snapshot, and whether it may be cached, because `is_current` can check it.

    Raises:
        TypeError: if a non-array leaf cannot be hashed.
    """
    spy = _Spy(node)
    # One walk for both, because JAX calls this for every node.
    leaves, treedef = jtu.tree_flatten(node, is_leaf=spy)
    arrays, structure = structure_of(leaves, treedef)
    return Snapshot(arrays, structure, tuple(spy.containers)), spy.is_known
