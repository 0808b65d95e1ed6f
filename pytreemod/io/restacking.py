"""Layers that are kept as one `Stack`, and layers in a list: the one becomes the other.

Owns: what of a file's table has other names for that, and along which axis its arrays are brought
together, or taken apart. A Stack adds an axis to the arrays of its layers, in front of all but
those of the Stacks and the Ensembles that it is in itself. What members of an Ensemble share has no
axis of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, cast

from pytreemod.errors import FileError, SpecError
from pytreemod.io.configuration import are_same
from pytreemod.io.leaf_names import ROOT_NAME, joined, words_of
from pytreemod.io.tables import Leaf, Source, Stacked, Table, Unstacked
from pytreemod.tree.paths import parse_pattern, plain_name
from pytreemod.typing import jtu

_Shared = Mapping[str, frozenset[str]]


class _Spot(NamedTuple):
    """Where leaves of a Stack's layers are."""

    name: str
    axis: int
    """Which one is that of the layers."""
    shared: _Shared
    """By the name of each Ensemble, the names of what its members share."""

    def axis_of(self, *names: str) -> int:
        """The axis of a leaf, by the names that it has in the file and in `like`."""
        found = [
            any(name == top or name.startswith(top + ".") for name in names for top in tops)
            for tops in self.shared.values()
        ]
        return self.axis - sum(found)


def restacked(theirs: Table, ours: Table, where: str) -> tuple[Table, set[str]]:
    """A file's table with its layers kept as `like` keeps them: as one `Stack`, or in a list.

    Args:
        theirs: the file's table.
        ours: that of `like`.
        where: the call, for errors.

    Returns:
        The table, and the names of the leaves that were stacked, or are a part of a stack.

    Raises:
        FileError: layers that differ in more than their numbers cannot be one Stack.
    """
    table = replace(
        theirs,
        leaves=dict(theirs.leaves),
        config=dict(theirs.config),
        classes=dict(theirs.classes),
    )
    moved: set[str] = set()
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
            f"{name or ROOT_NAME}: {text.format(depth, counts[name])}"
            for name, depth in _stacks_in(one).items()
            if name not in there and counts[name] not in (0, depth)
        ]
    return lines


def _stack_all(table: Table, ours: Table, shared: _Shared, where: str) -> set[str]:
    moved: set[str] = set()
    stacks, there = _stacks_in(ours), _stacks_in(table)
    for name, depth in stacks.items():
        if name not in there:
            for spot in _spots(name, ours, shared):
                moved |= _stack(table, ours, spot, depth, where)
            _stack_config(table, ours, name, depth, where)
    return moved


def _unstack_all(table: Table, ours: Table, shared: _Shared) -> set[str]:
    moved: set[str] = set()
    stacks, there = _stacks_in(table), _stacks_in(ours)
    for name, depth in stacks.items():
        # Layers without arrays have a number, too.
        if name not in there and len(_items(ours.classes, name)) in (0, depth):
            for spot in _spots(name, table, shared):
                moved |= _unstack(table, ours, spot)
            _unstack_config(table, ours, name)
    return moved


def _stacks_in(table: Table) -> dict[str, int]:
    found = _named(table, "pytreemod.nn.Stack")
    depths = {name: table.config.get(joined(name, "depth")) for name in found}
    return {name: depth for name, depth in depths.items() if type(depth) is int}


def _shared_in(*tables: Table) -> _Shared:
    """By the name of each Ensemble, what its members share, by the names of either table."""
    found: dict[str, frozenset[str]] = {}
    for table in tables:
        for name in _named(table, "pytreemod.nn.Ensemble"):
            # Texts of paths in a member. What else a file may have there is refused elsewhere.
            written: Any = table.config.get(joined(name, "shared"))
            tops: set[str] = set()
            with suppress(AttributeError, SpecError, TypeError):
                for text in written.get("tuple", ()):
                    steps = [jtu.GetAttrKey(step) for step in parse_pattern(text)]
                    tops.add(joined(name, "member", plain_name((*steps,))))
            found[name] = found.get(name, frozenset()) | tops
    return found


def _spots(name: str, table: Table, shared: _Shared) -> list[_Spot]:
    """Where the leaves of a Stack are: at its own place, and at that of its tokens in a State.

    A State may have been made with a part of the model, and knows no more than the last steps.
    """
    steps = words_of(name)
    holders = {"pytreemod.nn.Stack": "layer", "pytreemod.nn.Ensemble": "member"}
    around = [[*words_of(other), f] for cls, f in holders.items() for other in _named(table, cls)]
    outer = [len(words) - 1 for words in around if steps[: len(words)] == words]
    spots = [_Spot(name, len(outer), shared)]
    for state in table.states:
        for i in range(len(steps) + 1):
            axis = sum(length >= i for length in outer)
            spots.append(_Spot(joined(state, *steps[i:]), axis, {}))
    return spots


def _named(table: Table, cls: str) -> list[str]:
    return [name for name, found in table.classes.items() if found == cls]


