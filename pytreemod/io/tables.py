"""A tree as two flat tables: its leaves by name, and its configuration by name.

Loading is to bring two such tables together, that of a file and that of `like`. What does not
depend on the values in them, such as names that have changed, or layers that are kept as one here
and as a list there, is done with the file's table before anything is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np

from pytreemod.errors import ArgumentError, FileError, explain
from pytreemod.io.configuration import Json, are_same
from pytreemod.io.leaf_names import joined, words_of
from pytreemod.tree.paths import plain_name
from pytreemod.typing import jtu


class Source(NamedTuple):
    """Where in the file the numbers of a leaf are."""

    names: tuple[str, ...]
    """Of one array; or of the layers', to be stacked."""

    row: int | None = None
    """Which part of the array's first axis; None for all of it."""


_NOWHERE = Source(())


@dataclass(frozen=True, slots=True)
class Leaf:
    """What is told of a leaf without its numbers."""

    form: dict[str, Json]
    """See `descriptions.leaf_form`; with "value" for what is no array."""

    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] | None = None
    source: Source = _NOWHERE

    @property
    def is_array(self) -> bool:
        """Whether it is one: of JAX, of NumPy, of keys."""
        return "value" not in self.form


@dataclass(slots=True)
class Table:
    """A tree by names."""

    leaves: dict[str, Leaf] = field(default_factory=dict[str, Leaf])
    config: dict[str, Json] = field(default_factory=dict[str, Json])
    """Each configuration by its name."""

    classes: dict[str, Json] = field(default_factory=dict[str, Json])
    """The class of each node that is no container of Python's, as it is written."""

    states: list[str] = field(default_factory=list[str])
    """Where States stand."""

    is_described: bool = True
    """False for a file that has nothing but arrays."""


def read_table(tree: Json, arrays: Mapping[str, Leaf]) -> Table:
    """The table of a described tree.

    Args:
        tree: what `descriptions.describe_tree` wrote.
        arrays: shape and dtype of each array by name.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the description is malformed.
    """
    table = Table()
    _read(table, tree, (), arrays)
    return table


_TOKENS = ("pytreemod.StateIndex", "pytreemod.RngStream")


def _word(step: Any) -> str:
    return plain_name((jtu.GetAttrKey(step if isinstance(step, str) else repr(step)),))


def _read(table: Table, node: Json, name: tuple[str, ...], arrays: Mapping[str, Leaf]) -> None:
    if node is None:
        return
    kind, content = next(iter(node.items()))
    if kind == "leaf":
        if not isinstance(content, str) or content in table.leaves:
            raise ValueError(content)
        form = {key: value for key, value in node.items() if key != "leaf"}
        told = Leaf(form) if "value" in form else replace(arrays[content], form=form)
        table.leaves[content] = told
        return
    if kind in ("list", "tuple"):
        children = [(str(i), child) for i, child in enumerate(content)]
    elif kind in ("dict", "ordered", "default"):
        pairs = content[1] if kind == "default" else content
        children = [(_word(key), child) for key, child in pairs]
    elif kind == "state":
        table.states.append(joined(*name))
        children = [(joined(*map(_word, row[2]["path"][1])), row[3]) for row in content]
    else:
        children = _read_class(table, kind, content, joined(*name))
    for step, child in children:
        _read(table, child, (*name, step), arrays)


def _read_class(table: Table, kind: str, content: Any, name: str) -> list[tuple[str, Json]]:
    if not isinstance(content[0], str):
        raise ValueError(content[0])
    table.classes[name] = content[0]
    if kind in ("module", "struct"):
        for key, value in content[2].items():
            # A token's mark is its place in the model that its State was made with, and as much
            # the business of `like` as the place is.
            if content[0] not in _TOKENS:
                table.config[joined(name, _word(key))] = value
        return [(_word(key), child) for key, child in content[1].items()]
    if kind not in ("named", "node"):
        raise ValueError(kind)
    return [(_word(key), child) for key, child in content[1]]


# ---- names that have changed


def renamed_table(
    table: Table, rename: Mapping[str, str], where: str
) -> tuple[Table, dict[str, str]]:
    """A table under other names.

    Args:
        table: the file's.
        rename: from names in the file, of leaves or of nodes above them, to names in `like`.
        where: the call, for errors.

    Returns:
        The table, and the old name of each leaf that has another now.

    Raises:
        ArgumentError: an old name is not in the file, or two leaves get one name.
    """
    used: set[str] = set()

    def new_name(name: str) -> str:
        for old in sorted(rename, key=len, reverse=True):
            if name == old or old == "" or name.startswith(old + "."):
                used.add(old)
                rest = name[len(old) :].lstrip(".") if name != old else ""
                return joined(rename[old], rest)
        return name

    leaves: dict[str, Leaf] = {}
    changed: dict[str, str] = {}
    for name, leaf in table.leaves.items():
        new = new_name(name)
        if new in leaves:
            got = f"{new!r} for two: {changed.get(new, new)!r} and {name!r}"
            raise ArgumentError(explain(f"{where}, rename", "a name for each leaf", got))
        leaves[new] = leaf
        if new != name:
            changed[new] = name
    config = {new_name(name): value for name, value in table.config.items()}
    classes = {new_name(name): value for name, value in table.classes.items()}
    states = [new_name(name) for name in table.states]
    lost = [name for name in rename if name not in used]
    if lost:
        got = f"{lost[0]!r}, which is not in it"
        cure = ["it has, for instance:", *list(table.leaves)[:3]]
        raise ArgumentError(explain(f"{where}, rename", "names in the file", got, cure=cure))
    return Table(leaves, config, classes, states, table.is_described), changed


