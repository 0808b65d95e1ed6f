"""Explain why a function was traced again: the difference between two traces, by path.

A log has the last trace: the structure of the arguments and the types of their arrays. It has no
arrays, and of the model only its configuration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pytreemod.errors import CheckError
from pytreemod.tree.comparison import Difference, compare, is_type, leaf_text
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.typing import PyTree, class_of, jtu

_SHOWN = 20
"""How many differences a report lists; a structure that changed completely has hundreds."""


class TraceLog:
    """The traces of one function.

    Attributes:
        count: their number.
        reports: the reasons of those after the first, as far as somebody has asked for them.
        observers: functions that get each of these reports.
    """

    def __init__(self, name: str, max_traces: int | None = None):
        self.name, self.max_traces, self.count = name, max_traces, 0
        self.observers: list[Callable[[str], None]] = []
        self.reports: list[str] = []
        self._last: dict[str, PyTree] = {}

    def add(self, named: Sequence[tuple[str, PyTree]]) -> None:
        """Record a trace, report its reason, and refuse one too many.

        Args:
            named: the arguments by name; arrays may be tracers.

        Raises:
            CheckError: if there were `max_traces` already.
        """
        new: dict[str, PyTree] = {}
        # A node of another library may accept only arrays: then nothing is explained.
        with contextlib.suppress(Exception):
            new = {name: jtu.tree_map(_as_type, tree) for name, tree in named}
        is_too_many = self.max_traces is not None and self.count >= self.max_traces
        changes = _changes(self._last, new) if self.count else []
        if is_too_many:
            several = "trace" if self.max_traces == 1 else "traces"
            raise CheckError(
                f"{self.name}: this call needs more than {self.max_traces} {several} (max_traces)",
                at=changes,
                hint="jnp.asarray(number)  # an array is no part of the program",
            )
        # After the check: a refused trace is not made.
        self.count, self._last = self.count + 1, new
        if changes:
            lines = [f"{self.name} was traced again (trace {self.count}), because of", *changes]
            more = len(changes) - _SHOWN
            text = "\n  ".join([*lines[: _SHOWN + 1], *[f"and {more} more"] * (more > 0)])
            self.reports = [*self.reports[-15:], text]
            # A copy, because an observer may remove itself.
            for observer in [*self.observers]:
                observer(text)


def _as_type(leaf: Any) -> Any:
    return jax.typeof(leaf) if is_array(leaf) else leaf


def _changes(old: dict[str, PyTree], new: dict[str, PyTree]) -> list[str]:
    """Return the differences between two traces, a line for each path."""
    lines = [f"{name}: not given before" for name in new if name not in old]
    lines += [f"{name}: not given now" for name in old if name not in new]
    for name in [name for name in new if name in old]:
        lines += [_line(each, name) for each in compare(old[name], new[name])]
    return lines or ["no argument: a setting of JAX changed, or its caches were cleared"]


def _line(found: Difference, root: str) -> str:
    old, new = found.texts
    why = _why(found.old, found.new) if old == new else ""
    why = "a weak type comes from a Python number" if f"{old} (weak)" == new else why
    return f"{path_text(found.path, root)}: {old} -> {new} ({why})" if why else found.line(root)


def _why(old: Any, new: Any) -> str:
    """Return the reason why two values differ that look alike."""
    if type(old) is not type(new) or leaf_text(old) != leaf_text(new):
        return ""
    if is_type(old):
        places = [f"{x.sharding.spec} on {dict(x.sharding.mesh.shape)}" for x in (old, new)]
        return f"sharded as {' -> '.join(places)}"
    # It looks alike and is not equal: one source line made it twice.
    if callable(old):
        return "an equal function, created again: create it once, outside the loop"
    hint = "created again: create it once, outside the loop" * (type(old).__eq__ is object.__eq__)
    return getattr(class_of(old), "__retrace_hint__", hint)
