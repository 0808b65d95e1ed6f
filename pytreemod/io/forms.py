"""Other forms of one model: a file may have one form, and `like` another.

Owns: functions from a file's table, with the names of `like`, to a table in the form of `like`.
Layers are one `Stack`, or a list ([`restacked`][pytreemod.io.forms.restacked]). A value is
constrained, or has another constraint ([`constrained`][pytreemod.io.forms.constrained]): then the
value of the file is converted as the constructor would convert it. A matrix is the base of an
update of low rank ([`based`][pytreemod.io.forms.based]). Nothing is read here: a leaf of the new
table describes its sources.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, FileError, PytreemodError, SpecError
from pytreemod.io.configuration import ConfigurationReader, Json, are_same
from pytreemod.io.tables import (
    Converted,
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

# ---- layers as one Stack, as one Ensemble, or in a list

STACK, ENSEMBLE = "pytreemod.nn.Stack", "pytreemod.nn.Ensemble"
_FIELDS = {STACK: ("layer", "depth"), ENSEMBLE: ("member", "n")}
"""The fields of each with its stacked layers, or members, and with their number."""
_Shared = Mapping[Name, frozenset[Name]]


class _Held(NamedTuple):
    """Layers that are stacked."""

    cls: str
    size: int

    @property
    def field(self) -> str:
        return _FIELDS[self.cls][0]


class _Stacked(NamedTuple):
    """The location of the leaves of stacked layers.

    A Stack adds an axis to the arrays of its layers, after the axes of the Stacks and Ensembles
    that contain it, and before all others. Leaves that the members of an Ensemble share have no
    axis of members.
    """

    name: Name
    axis: int
    """The axis of the layers."""
    shared: _Shared
    """By the name of each Ensemble, the names of the leaves that its members share."""

    def axis_of(self, *names: Name) -> int:
        """Return the axis of a leaf, given its names in the file and in `like`."""
        return self.axis - sum(_is_below(names, tops) for tops in self.shared.values())

    def is_shared(self, *names: Name) -> bool:
        """Whether a leaf is stored once for all members."""
        return _is_below(names, self.shared.get(self.name, ()))


def _is_below(names: Iterable[Name], tops: Iterable[Name]) -> bool:
    return any(name[: len(top)] == top for name in names for top in tops)


def restacked(
    theirs: Table,
    ours: Table,
    where: str,
    *,
    ensembles: bool = False,
    chosen: Sequence[Name] | None = None,
) -> tuple[Table, set[Name]]:
    """Convert a file's table to the layers of `like`: as one `Stack`, or in a list.

    Args:
        theirs: the file's table.
        ours: the table of `like`.
        where: the call, for errors.
        ensembles: whether the members of an `Ensemble` are such layers, too.
        chosen: the names of the requested leaves, if not all are requested. Then `like` may have
            only the first layers of the file, and other leaves may be in any form.

    Returns:
        The table, and the names of the leaves that were stacked, or are a part of a stack.

    Raises:
        FileError: if a layer is missing, or if layers for one Stack differ in more than their
            numbers.
    """
    kinds = (STACK, ENSEMBLE) if ensembles else (STACK,)
    part = chosen is not None
    wanted = _held_in(ours, kinds)
    if _held_in(theirs, kinds) == wanted:
        return theirs, set()
    table = theirs.copy()
    moved: set[Name] = set()
    shared = _shared_in(theirs, ours)
    while True:
        before = {*table.leaves}, {*table.classes}
        for name, held in wanted.items():
            there = _held_in(table, kinds).get(name)
            if there is None:
                asked = chosen is None or any(leaf[: len(name)] == name for leaf in chosen)
                moved |= _stack_all(table, ours, name, held, shared, part, asked, where)
            elif there != held and (there.size == held.size or (part and there.size > held.size)):
                moved |= _reform(table, ours, name, there, held, shared, where)
        for name, held in _held_in(table, kinds).items():
            # Layers without arrays have a number, too.
            count = len(_items(ours.classes, name))
            if name not in wanted and (part or count in (0, held.size)):
                moved |= _unstack_all(table, ours, name, held, shared, part)
        # Nested layers get their new names only after the layers around them.
        if before == ({*table.leaves}, {*table.classes}):
            return table, moved


def numbered(table: Table, is_meant: Callable[[Name, str], bool]) -> Table:
    """Return a table with the layers of its Stacks under their numbers, as in a list.

    Args:
        table: any table.
        is_meant: whether to convert a Stack, given its name and the name of its field.
    """
    made = table
    done: set[Name] = set()
    while True:
        # Nested Stacks have other names once the Stacks around them are converted.
        found = [(n, held) for n, held in _held_in(made, (STACK,)).items() if n not in done]
        if not found:
            return made
        name, held = found[0]
        done.add(name)
        if held.size and is_meant(name, held.field):
            made = made.copy() if made is table else made
            _number(made, name, held)


def _number(table: Table, name: Name, held: _Held) -> None:
    items = [(*name, str(i)) for i in range(held.size)]
    for stacked in _stacked_in(name, table, _shared_in(table)):
        _unstack(table, stacked, held, stacked.name)
    for names in (table.config, table.classes):
        values = cast("dict[Name, Any]", names)
        layer = _from(values, (*name, held.field))
        _drop(values, name)
        for item in items:
            values.update({item + rest: value for rest, value in layer.items()})


def other_forms(theirs: Table, ours: Table, ensembles: bool) -> dict[Name, str]:
    """Return a line for each name with layers in another form in the file than in `like`.

    It explains everything that is missing and unexpected below it.
    """
    kinds = (STACK, ENSEMBLE)
    one, two = _held_in(ours, kinds), _held_in(theirs, kinds)
    lines: dict[Name, str] = {}
    for name in {**one, **two}:
        forms = [_form_of(table, name) for table in (ours, theirs)]
        if None in forms or forms[0] == forms[1]:
            continue
        (mine, n), (other, m) = cast("list[tuple[str, int]]", forms)
        is_asked_for = ensembles or "Ensemble" not in (mine, other)
        if n == m and is_asked_for:
            continue
        hint = "" if is_asked_for else " (see restack=)"
        hint += " (see only=)" if m > n else ""
        text = f"{mine} of {n} in like, {other} of {m} in the file{hint}"
        lines[name] = f"{shown_name(name)}: {text}"
    return lines


def _form_of(table: Table, name: Name) -> tuple[str, int] | None:
    held = _held_in(table, (STACK, ENSEMBLE)).get(name)
    if held is not None:
        return held.cls.rpartition(".")[2], held.size
    count = len(_items(table.leaves, name))
    return ("list", count) if count else None


def _held_in(table: Table, kinds: Sequence[str]) -> dict[Name, _Held]:
    found: dict[Name, _Held] = {}
    for name, cls in table.classes.items():
        if cls in kinds:
            size = table.config.get((*name, _FIELDS[cls][1]))
            if type(size) is int:
                found[name] = _Held(cls, size)
    return found


def _shared_in(*tables: Table) -> _Shared:
    """Return the shared leaves of each Ensemble, by its name, under the names of either table."""
    found: dict[Name, frozenset[Name]] = {}
    words = Words()
    for table in tables:
        for name, cls in table.classes.items():
            if cls != ENSEMBLE:
                continue
            # Paths in a member, as strings. Any other content is refused elsewhere.
            written: Any = table.config.get((*name, "shared"))
            tops: set[Name] = set()
            with suppress(AttributeError, SpecError, TypeError):
                for text in written.get("tuple", ()):
                    steps = [words[step] for step in parse_pattern(text)]
                    tops.add((*name, "member", *steps))
            found[name] = found.get(name, frozenset()) | tops
    return found


def _stacked_in(name: Name, table: Table, shared: _Shared) -> list[_Stacked]:
    """Return the locations of the leaves of layers, in the model and in the State.

    A State may have been made with a part of the model, so its names may have only the last
    components.
    """
    around = [(*n, _FIELDS[cls][0]) for n, cls in table.classes.items() if cls in _FIELDS]
    outer = [len(words) - 1 for words in around if name[: len(words)] == words]
    found = [_Stacked(name, len(outer), shared)]
    for state in table.states:
        for i in range(len(name) + 1):
            found.append(_Stacked(state + name[i:], sum(length >= i for length in outer), {}))
    return found


def _below(names: Mapping[Name, Any], top: Name) -> dict[Name, Any]:
    """Return the entries below a name, by the rest of their names."""
    n = len(top)
    return {name[n:]: value for name, value in names.items() if len(name) > n and name[:n] == top}


def _items(names: Mapping[Name, Any], stacked: Name) -> list[Name]:
    """Return the names of the items of a list, without gaps."""
    # A Sequential stores its layers in a field.
    for base in ((*stacked, "layers"), stacked):
        n = len(base)
        there = {name[n] for name in names if len(name) > n and name[:n] == base}
        items: list[Name] = []
        while str(len(items)) in there:
            items.append((*base, str(len(items))))
        if items:
            return items
    return []


def _members(names: Mapping[Name, Any], items: Sequence[Name]) -> list[dict[Name, Any]]:
    """Return the entries at and below each of several names, by the rest of theirs; in one pass."""
    found: dict[Name, dict[Name, Any]] = {item: {} for item in items}
    n = len(items[0])
    for name, value in names.items():
        if name[:n] in found:
            found[name[:n]][name[n:]] = value
    return [*found.values()]


def _stack_all(
    table: Table,
    ours: Table,
    name: Name,
    held: _Held,
    shared: _Shared,
    part: bool,
    asked: bool,
    where: str,
) -> set[Name]:
    """Stack the items of a list."""
    moved: set[Name] = set()
    if asked:
        _check_numbers(table, ours, name, held, part, where)
    for stacked in _stacked_in(name, ours, shared):
        items = _items(table.leaves, stacked.name)
        # A State may have another list with as many items.
        if len(items) == held.size or (part and len(items) > held.size > 0):
            moved |= _stack(table, ours, stacked, held, items[: held.size], part, asked, where)
    items = _items(table.classes, name)
    if items and (len(items) == held.size or (part and len(items) > held.size > 0)):
        _stack_config(table, ours, name, held, items[: held.size], where)
    return moved


def _stack(
    table: Table,
    ours: Table,
    stacked: _Stacked,
    held: _Held,
    items: Sequence[Name],
    part: bool,
    asked: bool,
    where: str,
) -> set[Name]:
    layer = (*stacked.name, held.field)
    if not items or not _below(ours.leaves, layer) or _below(table.leaves, layer):
        return set()
    members = _members(table.leaves, items)
    if any(member.keys() != members[0].keys() for member in members):
        if not asked:
            return set()
        raise _lack(members, items, where)
    made: dict[Name, Leaf] = {}
    for rest, first in members[0].items():
        layers = [member.get(rest) for member in members]
        name = layer + rest
        if not all(cast("Leaf", leaf)[:3] == first[:3] for leaf in layers):
            raise _differ(where, name, items)
        if stacked.is_shared(name):
            if part:
                continue
            raise _are_several(where, name, items)
        sources = tuple(cast("Source", cast("Leaf", leaf).source) for leaf in layers)
        axis = stacked.axis_of(name, items[0] + rest)
        made[name] = _stacked(first, sources, axis) if first.is_array else first
    for item, member in zip(items, members, strict=True):
        for rest in member:
            del table.leaves[item + rest]
    table.leaves.update(made)
    return {*made}


def _check_numbers(
    table: Table, ours: Table, name: Name, held: _Held, part: bool, where: str
) -> None:
    """Refuse layers if one is missing, but a later one exists."""
    if not _below(ours.leaves, (*name, held.field)):
        return
    for base in ((*name, "layers"), name):
        n = len(base)
        words = {name[n] for name in table.leaves if len(name) > n and name[:n] == base}
        numbers = {int(word) for word in words if word.isdecimal()}
        highest = max(numbers, default=-1)
        count = min(held.size, highest) if part else highest
        # A file may claim any number: count only the first few that are missing.
        lacking = [*islice((i for i in range(count) if i not in numbers), 8)]
        if lacking:
            places = [f"{shown_name((*base, str(i)))}: missing" for i in lacking]
            expected = f"layers numbered from 0, to become one {held.cls.rpartition('.')[2]}"
            there = sorted(numbers)
            got = f"{', '.join(map(str, there[:8]))}{', ...' * (len(there) > 8)}"
            raise FileError(where, expected, got, at=places)


def _lack(members: Sequence[Mapping[Name, Leaf]], items: Sequence[Name], where: str) -> FileError:
    names = dict.fromkeys(rest for member in members for rest in member)
    places = [
        f"{shown_name(item + rest)}: missing"
        for item, member in zip(items, members, strict=True)
        for rest in names
        if rest not in member
    ]
    return FileError(where, _ALIKE, "layers with different leaves", at=places)


_ALIKE = "layers that differ only in their numbers, to become one Stack"


def _stacked(first: Leaf, sources: tuple[Source, ...], axis: int) -> Leaf:
    shape = (*first.shape[:axis], len(sources), *first.shape[axis:])
    return first._replace(shape=shape, source=_whole_of(sources, axis) or Stacked(sources, axis))


def _whole_of(sources: tuple[Source, ...], axis: int) -> Source | None:
    """Return the source that these are all parts of, in order; None if there is none."""
    first = sources[0]
    if not isinstance(first, Unstacked) or (first.axis, first.size) != (axis, len(sources)):
        return None
    is_whole = all(
        isinstance(source, Unstacked)
        and source.whole is first.whole
        and (source.axis, source.at) == (axis, i)
        for i, source in enumerate(sources)
    )
    return first.whole if is_whole else None


def _differ(where: str, name: Name, items: Sequence[Name]) -> FileError:
    return FileError(
        where,
        _ALIKE,
        f"different layers at {shown_name(name)}",
        at=[f"in the file: {', '.join(map(shown_name, items[:4]))}"],
    )


def _are_several(where: str, name: Name, items: Sequence[Name]) -> FileError:
    return FileError(
        where,
        f"one array for {shown_name(name)}, which the members of like share",
        f"one for each of {len(items)}",
        hint=[
            "load into an Ensemble that shares nothing, or keep the array of like:",
            f'pm.load(..., restack=True, only=~pm.select.path("{".".join(name)}"))',
        ],
    )


def _stack_config(
    table: Table, ours: Table, name: Name, held: _Held, items: Sequence[Name], where: str
) -> None:
    layer = (*name, held.field)
    for names in (table.config, table.classes):
        parts = _members(names, items)
        if not all(_are_same_parts(part, parts[0]) for part in parts):
            raise _differ(where, layer, items)
        _drop(names, name)
        names.update({layer + rest: value for rest, value in parts[0].items()})
    _copy_own(table, ours, name)


def _are_same_parts(one: Mapping[Name, Json], other: Mapping[Name, Json]) -> bool:
    return one.keys() == other.keys() and all(are_same(one[rest], other[rest]) for rest in one)


def _from(names: Mapping[Name, Any], top: Name) -> dict[Name, Any]:
    """Return the entries at and below a name, by the rest of their names."""
    return {name[len(top) :]: v for name, v in names.items() if name[: len(top)] == top}


def _drop(names: dict[Name, Any], top: Name) -> None:
    for name in [name for name in names if name[: len(top)] == top]:
        del names[name]


def _copy_own(table: Table, ours: Table, name: Name) -> None:
    """Take the configuration of the container itself from `like`, not from the file."""
    if name in ours.classes:
        table.classes[name] = ours.classes[name]
    for own in [own for own in table.config if own[:-1] == name]:
        del table.config[own]
    table.config |= {own: value for own, value in ours.config.items() if own[:-1] == name}


def _unstack_all(
    table: Table, ours: Table, name: Name, held: _Held, shared: _Shared, part: bool
) -> set[Name]:
    """Split stacked layers into the items of a list."""
    moved: set[Name] = set()
    for stacked in _stacked_in(name, table, shared):
        count = len(_items(ours.leaves, stacked.name))
        if count == held.size or (part and count):
            moved |= _unstack(table, stacked, held, _items(ours.leaves, stacked.name)[0][:-1])
    items = _items(ours.classes, name)
    if items:
        items = [(*items[0][:-1], str(i)) for i in range(held.size)]
        for names in (table.config, table.classes):
            layer = _from(names, (*name, held.field))
            _drop(names, name)
            for item in items:
                names.update({item + rest: value for rest, value in layer.items()})
        _copy_own(table, ours, name)
    return moved


def _unstack(table: Table, stacked: _Stacked, held: _Held, base: Name) -> set[Name]:
    layer = (*stacked.name, held.field)
    layers = _below(table.leaves, layer)
    items = [(*base, str(i)) for i in range(held.size)]
    made: dict[Name, Leaf] = {}
    for rest, leaf in layers.items():
        axis = stacked.axis_of(layer + rest, items[0] + rest) if items else 0
        is_one = not leaf.is_array or stacked.is_shared(layer + rest)
        if not is_one and leaf.shape[axis : axis + 1] != (held.size,):
            return set()
        for i, item in enumerate(items):
            made[item + rest] = leaf if is_one else _part(leaf, axis, i)
    for rest in layers:
        del table.leaves[layer + rest]
    table.leaves.update(made)
    return {*made}


def _part(leaf: Leaf, axis: int, index: int) -> Leaf:
    shape = (*leaf.shape[:axis], *leaf.shape[axis + 1 :])
    source = Unstacked(cast("Source", leaf.source), axis, index, leaf.shape[axis])
    return leaf._replace(shape=shape, source=source)


def _reform(
    table: Table,
    ours: Table,
    name: Name,
    there: _Held,
    held: _Held,
    shared: _Shared,
    where: str,
) -> set[Name]:
    """Turn a Stack into an Ensemble, or vice versa; use only the first layers if there are more."""
    moved: set[Name] = set()
    for stacked in _stacked_in(name, table, shared):
        old, new = (*stacked.name, there.field), (*stacked.name, held.field)
        for rest, leaf in _below(table.leaves, old).items():
            axis = stacked.axis_of(old + rest, new + rest)
            is_one = not leaf.is_array or stacked.is_shared(old + rest)
            if there.size != held.size and not is_one and leaf.shape[axis] == there.size:
                parts = [_part(leaf, axis, i) for i in range(held.size)]
                sources = tuple(cast("Source", part.source) for part in parts)
                leaf = _stacked(parts[0], sources, axis)
            if stacked.is_shared(new + rest) and not is_one:
                raise _are_several(where, new + rest, [name])
            del table.leaves[old + rest]
            table.leaves[new + rest] = leaf
            moved.add(new + rest)
        for names in (table.config, table.classes):
            parts_of = cast("dict[Name, Any]", names)
            for rest, value in _from(parts_of, old).items():
                del parts_of[old + rest]
                parts_of[new + rest] = value
    _copy_own(table, ours, name)
    return moved


# ---- constrained values

_INNER: Name = ("unconstrained",)


def constrained(
    theirs: Table,
    ours: Table,
    nodes: Mapping[Name, Any],
    states: Sequence[Name],
    renamed: Mapping[Name, Name],
    where: str,
) -> Table:
    """Replace constrained values in a file's table by the arrays that store them.

    The value in the file may have no constraint: it is from an older file, a resolved model or
    another tool. Or it has another constraint, under which the same numbers mean other values. If
    the constraint of the file cannot be rebuilt, the array is left out. So are the moments of an
    optimizer: they are no values, and belong to the unconstrained array of the file.

    Args:
        theirs: the file's table, with the names of `like`.
        ours: the table of `like`.
        nodes: the Modules of `like` by name.
        states: the nodes of `like` below which Modules may have moments.
        renamed: the old names of the leaves that the user renamed.
        where: the call, for errors.

    Raises:
        ArgumentError: if the user renames a constrained value to its unconstrained array.
    """
    names = [n for n, x in nodes.items() if isinstance(x, Constrained)]
    names = [n for n in names if n + _INNER in ours.leaves]
    if theirs.classes:
        for name in names:
            _check_is_not_clear(name, renamed.get(name + _INNER), where)
    clear = {n for n in names if n in theirs.leaves and n + _INNER not in theirs.leaves}
    others: dict[Name, Name] = {
        n + _INNER: n for n in names if _has_other_constraint(theirs, ours, n)
    }
    if not clear and not others:
        return theirs
    made = theirs.copy()
    made.leaves = {}
    for name, leaf in theirs.leaves.items():
        if (name in others or name in clear) and any(name[: len(s)] == s for s in states):
            continue
        if name in others:
            plain = others[name]
            # A constraint of the user's own cannot compute its values.
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
    """Converts the array of a value from one constraint to another."""

    old: Constraint
    new: Constrained


def _has_other_constraint(theirs: Table, ours: Table, name: Name) -> bool:
    key = (*name, "constraint")
    is_known = key in theirs.config and key in ours.config
    return is_known and not are_same(theirs.config[key], ours.config[key])


def _read_constraint(theirs: Table, name: Name, where: str) -> Constraint:
    reader, written = ConfigurationReader(where), theirs.config[(*name, "constraint")]
    found = reader.read(written, ".".join(name))
    if not isinstance(found, Constraint):
        raise reader.malformed(shown_name(name), written)
    return found


def _take_in(ours: Constrained | _Changed, value: Any, name: str) -> Any:
    """Return the unconstrained array of a value; given an abstract value, its abstract form."""
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
    """Return the entry of the array that stores a constrained value."""
    number = leaf.form.get("value")
    if not leaf.is_array:
        if type(number) not in (int, float):
            return leaf
        leaf = Leaf({"is": "jax"}, (), ours.dtype)
    shape, text = leaf.shape, shown_name(name)
    # A value that is refused has its old shape: a misfit, or refused again when it is read.
    with suppress(PytreemodError):
        given = jax.ShapeDtypeStruct(leaf.shape, cast("Any", leaf.dtype))
        shape = _take_in(node, given, text).shape
    make = ft.partial(_made, node, number=number, name=text, where=where)
    return leaf._replace(shape=tuple(shape), source=Converted(leaf.source, make))


def _made(
    node: Constrained | _Changed,
    array: Any,
    *,
    number: float | None,
    name: str,
    where: str,
) -> Any:
    """Return the unconstrained array of a value, in float32 or wider: a cast may follow."""
    value = number if array is None else array
    dtype = jnp.dtype(getattr(value, "dtype", jnp.float32))
    wide = jax.dtypes.canonicalize_dtype(dtype) if dtype.itemsize > 4 else jnp.float32
    given = jnp.asarray(value, wide)
    try:
        return np.asarray(_take_in(node, given, name))
    except PytreemodError as error:
        got = f"{name}, which its constraint refuses"
        expected = "constrained values that like takes"
        raise FileError(where, expected, got, at=[str(error)]) from error


def _check_is_not_clear(name: Name, old: Name | None, where: str) -> None:
    """Refuse a constrained value under the name of its unconstrained array."""
    if old is None or old[-1:] != name[-1:]:
        return
    before, after = ".".join(old), ".".join(name)
    hint = ["the name of the field loads the value, and converts it as the constructor does:"]
    # If the field has the same name here, no rename is needed.
    hint += ["pm.load(path, like)" if old == name else f'rename={{"{before}": "{after}"}}']
    expected = f"the unconstrained array of {after}"
    raise ArgumentError(f"{where}, rename", expected, f"{before!r}, a constrained value", hint=hint)


# ---- updates of low rank


def based(theirs: Table, nodes: Mapping[Name, Any], renamed: dict[Name, Name]) -> Table:
    """Make matrices of a file's table the bases of updates of low rank in `like`.

    Args:
        theirs: the file's table, with the names of `like`.
        nodes: the Modules of `like` by name.
        renamed: the old names of renamed leaves; it gets these, too.
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
