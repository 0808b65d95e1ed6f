"""The arrays of a record as one flat list, cached with the record.

A record never changes, so what flattening it gives never changes either, and the second call with
the same model need not flatten it again. Only containers of other kinds inside it could have been
changed meanwhile: lists and dicts are remembered with what they held, and compared, element by
element by identity, before a snapshot is used again. A tree with nodes of unknown kinds is never
remembered.

A record that a transform returns starts from the other end: it is handed out *pending*, with its
snapshot, and its nodes are built when somebody reads a field.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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
    """A value that is equal to another if they are one (see `kinds`)."""

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


# In a key each is next to its class: of these, `==` says all the rest.
_EXACT = (int, str, bytes, bool, type(None))


def exact(value: Any) -> Any:
    """A static value as it is in a key: equal exactly if a trace can be used again.

    `1`, `1.0` and `True` are equal in Python, and so are `0.0` and `-0.0`; programs distinguish
    them. NaN is not equal to itself; programs do not care.
    """
    # Their texts show what `==` does not: the sign of a zero, and that one NaN is like another.
    if type(value) is float:
        return value if value == value and value != 0.0 else repr(value)
    if type(value) is complex:
        return repr(value)
    if type(value) in _EXACT:
        return value
    dtype = dtype_of(value)
    return Static(value if dtype is None else dtype)


def static_kind(value: Any) -> type:
    """What is in a key next to a static value, as equal values of different classes differ.

    The spellings of a dtype are one value.
    """
    return class_of(value) if dtype_of(value) is None else np.dtype


class Structure:
    """All that is not arrays in a tree.

    By `structure_of` it is the same object for equal trees: comparing two of them, and hashing one,
    costs nothing. By `divide` each is another.
    """

    __slots__ = ("__weakref__", "count", "positions", "statics", "treedef")

    def __init__(self, treedef: Any, positions: tuple[int, ...] | None, statics: tuple[Any, ...]):
        self.treedef = treedef
        self.positions = positions
        self.statics = statics
        self.count = treedef.num_leaves if positions is None else len(positions)

    def assemble(self, arrays: Sequence[Any]) -> PyTree:
        """Put the tree together from its arrays."""
        # As in most models: every leaf is an array, and nothing need be put between them.
        if self.positions is None:
            return self.treedef.unflatten(arrays)
        leaves = list(self.statics)
        for position, array in zip(self.positions, arrays, strict=True):
            leaves[position] = array
        return self.treedef.unflatten(leaves)

    def matches(self, other: Structure) -> bool:
        """Whether another structure is one with this, whether or not both can be hashed."""
        return self is other or (
            are_one_treedef(self.treedef, other.treedef)
            and self.positions == other.positions
            and all(map(are_one, self.statics, other.statics))
        )

    def place(self, values: Sequence[Any], rest: Any = None) -> PyTree:
        """A tree of this structure with something for each array, and `rest` for all else."""
        if self.positions is None:
            return self.treedef.unflatten(values)
        leaves = [rest] * self.treedef.num_leaves
        for position, value in zip(self.positions, values, strict=True):
            leaves[position] = value
        return self.treedef.unflatten(leaves)


def divide(
    tree: PyTree, counts: Callable[[Any], bool] | Sequence[bool] = is_array
) -> tuple[list[Any], Structure]:
    """The values in a tree, and a structure of its own for the rest; nothing need be hashable.

    Args:
        tree: any tree.
        counts: says of a leaf whether it is a value, or has a bool for each; all else is
            structure.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    marks = [counts(leaf) for leaf in leaves] if callable(counts) else counts
    # Of lists: a generator would be a function more for each leaf.
    positions = tuple([i for i, mark in enumerate(marks) if mark])
    statics = tuple([None if mark else leaf for mark, leaf in zip(marks, leaves, strict=True)])
    return [leaves[i] for i in positions], Structure(treedef, positions, statics)


