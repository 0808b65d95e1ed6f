"""Other forms of one model: what a file has in one form, `like` may have in another.

Owns: functions from a file's table, with the names of `like`, to another one that has the form of
`like`. Layers are one `Stack`, or a list ([`restacked`][pytreemod.io.forms.restacked]). A value is
constrained, or is under another constraint ([`constrained`][pytreemod.io.forms.constrained]): what
the file has is then taken in as the constructor would take it. A matrix is the base of an update of
low rank ([`based`][pytreemod.io.forms.based]). Nothing is read here: a leaf of the new table says
what it is made of.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, FileError, PytreemodError, SpecError
from pytreemod.io.configuration import ConfigurationReader, Json, are_same
from pytreemod.io.tables import (
    Clear,
    Leaf,
    Name,
    Source,
    Stacked,
    Table,
    Unstacked,
    Words,
    shown_name,
)
from pytreemod.module.constrained_leaves import Constrained, Constraint, mapped
from pytreemod.module.constraining import take_in
from pytreemod.module.reading import count_made_as_one
from pytreemod.training.low_rank import LowRank
from pytreemod.tree.paths import parse_pattern

# ---- layers as one Stack, or in a list

_HOLDERS = {"pytreemod.nn.Stack": "layer", "pytreemod.nn.Ensemble": "member"}
"""The field in which each has its layers, or members, as one."""
_Shared = Mapping[Name, frozenset[Name]]


class _Spot(NamedTuple):
    """Where leaves of a Stack's layers are.

    A Stack adds an axis to the arrays of its layers, in front of all but those of the Stacks and
    the Ensembles that it is in itself. What members of an Ensemble share has no axis of them.
    """

    name: Name
    axis: int
    """Which one is that of the layers."""
    shared: _Shared
    """By the name of each Ensemble, the names of what its members share."""

    def axis_of(self, *names: Name) -> int:
        """The axis of a leaf, by the names that it has in the file and in `like`."""
        found = [
            any(name[: len(top)] == top for name in names for top in tops)
            for tops in self.shared.values()
        ]
        return self.axis - sum(found)


def restacked(theirs: Table, ours: Table, where: str) -> tuple[Table, set[Name]]:
    """A file's table with its layers as `like` has them: as one `Stack`, or in a list.

    Args:
        theirs: the file's table.
        ours: that of `like`.
        where: the call, for errors.

    Returns:
        The table, and the names of the leaves that were stacked, or are a part of a stack.

    Raises:
        FileError: layers that differ in more than their numbers cannot be one Stack.
    """
    if _stacks_in(theirs).keys() == _stacks_in(ours).keys():
        return theirs, set()
    table = theirs.copy()
    moved: set[Name] = set()
    shared = _shared_in(theirs, ours)
    while True:
        before = [*table.leaves, *table.classes]
        moved |= _stack_all(table, ours, shared, where) | _unstack_all(table, ours, shared)
        # What is in others has its new name only when these have theirs.
        if before == [*table.leaves, *table.classes]:
            return table, moved


def other_depths(theirs: Table, ours: Table) -> list[str]:
    """A line for each Stack of one that the other has as a list with another number of layers."""
    texts = (
        (ours, theirs, "like has one Stack of {}, the file a list of {}"),
        (theirs, ours, "the file has one Stack of {}, like a list of {}"),
    )
    lines: list[str] = []
    for one, other, text in texts:
        there = _stacks_in(other)
        counts = {name: len(_items(other.leaves, name)) for name in _stacks_in(one)}
        lines += [
            f"{shown_name(name)}: {text.format(depth, counts[name])}"
            for name, depth in _stacks_in(one).items()
            if name not in there and counts[name] not in (0, depth)
        ]
    return lines


def _stack_all(table: Table, ours: Table, shared: _Shared, where: str) -> set[Name]:
    moved: set[Name] = set()
    there = _stacks_in(table)
    for name, depth in _stacks_in(ours).items():
        if name not in there:
            for spot in _spots(name, ours, shared):
                moved |= _stack(table, ours, spot, depth, where)
            _stack_config(table, ours, name, depth, where)
    return moved


def _unstack_all(table: Table, ours: Table, shared: _Shared) -> set[Name]:
    moved: set[Name] = set()
    there = _stacks_in(ours)
    for name, depth in _stacks_in(table).items():
        # Layers without arrays have a number, too.
        if name not in there and len(_items(ours.classes, name)) in (0, depth):
            for spot in _spots(name, table, shared):
                moved |= _unstack(table, ours, spot)
            _unstack_config(table, ours, name)
    return moved


def _stacks_in(table: Table) -> dict[Name, int]:
    found = [name for name, cls in table.classes.items() if cls == "pytreemod.nn.Stack"]
    depths = {name: table.config.get((*name, "depth")) for name in found}
    return {name: depth for name, depth in depths.items() if type(depth) is int}


def _shared_in(*tables: Table) -> _Shared:
    """By the name of each Ensemble, what its members share, by the names of either table."""
    found: dict[Name, frozenset[Name]] = {}
    words = Words()
    for table in tables:
        for name, cls in table.classes.items():
            if cls != "pytreemod.nn.Ensemble":
                continue
            # Texts of paths in a member. What else a file may have there is refused elsewhere.
            written: Any = table.config.get((*name, "shared"))
            tops: set[Name] = set()
            with suppress(AttributeError, SpecError, TypeError):
                for text in written.get("tuple", ()):
                    steps = [words[step] for step in parse_pattern(text)]
                    tops.add((*name, "member", *steps))
            found[name] = found.get(name, frozenset()) | tops
    return found


def _spots(name: Name, table: Table, shared: _Shared) -> list[_Spot]:
    """Where the leaves of a Stack are: at its own place, and at that of its tokens in a State.

    A State may have been made with a part of the model, and knows no more than the last steps.
    """
    around = [(*n, _HOLDERS[cls]) for n, cls in table.classes.items() if cls in _HOLDERS]
    outer = [len(words) - 1 for words in around if name[: len(words)] == words]
    spots = [_Spot(name, len(outer), shared)]
    for state in table.states:
        for i in range(len(name) + 1):
            spots.append(_Spot(state + name[i:], sum(length >= i for length in outer), {}))
    return spots


def _below(names: Mapping[Name, Any], top: Name) -> dict[Name, Any]:
    """What is below a name, by the rest of its name."""
    n = len(top)
    return {name[n:]: value for name, value in names.items() if len(name) > n and name[:n] == top}


def _items(names: Mapping[Name, Any], spot: Name) -> list[Name]:
    """The names of a list's items, as far as there are any."""
    # A Sequential has its layers in a field.
    for base in ((*spot, "layers"), spot):
        n = len(base)
        there = {name[n] for name in names if len(name) > n and name[:n] == base}
        items: list[Name] = []
        while str(len(items)) in there:
            items.append((*base, str(len(items))))
        if items:
            return items
    return []


