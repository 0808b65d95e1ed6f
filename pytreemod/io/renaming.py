"""Names by pattern: conversion of a table to the names that another program uses.

A rule maps names on one side to names on the other: from a file to `like` in a load, from a tree
to a file in a save. Both use the same function from tables to tables. They differ in which of a
rule's two functions is applied, and which one is its inverse. Each name is matched with each rule
once, by one regular expression, so that the time is proportional to names times rules. Nothing is
read here: a leaf describes its sources (`Source`).
"""

from __future__ import annotations

import functools as ft
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, SpecError, describe, nearest, short_dtype
from pytreemod.io.layout_rules import Packed, Relaid
from pytreemod.io.tables import (
    Converted,
    Joined,
    Leaf,
    Name,
    Sliced,
    Source,
    Table,
    Words,
    parse,
    shown_name,
)
from pytreemod.tree.paths import parse_pattern

NameTable: TypeAlias = Mapping[str, "str | Relaid | Packed | None"]
"""From patterns of names to names on the other side; None to skip an array."""

_FORMS = (Relaid, Packed)

# ---- patterns

_MARK = "\0"
"""Precedes each component of a name, for regular expressions, because a component may have dots."""
_WORDS = rf"((?:{_MARK}[^{_MARK}]*)*)"
_REST = rf"([^{_MARK}]*)"


def _marked(name: Sequence[str]) -> str:
    return "".join([_MARK + word for word in name])


class _Pattern:
    """A pattern for names: components, some of which are wildcards."""

    def __init__(self, text: str):
        self.text = text
        # As in a file, or as `select.path` accepts it, with brackets.
        words = Words()
        self.is_malformed = False
        self.words = parse(text)
        if "[" in text:
            try:
                self.words = tuple(words[step] for step in parse_pattern(text))
            except SpecError:
                self.is_malformed = True
        self.stars = sum(word.count("*") for word in self.words if word != "**")
        self.is_deep = "**" in self.words
        self.is_ended = self.words[-1:] == ("**",)
        """Otherwise the pattern matches everything below the name, too."""
        self.is_malformed |= self.words.count("**") > 1
        self.is_malformed |= any("**" in word != "**" for word in self.words)

    def pieces(self) -> list[str]:
        """Split it: literals at even indices, and between them `*`, `**` or "below"."""
        pieces = [""]
        for word in self.words:
            if word == "**":
                pieces += ["**", ""]
                continue
            first, *others = word.split("*")
            pieces[-1] += _MARK + first
            for other in others:
                pieces += ["*", other]
        return pieces if self.is_ended else [*pieces, "below", ""]


class NameRule:
    """One line of a table of names."""

    def __init__(self, old: _Pattern, new: tuple[_Pattern, ...], form: Relaid | Packed | None):
        self.old, self.new, self.form = old, new, form
        pieces = old.pieces()
        found = pieces[1::2]
        literals = map(re.escape, pieces[::2])
        groups = [_REST if kind == "*" else _WORDS for kind in found] + [""]
        self.regex = "".join([text for pair in zip(literals, groups, strict=True) for text in pair])
        self.groups = len(found)
        self._match = re.compile(self.regex).fullmatch
        # Where each match goes in a new name; if a pattern ends in `**`, there is no rest below it.
        stars = [i for i, kind in enumerate(found) if kind == "*"]
        others = {kind: i for i, kind in enumerate(found) if kind != "*"}
        self._filled: list[list[str | int]] = []
        for pattern in new:
            left = iter(stars)
            parts: list[str | int] = []
            for i, piece in enumerate(pattern.pieces()):
                if not i % 2:
                    parts.append(piece)
                elif piece == "*":
                    parts.append(next(left))
                elif piece in others:
                    parts.append(others[piece])
            is_longer = pattern.is_ended and "below" in others
            self._filled.append([*parts, others["below"]] if is_longer else parts)

    def is_about(self, name: Name) -> bool:
        """Whether its pattern matches a name."""
        return self._match(_marked(name)) is not None

    def names(self, groups: Sequence[str]) -> list[Name]:
        """Return the new names, given the matches."""
        texts = [
            "".join([groups[part] if isinstance(part, int) else part for part in parts])
            for parts in self._filled
        ]
        return [(*text.split(_MARK)[1:],) for text in texts]

    def reaches_into(self, name: Name, field: str) -> bool | None:
        """Whether the rule has a number below a node; None if it has the name of its field."""
        words, n = self.old.words, len(name)
        head = words[: words.index("**")] if self.old.is_deep else words
        if all(map(fnmatchcase, name, head)) and len(head) > n:
            return None if head[n] == field else True
        # After `**` a number may be anywhere.
        tail = words[len(head) + 1 :]
        return len(head) <= n and any("*" in word or word.isdigit() for word in tail)