# Weakly: a structure goes with the last tree, or compiled function, that has it.
_structures: weakref.WeakValueDictionary[Any, Structure] = weakref.WeakValueDictionary()
# When Python ends, a structure would be removed by a comparison with others, which fails, and is
# printed, for the modules that it needs are gone.
atexit.register(_structures.clear)
# Reentrant: static values are compared under it, by code that may flatten a tree itself.
_interning = threading.RLock()


def node_kinds(treedef: Any) -> tuple[Any, ...]:
    """What tells treedefs apart that JAX calls equal, for it compares by `==` what nodes keep.

    The keys of a dict, and what a node of another library's keeps beside its children, may be `2`
    in one tree and `2.0` in another. Records look after themselves.

    Args:
        treedef: as JAX gives it.

    Returns:
        A kind for each node that keeps such a thing; mostly there is none.

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
    """Whether two treedefs are one also in what JAX compares by `==`: see `node_kinds`.

    Args:
        one: as JAX gives it.
        other: another.
    """
    return one is other or (one == other and node_kinds(one) == node_kinds(other))


def _is_compared(kind: type, aux: Any) -> bool:
    """Whether `==` distinguishes all auxiliary data of a kind of nodes."""
    if kind is dict:
        return all(type(name) is str for name in aux)
    return hasattr(kind, "__record__") or issubclass(kind, AbstractState)


def structure_of(
    leaves: Sequence[Any], treedef: Any, kinds: tuple[Any, ...] | None = None
) -> tuple[list[Any], Structure]:
    """Divide flattened leaves into arrays and the structure that holds all else.

    Args:
        leaves: as JAX gives them.
        treedef: what they are the leaves of.
        kinds: its `node_kinds`, if they are known.

    Raises:
        TypeError: a leaf that is no array cannot be hashed.
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
        # Two threads may both come here, and must agree: `setdefault` of such a dictionary looks
        # first and stores then.
        with _interning:
            structure = _structures.setdefault(key, Structure(treedef, positions, statics))
    return arrays, structure


class AbstractState(ABC):
    """A node that is no record, but never changes either, and keeps its snapshot itself."""

    __slots__ = ()

    @abstractmethod
    def __snapshot__(self) -> Snapshot:
        """Its arrays and structure.

        Raises:
            TypeError: a leaf that is no array cannot be hashed.
        """

    @abstractmethod
    def __pending__(self) -> Any:
        """A function `(structure, arrays) -> node` that makes one like this, pending."""

    @abstractmethod
    def __kept__(self) -> Snapshot | None:
        """Its snapshot, if there is one by now."""

    @abstractmethod
    def __usable__(self) -> bool:
        """Whether it may still be flattened."""

    @abstractmethod
    def __values__(self) -> Mapping[Any, PyTree]:
        """Its values, by what each is recognized by; also of one that was used up."""

    @abstractmethod
    def __use_up__(self, by: str) -> None:
        """Refuse to be flattened, or used, from now on.

        Args:
            by: what has replaced it.
        """


# Where a container has its keys.
_STATE = object()

Containers = tuple[tuple[Any, Any, Any], ...]
"""What could have changed: containers, each with its keys (None for a list) and what it holds, and
states that may be used up by now."""