def _stack(table: Table, ours: Table, spot: _Spot, depth: int, where: str) -> set[Name]:
    items, layer = _items(table.leaves, spot.name), (*spot.name, "layer")
    # In a State, there may be something else with as many items.
    if not items or len(items) != depth or not _below(ours.leaves, layer):
        return set()
    if _below(table.leaves, layer):
        return set()
    parts = [_below(table.leaves, item) for item in items]
    made: dict[Name, Leaf] = {}
    for rest, first in parts[0].items():
        layers = [part.get(rest) for part in parts]
        name = layer + rest
        if not all(leaf is not None and leaf[:3] == first[:3] for leaf in layers):
            raise _differ(where, name, items)
        sources = tuple(cast("Source", cast("Leaf", leaf).source) for leaf in layers)
        axis = spot.axis_of(name, items[0] + rest)
        made[name] = _stacked(first, sources, axis) if first.is_array else first
    for item, part in zip(items, parts, strict=True):
        for rest in part:
            del table.leaves[item + rest]
    table.leaves.update(made)
    return {*made}


def _stacked(first: Leaf, sources: tuple[Source, ...], axis: int) -> Leaf:
    shape = (*first.shape[:axis], len(sources), *first.shape[axis:])
    return first._replace(shape=shape, source=Stacked(sources, axis))


def _differ(where: str, name: Name, items: Sequence[Name]) -> FileError:
    return FileError(
        where,
        "layers that differ in their numbers only, for they are to be one Stack",
        f"different ones at {shown_name(name)}",
        places=[f"in the file: {', '.join(map(shown_name, items[:4]))}"],
    )