class NameRules:
    """A table of names.

    Args:
        rules: its rules.
        where: the call, for errors.
        is_saving: whether it maps names in a tree to names in a file.
    """

    def __init__(self, rules: list[NameRule], where: str, is_saving: bool):
        self.rules, self.where, self.is_saving = rules, where, is_saving
        # One expression, whose first match wins: for 25 rules it takes less than half of the time
        # of separate expressions. An empty table matches nothing.
        lines = "|".join([f"({rule.regex})" for rule in rules])
        self._match = re.compile(lines or "(?!)").fullmatch
        self._by_group: dict[int, NameRule] = {}
        group = 1
        for rule in rules:
            self._by_group[group] = rule
            group += rule.groups + 1

    def find(self, name: Name) -> tuple[NameRule, Sequence[str]] | None:
        """Return the first rule that matches a name, and its matches."""
        found = self._match(_marked(name))
        if found is None:
            return None
        # The group around a rule ends last.
        group = cast("int", found.lastindex)
        rule = self._by_group[group]
        return rule, found.groups()[group : group + rule.groups]

    def are_about_layers(self, name: Name, field: str) -> bool:
        """Whether the rules name the layers of a Stack by their numbers, and not all as one."""
        found = [rule.reaches_into(name, field) for rule in self.rules]
        return None not in found and (self.is_saving or True in found)


def parse_rules(rename: Any, where: str, *, is_saving: bool = False) -> NameRules:
    """Parse a user's table.

    Args:
        rename: see `load` and `save`.
        where: the call, for errors.
        is_saving: whether it maps names in a tree to names in a file.

    Raises:
        ArgumentError: if it is no such table, or a pattern is malformed.
    """
    where = f"{where}, rename"
    entries = _checked_entries(rename, where, is_saving)
    rules: list[NameRule] = []
    malformed: list[str] = []
    uneven: list[str] = []
    for old, target in entries.items():
        form = None if isinstance(target, str) else target
        if isinstance(target, Packed):
            names = target.names
        elif isinstance(target, Relaid):
            names = (target.name,)
        else:
            names = () if target is None else (target,)
        pattern, others = _Pattern(old), [_Pattern(name) for name in names]
        malformed += [repr(each.text) for each in (pattern, *others) if each.is_malformed]
        for other in others:
            if other.stars != pattern.stars or (other.is_deep and not pattern.is_deep):
                uneven.append(f"{old!r}: {other.text!r}")
        if not malformed:
            rules.append(NameRule(pattern, (*others,), form))
    if malformed:
        expected = "components with dots between them, and at most one **"
        raise ArgumentError(where, expected, f"{len(malformed)} other", at=malformed)
    if uneven:
        expected = "as many * on both sides, and ** in a new name only if it is in the old one"
        hint = ["each * is a component, in order; ** is any number of components:"]
        hint += ['{"model.layers.*.mlp.**": "blocks.*.mlp.**"}']
        raise ArgumentError(where, expected, f"{len(uneven)} other", at=uneven, hint=hint)
    return NameRules(rules, where, is_saving)


def _checked_entries(rename: Any, where: str, is_saving: bool) -> NameTable:
    if isinstance(rename, Mapping):
        entries = cast("Mapping[Any, Any]", rename)
        kinds = (str, type(None), *_FORMS)
        if all(isinstance(name, str) and isinstance(new, kinds) for name, new in entries.items()):
            return entries
    sides = ("in the tree", "in the file") if is_saving else ("in the file", "in like")
    hint = [f"from names {sides[0]} to names {sides[1]}:", 'rename={"conv1": "input"}']
    raise ArgumentError(where, "a dict of names", describe(rename), hint=hint)


# ---- tables


