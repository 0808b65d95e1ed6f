"""Which leaves Equinox's files have of a tree, and in which order.

Such a file has no names: it has the leaves one after the other, as Equinox flattens the tree. There
the leaves of a Module are its fields in the order in which the class declares them, and here they
are, too; so nothing need be said of a layer, or of a user's Module, but this:

- what is a leaf there and configuration here, a layer's flags, stands where its field is declared
  (`LEAVES_THERE`). Of an optimizer's state Equinox keeps arrays only, so none stand there;
- `BatchNorm` counts its batches there, and corrects its running statistics by that number; here,
  too, with `mode="batch"`. With `mode="torch"` they need no correction, and the count stands in the
  file alone, before the statistics (`Meaning.COUNT`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import EquinoxFileError
from pytreemod.nn.batch_normalization import BatchNorm
from pytreemod.nn.dropout import Dropout
from pytreemod.nn.pooling import Pool
from pytreemod.nn.spectral_normalization import SpectralNorm
from pytreemod.state.tokens import tokens_of
from pytreemod.state.values import State
from pytreemod.tree.nodes import AbstractRecord, children_of, record_of
from pytreemod.tree.paths import PathName, path_text
from pytreemod.tree.stored_fields import stored
from pytreemod.tree.surgery import replace_at
from pytreemod.typing import IsLeaf, PyTree, Tracer, class_of, jtu

LEAVES_THERE: dict[type, frozenset[str]] = {
    BatchNorm: frozenset({"axis_name", "inference"}),
    Dropout: frozenset({"p", "inference"}),
    Pool: frozenset({"init"}),
    SpectralNorm: frozenset({"inference"}),
}
"""The configuration of each layer that is a leaf in Equinox. Functions, of which no file has
anything, are left out."""

ESTABLISHED = 2**30
"""How many batches statistics are said to be of that need no correction: any momentum below one to
that power is zero. Equinox has room for as many more."""


class Meaning(enum.Enum):
    """What a value of the file is in the tree."""

    DATA = "a leaf"
    CONFIGURATION = "a part of the structure"
    COUNT = "none: what the two leaves after it, running statistics, are corrected by"


class FileLeaf(NamedTuple):
    """A leaf in Equinox, and so a place in its file."""

    path: tuple[Any, ...]
    value: Any
    meaning: Meaning
    layer: Any = None
    """Whose configuration it is, or whose count if that is known."""


def file_order(tree: PyTree, is_leaf: IsLeaf = None) -> list[FileLeaf]:
    """The leaves that Equinox has of a tree, in its order.

    Args:
        tree: any tree.
        is_leaf: where to stop descending.

    Returns:
        Them, with their paths here.

    Raises:
        StateError: a State in the tree was used up.
    """
    return list(_Walk(tree, is_leaf).below(tree, (), FileLeaf((), tree, Meaning.DATA)))


def put_back(tree: PyTree, leaves: Sequence[FileLeaf], values: Sequence[Any], where: str) -> PyTree:
    """A tree with values in the places of its leaves.

    Args:
        tree: any tree.
        leaves: all that `file_order` says of it.
        values: what a file has, one for each; the very value that a leaf has, where it has none.
        where: what to call the file in errors.

    Returns:
        A tree of the structure of `tree`, but for the configuration that the file has.

    Raises:
        EquinoxFileError: running statistics would have to be corrected, and nothing says how.
        ArgumentError: a layer refuses what the file has for its configuration.
    """
    changes: list[tuple[Any, Any]] = []
    # By layer, for its flags may depend on each other.
    flags: dict[int, tuple[Any, dict[str, Any]]] = {}
    for leaf, value in zip(leaves, _corrected(leaves, values, where), strict=True):
        if leaf.meaning is Meaning.COUNT or value is leaf.value:
            continue
        changes.append((leaf.path, value))
        if leaf.meaning is Meaning.CONFIGURATION and isinstance(leaf.path[-1], jtu.GetAttrKey):
            flags.setdefault(id(leaf.layer), (leaf.layer, {}))[1][leaf.path[-1].name] = value
    for layer, changed in flags.values():
        # For its checks alone: what is returned is built without any.
        layer.replace(**changed)
    return replace_at(tree, changes)


# ---- the order


class _Walk:
    def __init__(self, tree: PyTree, is_leaf: IsLeaf):
        self.is_leaf = is_leaf
        norms = {getattr(norm.state_index, "marker", None): norm for norm in _norms_in(tree)}
        # None for those of others: a field of the user's may be called as one of ours is.
        self.owners = {token.marker: norms.get(token.marker) for _, token in tokens_of(tree)}

    def below(
        self, node: Any, path: tuple[Any, ...], leaf: FileLeaf, has_flags: bool = True
    ) -> Iterator[FileLeaf]:
        """The leaves at and below a node; each is as `leaf` is, but for its value and path."""
        is_end = self.is_leaf is not None and self.is_leaf(node)
        children = None if is_end else children_of(node)
        record = record_of(node)
        if children is None:
            yield leaf._replace(path=path, value=node)
        elif isinstance(node, State):
            yield from self._state(node, children, path)
        elif record is not None:
            yield from self._record(node, record, path, leaf, has_flags)
        else:
            # What optax keeps was made of what Equinox's users give it, arrays alone.
            has_flags = has_flags and class_of(node).__module__.partition(".")[0] != "optax"
            for key, child in children:
                yield from self.below(child, (*path, key), leaf, has_flags)

    def _record(
        self,
        node: Any,
        record: AbstractRecord,
        path: tuple[Any, ...],
        leaf: FileLeaf,
        has_flags: bool,
    ) -> Iterator[FileLeaf]:
        data = {*record.data_names(node)}
        flags = _flags_of(class_of(node)) if has_flags else ()
        for name in record.names(node):
            place, value = (*path, jtu.GetAttrKey(name)), stored(node, name)
            if name in data:
                if name == _COUNTED and isinstance(node, BatchNorm):
                    key = jtu.GetAttrKey(_COUNT)
                    yield from _count(node, getattr(value, "init", None), (*path, key))
                yield from self.below(value, place, leaf, has_flags)
            elif name in flags:
                flag = FileLeaf(place, value, Meaning.CONFIGURATION, node)
                yield from self.below(value, place, flag, has_flags)

    def _state(
        self, state: State, children: list[tuple[Any, Any]], path: tuple[Any, ...]
    ) -> Iterator[FileLeaf]:
        names = {key.key.steps for key, _ in children}
        for marker, (key, value) in zip(state.__values__(), children, strict=True):
            owner = self.owners.get(marker)
            # Of a State that is alone, only the names say whose values they are.
            is_alone = marker not in self.owners
            if owner is not None or (is_alone and _is_counted(key.key, names)):
                count = jtu.DictKey(key.key.removesuffix(_COUNTED) + _COUNT)
                yield from _count(owner, value, (*path, count))
            yield from self.below(value, (*path, key), FileLeaf((), None, Meaning.DATA))


def _norms_in(node: Any) -> Iterator[BatchNorm]:
    if isinstance(node, BatchNorm):
        yield node
    for _, child in children_of(node) or ():
        yield from _norms_in(child)


def _flags_of(kind: type) -> frozenset[str]:
    return frozenset[str]().union(*(LEAVES_THERE.get(cls, ()) for cls in kind.__mro__))


# ---- counts of batches


_COUNTED, _COUNT, _FIRST = "state_index", "batch_counter", "ema_first_time_index"
# Beside any of these, statistics need no count.
_DECIDING = (_COUNT, _FIRST)


def _count(layer: BatchNorm | None, statistics: Any, path: tuple[Any, ...]) -> Iterator[FileLeaf]:
    """The count that stands before running statistics, if there is one."""
    if (layer is None or layer.mode == "torch") and _are_statistics(statistics):
        momentum = 0.0 if layer is None else layer.momentum
        mean, var = statistics
        yield FileLeaf(path, _count_of(mean, var, momentum), Meaning.COUNT, layer)


def _is_counted(name: PathName, names: set[tuple[str, ...]]) -> bool:
    *above, last = name.steps
    return last == _COUNTED and not any((*above, other) in names for other in _DECIDING)


def _are_statistics(value: Any) -> bool:
    if class_of(value) is not tuple or len(value) != 2:
        return False
    mean, var = value
    kinds = (jax.Array, jax.ShapeDtypeStruct)
    are_arrays = isinstance(mean, kinds) and isinstance(var, kinds)
    # With an axis, and so none that could be taken for a count.
    return are_arrays and mean.ndim > 0 and (mean.shape, mean.dtype) == (var.shape, var.dtype)


def _count_of(mean: Any, var: Any, momentum: float) -> Any:
    """A count with which Equinox takes statistics as they are, one for each member."""
    dtype = jnp.asarray(0).dtype
    if not (_has_values(mean) and _has_values(var)):
        return jax.ShapeDtypeStruct(mean.shape[:-1], dtype)
    # At zero Equinox corrects nothing, and there it begins as we do. But from there on it would
    # take the next batch for all that was seen.
    is_new = (np.asarray(mean) == 0).all(-1) & (np.asarray(var) == 1).all(-1)
    return jnp.asarray(np.where(is_new | (momentum == 1), 0, ESTABLISHED), dtype)


def _has_values(array: Any) -> bool:
    return isinstance(array, jax.Array) and not isinstance(array, Tracer) and not array.is_deleted()


def _corrected(leaves: Sequence[FileLeaf], values: Sequence[Any], where: str) -> list[Any]:
    """The values, with running statistics as they are after Equinox's correction."""
    result = list(values)
    for i, leaf in enumerate(leaves):
        if leaf.meaning is not Meaning.COUNT or values[i] is leaf.value:
            continue
        count = np.asarray(values[i], np.float64)
        is_corrected = (count > 0) & (count < ESTABLISHED)
        if not is_corrected.any():
            continue
        if leaf.layer is None:
            raise _momentum_missing(leaf, where)
        scale = np.where(is_corrected, 1 - leaf.layer.momentum**count, 1)
        for j in (i + 1, i + 2):
            # What was not read is as it was. With a momentum of one, nothing was ever learnt.
            if values[j] is not leaves[j].value and scale.all():
                exact = np.asarray(values[j], np.float64) / scale[..., None]
                result[j] = jnp.asarray(exact, values[j].dtype)
    return result


def _momentum_missing(leaf: FileLeaf, where: str) -> EquinoxFileError:
    return EquinoxFileError(
        where,
        "the model beside its State, for running statistics that Equinox corrects by the "
        "layer's momentum",
        "a State alone",
        places=[path_text(leaf.path)],
        hint=[
            "read nothing for the model:",
            "filter_spec = (lambda f, x: x, pm.default_deserialise_filter_spec)",
            "_, state = pm.tree_deserialise_leaves(path, (model, state), filter_spec)",
        ],
    )