def _stack_config(table: Table, ours: Table, name: Name, depth: int, where: str) -> None:
    items = _items(table.classes, name)
    if not items or len(items) != depth:
        return
    layer = (*name, "layer")
    for names in (table.config, table.classes):
        parts = [_from(names, item) for item in items]
        if not all(_are_same_parts(part, parts[0]) for part in parts):
            raise _differ(where, layer, items)
        _drop(names, name)
        names.update({layer + rest: value for rest, value in parts[0].items()})
    _copy_own(table, ours, name)


def _are_same_parts(one: Mapping[Name, Json], other: Mapping[Name, Json]) -> bool:
    return one.keys() == other.keys() and all(are_same(one[rest], other[rest]) for rest in one)


def _from(names: Mapping[Name, Any], top: Name) -> dict[Name, Any]:
    """What is at a name, and below it, by the rest of its name."""
    return {name[len(top) :]: v for name, v in names.items() if name[: len(top)] == top}


def _drop(names: dict[Name, Any], top: Name) -> None:
    for name in [name for name in names if name[: len(top)] == top]:
        del names[name]


def _copy_own(table: Table, ours: Table, name: Name) -> None:
    """What is said of the container itself is not the file's business."""
    table.classes |= {name: ours.classes[name]} if name in ours.classes else {}
    for option in ("depth", "remat", "unroll"):
        own = (*name, option)
        table.config |= {own: ours.config[own]} if own in ours.config else {}


def _unstack(table: Table, ours: Table, spot: _Spot) -> set[Name]:
    layer = (*spot.name, "layer")
    layers = _below(table.leaves, layer)
    items = _items(ours.leaves, spot.name)
    if not layers or not items:
        return set()
    made: dict[Name, Leaf] = {}
    for rest, leaf in layers.items():
        axis = spot.axis_of(layer + rest, items[0] + rest)
        if leaf.is_array and leaf.shape[axis : axis + 1] != (len(items),):
            return set()
        for i, item in enumerate(items):
            made[item + rest] = _part(leaf, axis, i) if leaf.is_array else leaf
    for rest in layers:
        del table.leaves[layer + rest]
    table.leaves.update(made)
    return {*made}


def _part(leaf: Leaf, axis: int, index: int) -> Leaf:
    shape = (*leaf.shape[:axis], *leaf.shape[axis + 1 :])
    return leaf._replace(shape=shape, source=Unstacked(cast("Source", leaf.source), axis, index))


def _unstack_config(table: Table, ours: Table, name: Name) -> None:
    items = _items(ours.classes, name)
    if not items:
        return
    for names in (table.config, table.classes):
        layer = _from(names, (*name, "layer"))
        _drop(names, name)
        for item in items:
            names.update({item + rest: value for rest, value in layer.items()})
    _copy_own(table, ours, name)


# ---- constrained values

_INNER = ("unconstrained",)


def constrained(
    theirs: Table,
    ours: Table,
    nodes: Mapping[Name, Any],
    renamed: Mapping[Name, Name],
    where: str,
) -> Table:
    """A file's table with the arrays that store constrained values, instead of these.

    The file's value has no constraint: it is older than that, of a model that was resolved, or of
    other tools. Or it has another one: the same numbers without bounds would be other values. Where
    the file's constraint cannot be rebuilt, the array is left out.

    Args:
        theirs: the file's table, with the names of `like`.
        ours: that of `like`.
        nodes: the Modules of `like` by name.
        renamed: the old names of the leaves that got another from the user.
        where: the call, for errors.

    Raises:
        ArgumentError: the user says that a constrained value is none.
    """
    names = [n for n, x in nodes.items() if isinstance(x, Constrained)]
    names = [n for n in names if n + _INNER in ours.leaves]
    if theirs.classes:
        for name in names:
            _check_is_not_clear(name, renamed.get(name + _INNER), where)
    clear = {n for n in names if n in theirs.leaves and n + _INNER not in theirs.leaves}
    others = {n + _INNER: n for n in names if _has_other_constraint(theirs, ours, n)}
    if not clear and not others:
        return theirs
    made = theirs.copy()
    made.leaves = {}
    for name, leaf in theirs.leaves.items():
        if name in others:
            plain = others[name]
            # What is not registered cannot be asked for its values.
            with suppress(FileError):
                old = _read_constraint(theirs, plain, where)
                new = _Changed(old, nodes[plain])
                made.leaves[name] = _brought_in(new, leaf, ours.leaves[name], plain, where)
        elif name in clear:
            inner = name + _INNER
            made.leaves[inner] = _brought_in(nodes[name], leaf, ours.leaves[inner], name, where)
        else:
            made.leaves[name] = leaf
    return made