# ---- layers that are kept as one, and layers in a list


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
    moved: set[str] = set()
    table = replace(
        theirs,
        leaves=dict(theirs.leaves),
        config=dict(theirs.config),
        classes=dict(theirs.classes),
    )
    ours_at, theirs_at = _stacks_in(ours), _stacks_in(theirs)
    for name, depth in ours_at.items():
        if name not in theirs_at:
            for spot in _spots(name, ours):
                moved |= _stack(table, spot, depth, where)
            _stack_config(table, ours, name, depth, where)
    for name in theirs_at:
        if name not in ours_at:
            for spot in _spots(name, theirs):
                moved |= _unstack(table, ours, spot)
            _unstack_config(table, ours, name)
    return table, moved


def _stacks_in(table: Table) -> dict[str, int]:
    found = [name for name, cls in table.classes.items() if cls == "pytreemod.nn.Stack"]
    depths = {name: table.config.get(joined(name, "depth")) for name in found}
    return {name: depth for name, depth in depths.items() if type(depth) is int}


def _spots(name: str, table: Table) -> list[str]:
    """Where the leaves of a Stack are: at its own place, and at that of its tokens in a State."""
    steps = words_of(name)
    ends = [joined(*steps[i:]) for i in range(len(steps) + 1)]
    return [name, *(joined(state, end) for state in table.states for end in ends)]


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


def _stack(table: Table, spot: str, depth: int, where: str) -> set[str]:
    items = _items(table.leaves, spot)
    if len(items) != depth or _below(table.leaves, joined(spot, "layer")):
        return set()
    parts = [_below(table.leaves, item) for item in items]
    made: dict[str, Leaf] = {}
    for rest, first in parts[0].items():
        layers = [part.get(rest) for part in parts]
        if not all(leaf is not None and _are_alike(leaf, first) for leaf in layers):
            raise _differ(where, joined(spot, "layer", rest), items)
        if first.is_array:
            names = tuple(cast("Leaf", leaf).source.names[0] for leaf in layers)
            shape = (depth, *first.shape)
            made[joined(spot, "layer", rest)] = replace(first, shape=shape, source=Source(names))
        else:
            made[joined(spot, "layer", rest)] = first
    for item, part in zip(items, parts, strict=True):
        for rest in part:
            del table.leaves[joined(item, rest)]
    table.leaves.update(made)
    return set(made)


def _are_alike(a: Leaf, b: Leaf) -> bool:
    return (a.form, a.shape, a.dtype) == (b.form, b.shape, b.dtype)


def _differ(where: str, name: str, items: list[str]) -> FileError:
    return FileError(
        explain(
            where,
            "layers that differ in their numbers only, for they are to be one Stack",
            f"different ones at {name}",
            places=[f"in the file: {', '.join(items[:4])}"],
        )
    )


def _stack_config(table: Table, ours: Table, name: str, depth: int, where: str) -> None:
    items = _items(table.classes, name)
    if len(items) != depth:
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


def _unstack(table: Table, ours: Table, spot: str) -> set[str]:
    layers = _below(table.leaves, joined(spot, "layer"))
    items = _items(ours.leaves, spot)
    if not layers or not items:
        return set()
    made: dict[str, Leaf] = {}
    for rest, leaf in layers.items():
        if leaf.is_array and leaf.shape[:1] != (len(items),):
            return set()
        for i, item in enumerate(items):
            source = Source(leaf.source.names, i)
            part = replace(leaf, shape=leaf.shape[1:], source=source) if leaf.is_array else leaf
            made[joined(item, rest)] = part
    for rest in layers:
        del table.leaves[joined(spot, "layer", rest)]
    table.leaves.update(made)
    return set(made)


def _unstack_config(table: Table, ours: Table, name: str) -> None:
    for names in (table.config, table.classes):
        layer = _from(names, joined(name, "layer"))
        _drop(names, name)
        for item in _items(ours.classes, name):
            names.update({joined(item, rest): value for rest, value in layer.items()})
    _copy_own(table, ours, name)