def renamed_table(table: Table, rules: NameRules) -> tuple[Table, dict[Name, Name]]:
    """Rename the leaves of a table.

    Args:
        table: that of the file in a load, that of the tree in a save.
        rules: the rules; the first one that matches a name is applied.

    Returns:
        The table, and the old name of each renamed leaf.

    Raises:
        ArgumentError: if an old name does not exist, two leaves get one name, or an array does not
            have the form that a rule expects.
    """
    work = _Renaming(table, rules)
    for name, leaf in table.leaves.items():
        work.add(name, leaf)
    work.join()
    # Configuration of a matrix does not apply to its parts.
    made = Table(
        work.leaves,
        work.moved(table.config),
        work.moved(table.classes),
        [*work.moved(dict.fromkeys(table.states))],
    )
    lost = [rule for rule in rules.rules if rule not in work.used and rule.new]
    if lost:
        raise _unmatched(lost, table, rules)
    return made, work.old_names


class _Renaming:
    def __init__(self, table: Table, rules: NameRules):
        self.table, self.rules = table, rules
        self.leaves: dict[Name, Leaf] = {}
        self.old_names: dict[Name, Name] = {}
        self.used: set[NameRule] = set()
        self.changes: dict[NameRule, _Change] = {}
        self.parts: dict[Name, dict[int, tuple[Name, Leaf, Packed]]] = {}

    def moved(self, values: Mapping[Name, Any]) -> dict[Name, Any]:
        made: dict[Name, Any] = {}
        for name, value in values.items():
            found = self.rules.find(name)
            if found is None:
                made[name] = value
                continue
            rule, groups = found
            self.used.add(rule)
            if rule.new and not isinstance(rule.form, Packed):
                made[rule.names(groups)[0]] = value
        return made

    def add(self, name: Name, leaf: Leaf) -> None:
        found = self.rules.find(name)
        if found is None:
            self.put(name, name, leaf)
            return
        rule, groups = found
        self.used.add(rule)
        form, names = rule.form, rule.names(groups)
        if form is None:
            for new in names:
                self.put(new, name, leaf)
            return
        if rule not in self.changes:
            self.changes[rule] = _Change(form, self.rules)
        change = self.changes[rule]
        if not leaf.is_array:
            expected, places = "arrays, because their form changes", [shown_name(name)]
            raise ArgumentError(
                self.rules.where, expected, "a leaf that is not an array", at=places
            )
        if isinstance(form, Relaid):
            self.put(names[0], name, change.of(leaf, name))
        elif form.part is None:
            for new, part in zip(names, _split(leaf, form, name, self.rules.where), strict=True):
                self.put(new, name, change.of(part, name))
        else:
            self.add_part(names[0], name, change.of(leaf, name), form)

    def put(self, new: Name, old: Name, leaf: Leaf) -> None:
        if new in self.leaves:
            raise self.is_taken(new, self.old_names.get(new, new), old)
        self.leaves[new] = leaf
        if new != old:
            self.old_names[new] = old

    def add_part(self, new: Name, old: Name, leaf: Leaf, form: Packed) -> None:
        parts = self.parts.get(new)
        if parts is None:
            # Its position in the table is that of the first part.
            self.put(new, old, leaf)
            parts = self.parts[new] = {}
        part = cast("int", form.part)
        if part in parts:
            raise self.is_taken((f"part {part} of {shown_name(new)}",), parts[part][0], old)
        parts[part] = (old, leaf, form)

    def is_taken(self, new: Name, one: Name, two: Name) -> ArgumentError:
        got = f"{shown_name(new)!r} for two: {shown_name(one)!r} and {shown_name(two)!r}"
        return ArgumentError(self.rules.where, "a name for each leaf", got)

    def join(self) -> None:
        """Join the arrays of which all parts exist."""
        for new, parts in self.parts.items():
            self.leaves[new] = _joined(new, parts, self.count_of(parts), self.rules.where)

    def count_of(self, parts: Mapping[int, tuple[Name, Leaf, Packed]]) -> int:
        forms = [form for _, _, form in parts.values()]
        lengths = [len(form.sizes) for form in forms if form.sizes is not None]
        name = forms[0].names
        given = [
            r.form.part
            for r in self.rules.rules
            if isinstance(r.form, Packed) and r.form.names == name
        ]
        return max(*lengths, *[cast("int", part) + 1 for part in given], 1)


