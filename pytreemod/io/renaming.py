"""Names by pattern: a function from tables to tables.

A rule maps the names that match a pattern to other names. `*` is a component, or a part of one;
`**` is any number of components. A pattern also stands for everything below it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from pytreemod.errors import ArgumentError, nearest
from pytreemod.io.container import Entry, Table

NewName: TypeAlias = str | tuple[str | tuple[str, ...] | list[str], Callable[[Any], Any]] | None
NameTable: TypeAlias = Mapping[str, NewName]
"""From patterns to new names; None drops an array. `(name, fn)` is for an array in another form:
`fn` gets the old one, in NumPy. `((name, ...), fn)` is for an array that is several, which `fn`
returns."""


def renamed(table: Table, rename: NameTable, where: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return a table with other names, and the old name for each that is new.

    The first pattern that matches a name decides.

    Args:
        table: arrays by name.
        rename: the new names.
        where: the call, for errors.

    Raises:
        ArgumentError: if a pattern matches nothing, or two arrays get one name.
    """
    rules = [Rule(pattern, new) for pattern, new in rename.items()]
    made: dict[str, Entry] = {}
    origins: dict[str, str] = {}
    unused = {rule.pattern: None for rule in rules if rule.new is not None}
    for name, entry in table.items():
        rule, groups = _rule_for(name, rules)
        news = [(name, entry)]
        if rule is not None:
            unused.pop(rule.pattern, None)
            news = rule.applied(groups, entry)
        for new_name, new_entry in news:
            if new_name in made:
                raise ArgumentError(f"{where}, rename: two arrays get the name {new_name}")
            made[new_name] = new_entry
            origins |= {new_name: name} if new_name != name else {}
    if unused:
        lines = [f"{pattern!r}{nearest(pattern, table)}" for pattern in unused]
        raise ArgumentError(f"{where}, rename: no array has such a name", at=lines)
    return made, origins


def renamed_texts(texts: Mapping[str, str], rename: NameTable) -> dict[str, str]:
    """Return texts by name with other names; those whose array changes its form are left out."""
    rules = [Rule(pattern, new) for pattern, new in rename.items()]
    made: dict[str, str] = {}
    for name, text in texts.items():
        rule, groups = _rule_for(name, rules)
        if rule is None or isinstance(rule.new, str):
            made[name if rule is None else rule.filled(rule.new, groups)] = text
    return made


class Rule:
    """One line of a table of names."""

    def __init__(self, pattern: str, new: NewName):
        self.pattern, self.new = pattern, new
        steps = [step for step in pattern.split(".") if step]
        # The kind of each wildcard: components, or a part of one.
        self.kinds = [
            kind for step in steps for kind in (["**"] if step == "**" else ["*"] * step.count("*"))
        ]
        # Each component ends with a dot, in the name, too; the last group is what is below.
        parts = [_COMPONENTS if step == "**" else _regex_of(step) for step in steps]
        self.regex = re.compile(f"{''.join(parts)}{_BELOW}", re.DOTALL)

    def of(self, name: str) -> str | None:
        """Return the new name for a name; None if it does not match."""
        found = self.regex.fullmatch(f"{name}.")
        is_name = found is not None and isinstance(self.new, str)
        return self.filled(self.new, found.groups()) if is_name else None

    def applied(self, groups: tuple[str, ...], entry: Entry) -> list[tuple[str, Entry]]:
        """Return what a matching array becomes."""
        if self.new is None:
            return []
        if isinstance(self.new, str):
            return [(self.filled(self.new, groups), entry)]
        target, fn = self.new
        if isinstance(target, str):
            return [(self.filled(target, groups), mapped([entry], fn))]
        return [
            (self.filled(name, groups), mapped([entry], lambda x, i=i: fn(x)[i]))
            for i, name in enumerate(target)
        ]

    def filled(self, new: str, groups: tuple[str, ...]) -> str:
        """Return a new name, whose wildcards are what the old ones matched, in order."""
        *found, below = groups
        pairs = [*zip(self.kinds, found, strict=True)]
        left = {kind: iter([text for k, text in pairs if k == kind]) for kind in ("**", "*")}
        try:
            name = "".join(
                next(left["**"])
                if step == "**"
                else "".join(next(left["*"]) if c == "*" else c for c in step) + "."
                for step in filter(None, new.split("."))
            )
        except RuntimeError as error:
            raise ArgumentError(
                f"rename: {new!r} has more wildcards than {self.pattern!r}"
            ) from error
        return f"{name}{below}".removesuffix(".")


_COMPONENTS, _BELOW = r"((?:[^.]*\.)*?)", r"((?:[^.]*\.)*)"


def _regex_of(step: str) -> str:
    return r"([^.]*)".join(map(re.escape, step.split("*"))) + r"\."


def _rule_for(name: str, rules: Iterable[Rule]) -> tuple[Rule | None, tuple[str, ...]]:
    for rule in rules:
        found = rule.regex.fullmatch(f"{name}.")
        if found is not None:
            return rule, found.groups()
    return None, ()


def mapped(entries: list[Entry], fn: Callable[..., Any]) -> Entry:
    """Return the entry of a function's result, which is computed when it is read."""
    # For its form, zeros that need no memory.
    zeros = [np.broadcast_to(np.zeros((), entry.dtype), entry.shape) for entry in entries]
    form = np.asarray(fn(*zeros))

    def read() -> np.ndarray:
        return np.asarray(fn(*[entry.read() for entry in entries]))

    return Entry(form.shape, form.dtype, read)
