"""The arrays of a record as one flat list, cached with the record.

A record never changes, so flattening it always gives the same result, and the second call with
the same model need not flatten it again. Only containers of other kinds inside it could have
changed: lists and dicts are stored with their contents, and compared, element by element, by
identity, before a snapshot is used again. A tree with nodes of unknown kinds is never cached.

A record that a transform returns is the opposite case: it is *pending*. It has its snapshot from
the start, and its nodes are built when a field is read.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from operator import is_
from typing import Any

import jax
import numpy as np

from pytreemod.tree.kinds import are_one, dtype_of, kind_of
from pytreemod.tree.nodes import children_of, is_node, is_plain_tuple, record_of
from pytreemod.tree.pending import PRIVATE, AbstractSource, fill_in, private_of
from pytreemod.tree.predicates import is_array, is_carried
from pytreemod.tree.stored_fields import stored
from pytreemod.typing import PyTree, class_of, jtu


class Static:
    """A value that equals another if they are one (see `kinds`)."""

    __slots__ = ("hash", "value")

    def __init__(self, value: Any):
        self.value = value
        self.hash = hash(value)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return NotImplemented
        return are_one(self.value, other.value)

    def __repr__(self) -> str:
        return repr(self.value)


# In a key each is next to its class; for these types, `==` does the rest.
_EXACT = (int, str, bytes, bool, type(None))


def exact(value: Any) -> Any:
    """Return a static value as part of a key: equal exactly if a trace can be used again.

    `1`, `1.0` and `True` are equal in Python, and so are `0.0` and `-0.0`; programs distinguish
    them. NaN is not equal to itself; programs do not care.
    """
    # The `repr` shows the sign of a zero, and is the same for each NaN.
    if type(value) is float:
        return value if value == value and value != 0.0 else repr(value)
    if type(value) is complex:
        return repr(value)
    if type(value) in _EXACT:
        return value
    dtype = dtype_of(value)
    return Static(value if dtype is None else dtype)


def static_kind(value: Any) -> type:
    """The class to put next to a static value in a key, because equal values may differ in class.

    The spellings of a dtype are one value.
    """
    return class_of(value) if dtype_of(value) is None else np.dtype


class Structure:
    """A tree without its arrays.

    `structure_of` returns the same object for equal trees: comparing two of them, and hashing one,
    costs nothing. `divide` returns a new object each time.
    """

    __slots__ = ("__weakref__", "count", "positions", "statics", "treedef")

    def __init__(self, treedef: Any, positions: tuple[int, ...] | None, statics: tuple[Any, ...]):
        self.treedef = treedef
        self.positions = positions
        self.statics = statics
        self.count = treedef.num_leaves if positions is None else len(positions)

    @property
    def key(self) -> Any:
        """A hashable value that is equal for equal structures, also if they are not one object.

        Raises:
            TypeError: if a static value cannot be hashed.
        """
        statics = tuple((static_kind(x), exact(x)) for x in self.statics)
        return self.treedef, self.positions, statics, node_kinds(self.treedef)

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
            are_one_treedef(self.treedef, other.treedef)
            and self.positions == other.positions
            and all(map(are_one, self.statics, other.statics))
        )

    def place(self, values: Sequence[Any], rest: Any = None) -> PyTree:
        """A tree of this structure with a value for each array, and `rest` for all other leaves."""
        if self.positions is None:
            return self.treedef.unflatten(values)
        leaves = [rest] * self.treedef.num_leaves
        for position, value in zip(self.positions, values, strict=True):
            leaves[position] = value
        return self.treedef.unflatten(leaves)


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
    # From a list: a generator would add a call for each leaf.
    positions = tuple([i for i, mark in enumerate(marks) if mark])
    statics = tuple([None if mark else leaf for mark, leaf in zip(marks, leaves, strict=True)])
    return [leaves[i] for i in positions], Structure(treedef, positions, statics)


# Weak: a structure lives as long as a tree, or a compiled function, that has it.
_structures: weakref.WeakValueDictionary[Any, Structure] = weakref.WeakValueDictionary()
# When Python exits, removing a structure would compare it with others. That would fail, with a
# printed error, because the modules that it needs are gone.
atexit.register(_structures.clear)
# Reentrant: the lock is held while static values are compared, by code that may flatten a tree.
_interning = threading.RLock()


def node_kinds(treedef: Any) -> tuple[Any, ...]:
    """Return a key that distinguishes treedefs that JAX calls equal, comparing node data by `==`.

    The keys of a dict, and the auxiliary data of another library's node, may be `2` in one tree and
    `2.0` in another. Records take care of this themselves.

    Args:
        treedef: as JAX gives it.

    Returns:
        A kind for each node that has such data; mostly there are none.

    Examples:
        >>> one, other = jax.tree.structure({2: 0}), jax.tree.structure({2.0: 0})
        >>> one == other, node_kinds(one) == node_kinds(other)
        (True, False)
        >>> node_kinds(jax.tree.structure({"a": [0, None]}))
        ()
    """
    kinds: list[Any] = []
    waiting = [treedef]
    while waiting:
        node = waiting.pop()
        data = node.node_data()
        if data is None:
            continue
        kind, aux = data
        if aux is not None and not _is_compared(kind, aux):
            kinds.append(kind_of(tuple(aux) if kind is dict else aux))
        waiting += node.children()
    return tuple(kinds)


def are_one_treedef(one: Any, other: Any) -> bool:
    """Whether two treedefs are one, including data that JAX compares by `==`: see `node_kinds`.

    Args:
        one: as JAX gives it.
        other: another.
    """
    return one is other or (one == other and node_kinds(one) == node_kinds(other))


def _is_compared(kind: type, aux: Any) -> bool:
    """Whether `==` distinguishes all auxiliary data of a class of nodes."""
    if kind is dict:
        return all(type(name) is str for name in aux)
    return hasattr(kind, "__record__") or issubclass(kind, AbstractState)


def structure_of(
    leaves: Sequence[Any], treedef: Any, kinds: tuple[Any, ...] | None = None
) -> tuple[list[Any], Structure]:
    """Divide flattened leaves into arrays and the structure, which contains everything else.

    Args:
        leaves: as JAX gives them.
        treedef: their tree.
        kinds: its `node_kinds`, if they are known.

    Raises:
        TypeError: if a non-array leaf cannot be hashed.
    """
    marks = [is_carried(leaf) for leaf in leaves]
    if all(marks):
        positions, statics, keys = None, (), ()
        arrays = list(leaves)
    else:
        positions = tuple(i for i, mark in enumerate(marks) if mark)
        statics = tuple(None if m else leaf for m, leaf in zip(marks, leaves, strict=True))
        keys = tuple((static_kind(x), exact(x)) for x in statics)
        arrays = [leaves[i] for i in positions]
    key = (treedef, positions, keys, node_kinds(treedef) if kinds is None else kinds)
    structure = _structures.get(key)
    if structure is None:
        # Two threads may both get here, and must agree; `setdefault` of such a dictionary is not
        # atomic.
        with _interning:
            structure = _structures.setdefault(key, Structure(treedef, positions, statics))
    return arrays, structure


class AbstractState(ABC):
    """A node that is not a record, but never changes either, and caches its own snapshot."""

    __slots__ = ()

    @abstractmethod
    def __snapshot__(self) -> Snapshot:
        """Return its arrays and structure.

        Raises:
            TypeError: if a non-array leaf cannot be hashed.
        """

    @abstractmethod
    def __pending__(self) -> Any:
        """Return a function `(structure, arrays) -> node` that makes one like this, pending."""

    # Not a method, which each jitted call with a State would have to call.
    __cached_snapshot__: Snapshot | None
    """Its snapshot, if it is cached."""

    @abstractmethod
    def __usable__(self) -> bool:
        """Whether it may still be flattened."""

    @abstractmethod
    def __values__(self) -> Mapping[Any, PyTree]:
        """Return its values by identity; also those of a used State."""

    @abstractmethod
    def __replaced__(self) -> Set[Any]:
        """The identities of the values that were replaced: all, of a State that was used up."""

    @abstractmethod
    def __note_copy__(self, copy: Any) -> None:
        """Note the values that a copy has replaced, which a transform made for its function."""

    @abstractmethod
    def __drawn__(self, after: Any) -> list[str]:
        """The names of the random streams that were drawn from until a later State."""


class _LastUse:
    """An object for the last moment at which any State was used up.

    A transform compares it before and after a call: most calls use none up.
    """

    __slots__ = ("mark",)

    def __init__(self) -> None:
        self.mark = object()


last_use = _LastUse()


def is_state(node: Any) -> bool:
    """Whether a node of a tree is a State."""
    return isinstance(node, AbstractState)


def states_in(tree: PyTree) -> list[AbstractState]:
    """Return the States in a tree, including those that were used up."""
    # Treat them as leaves: a used State refuses to be flattened.
    return [leaf for leaf in jtu.tree_leaves(tree, is_leaf=is_state) if is_state(leaf)]


# The key of a State, instead of a container's keys.
_STATE = object()

Containers = tuple[tuple[Any, Any, Any], ...]
"""Objects that could have changed: containers, each with its keys (None for a list) and its
contents, and States that may have been used up."""


class Snapshot(AbstractSource):
    """A record's arrays and structure, with the containers that must not have changed.

    A pending record has no containers yet: `paths` says where they will be. It is None if the
    record will have nodes of unknown kinds, and so cannot be cached once it is built.
    """

    __slots__ = ("arrays", "containers", "paths", "structure")

    def __init__(
        self,
        arrays: list[Any],
        structure: Structure,
        containers: Containers = (),
        paths: tuple[_Path, ...] | None = (),
    ):
        self.arrays = arrays
        self.structure = structure
        self.containers = containers
        self.paths = paths

    def read(self, node: Any, name: str) -> None:
        """Fill `node` in completely: the arrays exist, and one field costs most of the rest."""
        self.fill_in(node)

    def fill_in(self, node: Any) -> None:
        """Build the record's fields from the arrays."""
        fields = node.__stored__
        # JAX makes a new node; this one takes over its fields.
        built = self.structure.assemble(self.arrays)
        fill_in(built)
        for name, value in built.__stored__.items():
            # A value that another thread has read stays the same object.
            fields.setdefault(name, value)
        if self.paths is not None:
            found = [_reached(node, path) for path in self.paths]
            containers = tuple(map(_contents, found))
            fields[PRIVATE].snapshot = Snapshot(self.arrays, self.structure, containers)
        # Last: a record that is no longer pending must be complete.
        fields[PRIVATE].source = None

    def is_current(self) -> bool:
        """Whether the stored containers still have the same contents."""
        for container, keys, values in self.containers:
            if keys is _STATE:
                # Its values never change; but once it is used up, flattening has to refuse.
                if not container.__usable__():
                    return False
            elif len(container) != len(values):
                return False
            elif keys is None:
                # By identity: `==` would call the user's code, and wait for arrays.
                if not all(map(is_, container, values)):
                    return False
            # The order counts: a program that iterates over a dict depends on it.
            elif tuple(container) != keys or not all(map(is_, container.values(), values)):
                return False
        return True