class _Changed(NamedTuple):
    """Takes in what stands for a value under one constraint, for another."""

    old: Constraint
    new: Constrained


def _has_other_constraint(theirs: Table, ours: Table, name: Name) -> bool:
    key = (*name, "constraint")
    is_told = key in theirs.config and key in ours.config
    return is_told and not are_same(theirs.config[key], ours.config[key])


def _read_constraint(theirs: Table, name: Name, where: str) -> Constraint:
    reader, written = ConfigurationReader(where), theirs.config[(*name, "constraint")]
    found = reader.read(written, ".".join(name))
    if not isinstance(found, Constraint):
        raise reader.malformed(shown_name(name), written)
    return found


def _take_in(ours: Constrained | _Changed, value: Any, name: str) -> Any:
    """The array that stands for a value; of shapes alone, its shape."""
    if isinstance(ours, _Changed):
        is_abstract = isinstance(value, jax.ShapeDtypeStruct)
        axes = count_made_as_one(ours.new)
        forward = mapped(ours.old.forward, axes if np.ndim(value) >= axes else 0)
        value = jax.eval_shape(forward, value) if is_abstract else forward(value)
        ours = ours.new
    return take_in(ours.constraint, value, name, ours).unconstrained


def _brought_in(
    node: Constrained | _Changed, leaf: Leaf, ours: Leaf, name: Name, where: str
) -> Leaf:
    """The entry of the array that a constrained value becomes."""
    number = leaf.form.get("value")
    if not leaf.is_array:
        if type(number) not in (int, float):
            return leaf
        leaf = Leaf({"is": "jax"}, (), ours.dtype)
    shape, text = leaf.shape, shown_name(name)
    # What it does not take keeps its shape, and is told to be no fit, or refused when it is read.
    with suppress(PytreemodError):
        given = jax.ShapeDtypeStruct(leaf.shape, cast("Any", leaf.dtype))
        shape = _take_in(node, given, text).shape
    make = ft.partial(_made, node, number=number, name=text, where=where)
    return leaf._replace(shape=tuple(shape), source=Clear(leaf.source, make))


def _made(
    node: Constrained | _Changed,
    array: Any,
    *,
    number: float | None,
    name: str,
    where: str,
) -> Any:
    """The array that stands for a value, in float32 or wider: it may be cast to that at once."""
    value = number if array is None else array
    dtype = jnp.dtype(getattr(value, "dtype", jnp.float32))
    wide = jax.dtypes.canonicalize_dtype(dtype) if dtype.itemsize > 4 else jnp.float32
    given = jnp.asarray(value, wide)
    try:
        return np.asarray(_take_in(node, given, name))
    except PytreemodError as error:
        got = f"{name}, which is refused"
        expected = "constrained values that like takes"
        raise FileError(where, expected, got, places=[str(error)]) from error


def _check_is_not_clear(name: Name, old: Name | None, where: str) -> None:
    """Refuse a constrained value under the name of its unconstrained array."""
    if old is None or old[-1:] != name[-1:]:
        return
    before, after = ".".join(old), ".".join(name)
    hint = ["the value is brought in, as by the constructor, under the name of the field:"]
    # Where the field has the same name here, there is nothing to rename.
    hint += ["pm.load(path, like)" if old == name else f'rename={{"{before}": "{after}"}}']
    expected = f"the array that stands for {after}"
    raise ArgumentError(f"{where}, rename", expected, f"{before!r}, a constrained value", hint=hint)


# ---- updates of low rank


def based(theirs: Table, nodes: Mapping[Name, Any], renamed: dict[Name, Name]) -> Table:
    """A file's table with matrices as the bases of updates of low rank in `like`.

    Args:
        theirs: the file's table, with the names of `like`.
        nodes: the Modules of `like` by name.
        renamed: the old names of leaves that have got others; it gets these.
    """
    bases = {
        name: (*name, "base")
        for name, node in nodes.items()
        if isinstance(node, LowRank) and name in theirs.leaves
    }
    bases = {name: inner for name, inner in bases.items() if inner not in theirs.leaves}
    if not bases:
        return theirs
    for name, inner in bases.items():
        renamed[inner] = renamed.get(name) or name
    made = theirs.copy()
    made.leaves = {bases.get(name, name): leaf for name, leaf in theirs.leaves.items()}
    return made