class Snapshot(AbstractSource):
    """A record's arrays and structure, with the containers that must not have changed.

    While the record is pending it has no containers yet, but `paths` says where they will be; None
    if it will have nodes of unknown kinds, and so cannot be remembered once it is built.
    """

    # The last three are set by `deliveries` alone, which makes it one of its own class.
    __slots__ = ("arrays", "containers", "delivery", "passed", "paths", "spent", "structure")

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

    def take(self) -> bool:
        """Note that what it is of is read or passed on, and say if it may be: see `deliveries`."""
        return True

    def read(self, node: Any, name: str) -> None:
        """Fill `node` in, all of it: the arrays are there, and one field costs most of the rest."""
        self.fill_in(node)

    def fill_in(self, node: Any) -> None:
        """Build the record's fields from the arrays."""
        fields = node.__stored__
        # JAX makes a node of its own, whose fields this one takes over.
        built = self.structure.assemble(self.arrays)
        fill_in(built)
        for name, value in built.__stored__.items():
            # What another thread has read from it already stays the same object.
            fields.setdefault(name, value)
        if self.paths is not None:
            found = [reached(node, path) for path in self.paths]
            containers = tuple(map(_contents, found))
            fields[PRIVATE].snapshot = Snapshot(self.arrays, self.structure, containers)
        # Last: who finds the record no longer pending takes it for complete.
        fields[PRIVATE].source = None

    def is_current(self) -> bool:
        """Whether the remembered containers still hold what they held."""
        for container, keys, values in self.containers:
            if keys is _STATE:
                # Its values never change; but once it is used up, flattening has to refuse.
                if not container.__usable__():
                    return False
            elif len(container) != len(values):
                return False
            elif keys is None:
                # By identity: `==` would call code of the user's, and wait for arrays.
                if not all(map(is_, container, values)):
                    return False
            # In order, too: a program that iterates over a dict sees it.
            elif tuple(container) != keys or not all(map(is_, container.values(), values)):
                return False
        return True


def snapshot_of(node: Any) -> Snapshot:
    """The snapshot of a record: the cached one if it is still valid, or a new one.

    Raises:
        TypeError: a leaf that is no array cannot be hashed.
    """
    own = node.__stored__.get(PRIVATE)
    if own is not None:
        source, cached = own.source, own.snapshot
        # What is pending may be a proxy as well, whose source has no arrays.
        if type(source) is Snapshot or (isinstance(source, Snapshot) and source.take()):
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


def reached(node: Any, path: _Path) -> Any:
    """What is at a path, by Python's means."""
    for key in path:
        if record_of(node) is not None:
            node = stored(node, key.name)
        else:
            # Of a named tuple, which has attributes, too.
            node = getattr(node, key.name) if _is_name(key) else node[_index(key)]
    return node


def _is_name(key: Any) -> bool:
    return isinstance(key, jtu.GetAttrKey)


def _index(key: Any) -> Any:
    return key.idx if isinstance(key, jtu.SequenceKey) else key.key


class _Spy:
    """Notes, while a tree is flattened, the containers in it that could be changed."""

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
            # The state that is asked looks after itself.
            if node is not self.root:
                self.containers.append(_contents(node))
        else:
            record = record_of(node)
            if record is not None:
                self.known = self.known and record.is_finished(node)
            # For two reasons: what it keeps, and what may change inside of it.
            elif not jtu.all_leaves([node]):
                self.known = self.is_compared = False
        # Never a leaf: this is a look on the way, not a stop.
        return False


def _take(node: Any) -> Snapshot:
    snapshot, is_cached = take_snapshot(node)
    if is_cached:
        private_of(node).snapshot = snapshot
    return snapshot


def take_snapshot(node: Any) -> tuple[Snapshot, bool]:
    """A new snapshot, and whether it may be cached, since `is_current` can check it.

    Raises:
        TypeError: a leaf that is no array cannot be hashed.
    """
    spy = _Spy(node)
    # One walk for both, for JAX asks this of every node that it meets.
    leaves, treedef = jtu.tree_flatten(node, is_leaf=spy)
    arrays, structure = structure_of(leaves, treedef, () if spy.is_compared else None)
    return Snapshot(arrays, structure, tuple(spy.containers)), spy.known


def container_paths(node: Any) -> tuple[_Path, ...] | None:
    """Where the containers in a tree are that could be changed; None if nobody knows."""
    paths: list[_Path] = []
    # A list of what is still to be seen, not a recursion: a tree may be deeper than Python's stack.
    waiting: list[tuple[Any, _Path]] = [(node, ())]
    while waiting:
        node, path = waiting.pop()
        if is_array(node) or not is_node(node):
            continue
        record = record_of(node)
        if isinstance(node, AbstractState):
            paths.append(path)
            # Inside of it no path leads on: what changes there it must find out by itself.
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