def snapshot_of(node: Any) -> Snapshot:
    """Return the snapshot of a record: the cached one if it is still valid, or a new one.

    Raises:
        TypeError: if a non-array leaf cannot be hashed.
    """
    own = node.__stored__.get(PRIVATE)
    if own is not None:
        source, cached = own.source, own.snapshot
        # A pending record may also be a proxy, whose source has no arrays.
        if type(source) is Snapshot:
            return source
        if cached is not None and (not cached.containers or cached.is_current()):
            return cached
    return _take(node)


_Path = tuple[Any, ...]


def _contents(container: Any) -> tuple[Any, Any, Any]:
    if class_of(container) is dict:
        return container, tuple(container), tuple(container.values())
    if isinstance(container, AbstractState):
        return container, _STATE, ()
    return container, None, tuple(container)


def _reached(node: Any, path: _Path) -> Any:
    """Return the node at a path, by Python's own access."""
    for key in path:
        if record_of(node) is not None:
            node = stored(node, key.name)
        else:
            # A named tuple has attributes, too.
            node = getattr(node, key.name) if _is_name(key) else node[_index(key)]
    return node


def _is_name(key: Any) -> bool:
    return isinstance(key, jtu.GetAttrKey)


def _index(key: Any) -> Any:
    return key.idx if isinstance(key, jtu.SequenceKey) else key.key


