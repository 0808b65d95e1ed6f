"""Names by pattern: a function from tables to tables.

A rule maps the names that match a pattern to other names. `*` is a component, or a part of one;
`**` is any number of components. A pattern also stands for everything below it.
"""

from __future__ import annotations

import functools as ft
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from pytreemod.errors import ArgumentError, nearest
from pytreemod.io.container import Entry, Table
from pytreemod.io.names import nodes_above

NewName: TypeAlias = str | tuple[str | tuple[str, ...] | list[str], Callable[[Any], Any]] | None
# From patterns to new names; None drops an array. `(name, fn)` is for an array in another form:
# `fn` gets the old one, in NumPy. `((name, ...), fn)` is for an array that is several, which `fn`
# returns.
NameTable: TypeAlias = Mapping[str, NewName]


class Renaming:
    """A table of names; the first rule that matches a name decides."""

    def __init__(self, rename: NameTable | None):
        self.rules = [Rule(pattern, new) for pattern, new in (rename or {}).items()]
        self.used: set[Rule] = set()

    def rule(self, name: str) -> Rule | None:
        """Return the rule for a name; None if it stays."""
        rule = next((rule for rule in self.rules if rule.match(name)), None)
        self.used |= set() if rule is None else {rule}
        return rule

    def name(self, name: str) -> str | None:
        """Return the new name; None if there is none, or the array changes its form."""
        rule = self.rule(name)
        return name if rule is None else rule.of(name)

    def table(self, table: Table) -> tuple[dict[str, Entry], dict[str, str]]:
        """Return a table with other names, and the old name for each that is new.

        Raises:
            ArgumentError: if two arrays get one name, or a function does not fit.
        """
        made: dict[str, Entry] = {}
        origins: dict[str, str] = {}
        for name, entry in table.items():
            rule = self.rule(name)
            for new, new_entry in [(name, entry)] if rule is None else rule.applied(name, entry):
                if new in made:
                    raise ArgumentError(f"rename: two arrays get the name {new}")
                made[new] = new_entry
                origins |= {new: name} if new != name else {}
        return made, origins

    def refuse_unused(self, names: Iterable[str]) -> None:
        """Refuse a rule that no name was left for; one that drops arrays may find none.

        Raises:
            ArgumentError: if there is one.
        """
        unused = [rule.pattern for rule in self.rules if rule.new and rule not in self.used]
        if unused:
            left = nodes_above(name for name in names if self.rule(name) is None)
            lines = [f"{pattern!r}{nearest(pattern, left)}" for pattern in unused]
            raise ArgumentError("rename: no array is left for these patterns", at=lines)


class Rule:
    """One line of a table of names."""

    def __init__(self, pattern: str, new: NewName):
        self.pattern, self.new = pattern, new
        steps = [step for step in pattern.split(".") if step]
        # The kind of each wildcard: components, or a part of one.
        self.kinds: list[str] = []
        for step in steps:
            self.kinds += ["**"] if step == "**" else ["*"] * step.count("*")
        # Each component ends with a dot, in the name, too; the last group is what is below.
        parts = [_COMPONENTS if step == "**" else _regex_of(step) for step in steps]
        self.regex = re.compile(f"{''.join(parts)}{_BELOW}", re.DOTALL)

    def match(self, name: str) -> re.Match[str] | None:
        """Return how the pattern matches a name."""
        return self.regex.fullmatch(f"{name}." if name else "")

    def of(self, name: str) -> str | None:
        """Return the new name; None if the name does not match, or the array changes its form."""
        match = self.match(name) if isinstance(self.new, str) else None
        return None if match is None else self._filled(str(self.new), match)

    def applied(self, name: str, entry: Entry) -> list[tuple[str, Entry]]:
        """Return what an array becomes."""
        match = self.match(name)
        if match is None or self.new is None:
            return []
        if isinstance(self.new, str):
            return [(self._filled(self.new, match), entry)]
        target, fn = self.new
        if isinstance(target, str):
            return [(self._filled(target, match), mapped([entry], fn))]
        count = len(fn(_zeros_of(entry)))
        if count != len(target):
            fact = f"rename: the function for {self.pattern!r} returns {count} arrays"
            raise ArgumentError(f"{fact} for {len(target)} names")
        return [
            (self._filled(each, match), mapped([entry], ft.partial(_nth, fn, i)))
            for i, each in enumerate(target)
        ]

    def _filled(self, new: str, match: re.Match[str]) -> str:
        """Return a new name, whose wildcards are what the old ones matched, in order."""
        *found, below = match.groups()
        pairs = [*zip(self.kinds, found, strict=True)]
        left = {kind: iter([text for k, text in pairs if k == kind]) for kind in ("**", "*")}
        made = ""
        try:
            for step in filter(None, new.split(".")):
                parts = [next(left["*"]) if c == "*" else c for c in step if step != "**"]
                made += next(left["**"]) if step == "**" else f"{''.join(parts)}."
        except StopIteration as error:
            fact = f"rename: {new!r} has more wildcards than {self.pattern!r}"
            raise ArgumentError(fact) from error
        return f"{made}{below}".removesuffix(".")


_COMPONENTS, _BELOW = r"((?:[^.]*\.)*?)", r"((?:[^.]*\.)*)"


def _regex_of(step: str) -> str:
    return r"([^.]*)".join(map(re.escape, step.split("*"))) + r"\."


def _nth(fn: Callable[[Any], Any], i: int, array: Any) -> Any:
    return fn(array)[i]


def mapped(entries: list[Entry], fn: Callable[..., Any]) -> Entry:
    """Return the entry of a function's result, which is computed when it is read."""
    with np.errstate(all="ignore"):
        form = np.asarray(fn(*map(_zeros_of, entries)))

    def read() -> np.ndarray:
        return np.asarray(fn(*[entry.read() for entry in entries]))

    return Entry(form.shape, form.dtype, read)


def _zeros_of(entry: Entry) -> np.ndarray:
    # They need no memory.
    return np.broadcast_to(np.zeros((), entry.dtype), entry.shape)