def _split(leaf: Leaf, form: Packed, name: Name, where: str) -> list[Leaf]:
    """Return the parts of an array."""
    count = len(form.names)
    axis = _axis_of(leaf, form.axis)
    length = None if axis is None else leaf.shape[axis]
    sizes = form.sizes
    if sizes is None and length is not None:
        sizes = (length // count,) * count
    if axis is None or sizes is None or sum(sizes) != length:
        equal = f"{count} equal parts" if form.sizes is None else f"parts of {form.sizes}"
        expected = f"arrays that axis {form.axis} splits into {equal}"
        places = [f"{shown_name(name)}: {_shown(leaf)}"]
        raise ArgumentError(where, expected, "one that does not split", at=places)
    parts: list[Leaf] = []
    start = 0
    for size in sizes:
        shape = (*leaf.shape[:axis], size, *leaf.shape[axis + 1 :])
        source = Sliced(cast("Source", leaf.source), axis, start, start + size)
        parts.append(leaf._replace(shape=shape, source=source))
        start += size
    return parts


def _joined(
    new: Name, parts: Mapping[int, tuple[Name, Leaf, Packed]], count: int, where: str
) -> Leaf:
    """Return the array that is joined from parts."""
    found = [parts[i] for i in range(count) if i in parts]
    first, form = found[0][1], found[0][2]
    axis = _axis_of(first, form.axis)
    after = None if axis is None else axis + 1
    kinds = {
        (each.sizes, each.axis, leaf.dtype, leaf.shape[:axis], leaf.shape[after:])
        for _, leaf, each in found
    }
    if axis is None or len(found) < count or len(kinds) > 1 or not _are_as_long(found, axis):
        sizes = "" if form.sizes is None else f" of {form.sizes}"
        expected = f"{count} parts{sizes} along axis {form.axis} for {shown_name(new)}"
        places = [f"part {i}: missing" for i in range(count) if i not in parts]
        places += [f"{shown_name(old)}: {_shown(leaf)}" for old, leaf, _ in found]
        raise ArgumentError(where, expected, "other parts", at=places)
    length = sum(leaf.shape[axis] for _, leaf, _ in found)
    sources = tuple(cast("Source", leaf.source) for _, leaf, _ in found)
    shape = (*first.shape[:axis], length, *first.shape[axis + 1 :])
    return first._replace(shape=shape, source=Joined(sources, axis))


def _are_as_long(found: Sequence[tuple[Name, Leaf, Packed]], axis: int) -> bool:
    sizes = found[0][2].sizes
    lengths = [leaf.shape[axis] for _, leaf, _ in found]
    return lengths == [*sizes] if sizes is not None else True


def _axis_of(leaf: Leaf, axis: int) -> int | None:
    rank = len(leaf.shape)
    return axis % rank if -rank <= axis < rank else None


def _shown(leaf: Leaf) -> str:
    return f"{short_dtype(leaf.dtype)}[{','.join(map(str, leaf.shape))}]"


# ---- functions of arrays


class _Change:
    """Applies one function of a rule; it checks once that the other one is the inverse."""

    def __init__(self, form: Relaid | Packed, rules: NameRules):
        functions = (form.to, form.back) if rules.is_saving else (form.back, form.to)
        # The function of JAX would move each array to the device and back.
        self.forth, self.undo = (
            np.transpose if function is jnp.transpose else function for function in functions
        )
        self.names = ("to", "back") if rules.is_saving else ("back", "to")
        self.where = rules.where
        self.known: dict[Any, tuple[tuple[int, ...], Any]] = {}

    def of(self, leaf: Leaf, name: Name) -> Leaf:
        """Return the leaf that the function makes from one."""
        if self.forth is None:
            return leaf
        given = (leaf.shape, leaf.dtype)
        if given not in self.known:
            if not self.known:
                self.check_law(leaf, name)
            self.known[given] = self.result_of(leaf, name)
        shape, dtype = self.known[given]
        make = ft.partial(self.made, shape=shape, dtype=dtype, name=name)
        source = Converted(cast("Source", leaf.source), make)
        return leaf._replace(shape=shape, dtype=dtype, source=source)

    def made(self, array: Any, *, shape: tuple[int, ...], dtype: Any, name: Name) -> Any:
        made = np.asarray(self.called(self.forth, array, name))
        if made.shape != shape or made.dtype != dtype:
            # For example 32 bits instead of 64, which JAX has only if they are enabled.
            wanted = jax.ShapeDtypeStruct(shape, dtype)
            raise self.refused(name, f"{describe(wanted)} of the function", describe(made))
        return made

    def result_of(self, leaf: Leaf, name: Name) -> tuple[tuple[int, ...], Any]:
        """Return shape and dtype of the result for an array that is not read yet."""
        given = jax.ShapeDtypeStruct(leaf.shape, cast("Any", leaf.dtype))

        def run(array: Any) -> Any:
            # In a function of our own, because JAX fails for `np.transpose` itself.
            return cast("Any", self.forth)(array)

        try:
            made: Any = jax.eval_shape(run, given)
        except Exception:
            # NumPy's functions do not accept abstract arrays. This array uses no memory.
            zeros = np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
            made = np.asarray(self.called(self.forth, zeros, name))
        # JAX may lack 64 bits, which is not a fault of the function.
        is_same = made.dtype == jax.dtypes.canonicalize_dtype(leaf.dtype)
        return tuple(made.shape), leaf.dtype if is_same else made.dtype

    def check_law(self, leaf: Leaf, name: Name) -> None:
        """Refuse two functions that are not inverses: otherwise the error would be silent."""
        numbers = _distinct_numbers(leaf.shape)
        there = np.asarray(self.called(self.forth, numbers, name))
        again = np.asarray(self.called(self.undo, there, name))
        if again.shape == numbers.shape:
            # Sums and products may be rounded, but swapped numbers differ by at least 1.
            near = np.array_equal(again, numbers) or (np.abs(again - numbers) < 0.25).all()
            got = "other numbers, or in another order"
        else:
            near, got = False, f"the shape {again.shape}"
        if not near:
            forth, undo = self.names
            expected = f"{undo}({forth}(x)) == x"
            raise self.refused(name, expected, got, f"x: {_shown(leaf)}")

    def called(self, function: Any, array: Any, name: Name) -> Any:
        try:
            return function(array)
        except Exception as error:
            got = f"one that raises {type(error).__name__}"
            raise self.refused(name, "a function of each array", got, describe(array)) from error

    def refused(self, name: Name, expected: str, got: str, text: str = "") -> ArgumentError:
        place = shown_name(name) + (f", {text}" if text else "")
        return ArgumentError(self.where, expected, got, at=[place])


def _distinct_numbers(shape: tuple[int, ...]) -> Any:
    """Return an array whose neighbors differ; a large one has two bytes for each number."""
    size = prod(shape)
    if size <= _FEW:
        return np.arange(size, dtype=np.float32).reshape(shape)
    return np.resize(np.arange(2039, dtype=np.float16), shape)


_FEW = 1 << 20

# ---- refusals


def _unmatched(lost: Sequence[NameRule], table: Table, rules: NameRules) -> ArgumentError:
    side = "the tree" if rules.is_saving else "the file"
    taken = _taken_by_others(lost, table, rules)
    # The names of all leaves, and of the nodes that contain them.
    known = {".".join(n[:i]) for n in table.leaves for i in range(1, len(n) + 1)}
    places = [
        f"{rule.old.text!r}: an earlier pattern, {taken[rule]!r}, matches them all"
        if rule in taken
        else repr(rule.old.text)
        # A pattern is like no name.
        + ("" if "*" in rule.old.text else nearest(rule.old.text, known))
        for rule in lost
    ]
    verb = "is" if len(lost) == 1 else "are"
    got = f"{len(lost)} that {verb} not" + ("" if taken else " in it")
    expected = f"names in {side}" + (" that no earlier pattern matches" if taken else "")
    return ArgumentError(rules.where, expected, got, at=places)


def _taken_by_others(
    lost: Sequence[NameRule], table: Table, rules: NameRules
) -> dict[NameRule, str]:
    """Return the rules that would match some names, each with an earlier rule that takes them."""
    taken: dict[NameRule, str] = {}
    for name in (*table.leaves, *table.classes):
        for rule in lost:
            if rule not in taken and rule.is_about(name):
                first = rules.find(name)
                taken[rule] = "" if first is None else first[0].old.text
    return taken