class _Spy:
    """Notes the containers that could change, while a tree is flattened."""

    def __init__(self, root: Any):
        self.root = root
        self.containers: list[tuple[Any, Any, Any]] = []
        self.known = True
        # Whether `==` distinguishes the auxiliary data of every node.
        self.is_compared = True

    def __call__(self, node: Any) -> bool:
        kind = class_of(node)
        if kind is list or kind is dict:
            self.containers.append(_contents(node))
            if kind is dict and not _is_compared(dict, node):
                self.is_compared = False
        elif isinstance(node, (jax.Array, np.ndarray)) or node is None or is_plain_tuple(node):
            pass
        elif isinstance(node, AbstractState):
            # The State that is being flattened takes care of itself.
            if node is not self.root:
                self.containers.append(_contents(node))
        else:
            record = record_of(node)
            if record is not None:
                self.known = self.known and record.is_finished(node)
            # For two reasons: its auxiliary data, and changes inside of it.
            elif not jtu.all_leaves([node]):
                self.known = self.is_compared = False
        # Never a leaf: this function only looks at the nodes.
        return False


def _take(node: Any) -> Snapshot:
    snapshot, is_cached = take_snapshot(node)
    if is_cached:
        private_of(node).snapshot = snapshot
    return snapshot


def take_snapshot(node: Any) -> tuple[Snapshot, bool]:
    """Return a new snapshot, and whether it may be cached, because `is_current` can check it.

    Raises:
        TypeError: if a non-array leaf cannot be hashed.
    """
    spy = _Spy(node)
    # One walk for both, because JAX calls this for every node.
    leaves, treedef = jtu.tree_flatten(node, is_leaf=spy)
    arrays, structure = structure_of(leaves, treedef, () if spy.is_compared else None)
    return Snapshot(arrays, structure, tuple(spy.containers)), spy.known


def container_paths(node: Any) -> tuple[_Path, ...] | None:
    """The paths of the containers in a tree that could change; None if they cannot be known."""
    paths: list[_Path] = []
    # A list of pending nodes, not a recursion: a tree may be deeper than Python's stack.
    waiting: list[tuple[Any, _Path]] = [(node, ())]
    while waiting:
        node, path = waiting.pop()
        if is_array(node) or not is_node(node):
            continue
        record = record_of(node)
        if isinstance(node, AbstractState):
            paths.append(path)
            # No path leads inside it: it has to detect its own changes.
            if node.__snapshot__().containers:
                return None
        elif type(node) in (list, dict):
            paths.append(path)
        elif record is not None:
            if not record.is_finished(node):
                return None
        elif not (node is None or is_plain_tuple(node)):
            return None
        waiting += [(child, (*path, key)) for key, child in children_of(node) or ()]
    return tuple(paths)