def _below(names: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """What is below a name, by the rest of its name."""
    start = prefix + "." if prefix else ""
    return {name[len(start) :]: value for name, value in names.items() if name.startswith(start)}


def _items(names: Mapping[str, Any], spot: str) -> list[str]:
    """The names under which a list's items stand, as far as there are any."""
    # A Sequential keeps its layers in a field.
    for base in (joined(spot, "layers"), spot):
        items: list[str] = []
        while _is_there(names, item := joined(base, str(len(items)))):
            items.append(item)
        if items:
            return items
    return []


def _is_there(names: Mapping[str, Any], name: str) -> bool:
    return name in names or any(other.startswith(name + ".") for other in names)


# ---- into one


def _stack(table: Table, ours: Table, spot: _Spot, depth: int, where: str) -> set[str]:
    items, layer = _items(table.leaves, spot.name), joined(spot.name, "layer")
    # In a State, there may be something else with as many items.
    if not items or len(items) != depth or not _below(ours.leaves, layer):
        return set()
    if _below(table.leaves, layer):
        return set()
    parts = [_below(table.leaves, item) for item in items]
    made: dict[str, Leaf] = {}
    for rest, first in parts[0].items():
        layers = [part.get(rest) for part in parts]
        name = joined(layer, rest)
        if not all(leaf is not None and _are_alike(leaf, first) for leaf in layers):
            raise _differ(where, name, items)
        sources = tuple(cast("Source", cast("Leaf", leaf).source) for leaf in layers)
        axis = spot.axis_of(name, joined(items[0], rest))
        made[name] = _stacked(first, sources, axis) if first.is_array else first
    for item, part in zip(items, parts, strict=True):
        for rest in part:
            del table.leaves[joined(item, rest)]
    table.leaves.update(made)
    return set(made)


def _stacked(first: Leaf, sources: tuple[Source, ...], axis: int) -> Leaf:
    shape = (*first.shape[:axis], len(sources), *first.shape[axis:])
    return replace(first, shape=shape, source=Stacked(sources, axis))


def _are_alike(a: Leaf, b: Leaf) -> bool:
    return (a.form, a.shape, a.dtype) == (b.form, b.shape, b.dtype)


def _differ(where: str, name: str, items: list[str]) -> FileError:
    return FileError(
        where,
        "layers that differ in their numbers only, for they are to be one Stack",
        f"different ones at {name}",
        places=[f"in the file: {', '.join(items[:4])}"],
    )


def _stack_config(table: Table, ours: Table, name: str, depth: int, where: str) -> None:
    items = _items(table.classes, name)
    if not items or len(items) != depth:
        return
    for names in (table.config, table.classes):
        parts = [_from(names, item) for item in items]
        if any(not are_same(part, parts[0]) for part in parts):
            raise _differ(where, joined(name, "layer"), items)
        _drop(names, name)
        names.update({joined(name, "layer", rest): value for rest, value in parts[0].items()})
    _copy_own(table, ours, name)


def _from(names: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What is at a name, and below it, by the rest of its name."""
    own = {"": names[name]} if name in names else {}
    return own | _below(names, name)


def _drop(names: dict[str, Any], name: str) -> None:
    for old in [n for n in names if not name or n == name or n.startswith(name + ".")]:
        del names[old]


def _copy_own(table: Table, ours: Table, name: str) -> None:
    """What is said of the container itself is not the file's business."""
    table.classes |= {name: ours.classes[name]} if name in ours.classes else {}
    for option in ("depth", "remat", "unroll"):
        own = joined(name, option)
        table.config |= {own: ours.config[own]} if own in ours.config else {}


# ---- into a list


def _unstack(table: Table, ours: Table, spot: _Spot) -> set[str]:
    layers = _below(table.leaves, joined(spot.name, "layer"))
    items = _items(ours.leaves, spot.name)
    if not layers or not items:
        return set()
    made: dict[str, Leaf] = {}
    for rest, leaf in layers.items():
        axis = spot.axis_of(joined(spot.name, "layer", rest), joined(items[0], rest))
        if leaf.is_array and leaf.shape[axis : axis + 1] != (len(items),):
            return set()
        for i, item in enumerate(items):
            made[joined(item, rest)] = _part(leaf, axis, i) if leaf.is_array else leaf
    for rest in layers:
        del table.leaves[joined(spot.name, "layer", rest)]
    table.leaves.update(made)
    return set(made)


def _part(leaf: Leaf, axis: int, index: int) -> Leaf:
    shape = (*leaf.shape[:axis], *leaf.shape[axis + 1 :])
    return replace(leaf, shape=shape, source=Unstacked(cast("Source", leaf.source), axis, index))


def _unstack_config(table: Table, ours: Table, name: str) -> None:
    items = _items(ours.classes, name)
    if not items:
        return
    for names in (table.config, table.classes):
        layer = _from(names, joined(name, "layer"))
        _drop(names, name)
        for item in items:
            names.update({joined(item, rest): value for rest, value in layer.items()})
    _copy_own(table, ours, name)
