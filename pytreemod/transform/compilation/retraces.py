"""Explain why a function was traced again: the differences between two traces, by path.

A stored trace has the structure of its arguments and the types of their arrays. It has no arrays,
and of the model only its configuration.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax

from pytreemod.errors import RetraceError, describe, explain, with_article
from pytreemod.tree.differences import (
    Difference,
    Slot,
    compare,
    leaf_text,
    side_text,
    varying_axes,
)
from pytreemod.tree.kinds import are_one
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import Structure
from pytreemod.typing import class_of, jtu

REMEMBERED = 16
"""How many traces of a function are stored, to compare new ones with."""

SHOWN = 20
"""How many differences a report lists; a structure that changed completely has hundreds."""


@dataclass(frozen=True)
class Trace:
    """One trace of a function: its arguments by name, with types for arrays."""

    names: tuple[str, ...]
    arguments: tuple[Any, ...]
    function: Any = None
    """Distinguishes functions that are pytrees and share a name: by structure and shapes."""

    @classmethod
    def of(cls, names: tuple[str, ...], structure: Structure, values: list[Any]) -> Trace:
        """Return the trace of a call with this structure and these arrays."""
        try:
            head, args, kwargs = structure.assemble([Slot(jax.typeof(v)) for v in values])
        except Exception:
            # A node of another library that accepts only arrays: nothing is explained then.
            return cls((), (), structure.treedef)
        positional = [names[i] if i < len(names) else f"args[{i}]" for i in range(len(args))]
        own = ["function"] * len(head)
        # Modules of one class share a name, and each may be traced `max_traces` times.
        leaves, treedef = jtu.tree_flatten(head)
        function = (treedef, tuple(getattr(leaf, "shape", None) for leaf in leaves))
        return cls((*own, *positional, *kwargs), (*head, *args, *kwargs.values()), function)


@dataclass
class TraceLog:
    """The traces of one function, or of all pytrees that are functions of one name.

    Attributes:
        counts: the number of traces of each pytree.
        last: the last traces.
        observers: the functions that get a message about each new trace.
    """

    counts: Counter[Any] = field(default_factory=lambda: Counter[Any]())
    last: deque[Trace] = field(default_factory=lambda: deque[Trace](maxlen=REMEMBERED))
    observers: list[Callable[[str], None]] = field(default_factory=list[Callable[[str], None]])

    @property
    def count(self) -> int:
        """The number of traces."""
        return self.counts.total()

    def clear(self) -> None:
        """Forget the traces."""
        self.counts.clear()
        self.last.clear()

    def history(self, name: str) -> list[str]:
        """Return the messages for the stored traces, except the first."""
        traces = list(self.last)
        first = self.count - len(traces) + 1
        return [
            report(name, first + i, explain_change(traces[:i], traces[i]))
            for i in range(1, len(traces))
        ]

    def add(self, trace: Trace, name: str, max_traces: int | None) -> None:
        """Record a trace, report the reason to observers, and refuse a trace too many.

        Raises:
            RetraceError: if there were `max_traces` already.
        """
        too_many = max_traces is not None and self.counts[trace.function] >= max_traces
        # Comparing a large model takes long, so it is done only if someone gets the result.
        if self.last and (self.observers or too_many):
            changes = explain_change(list(self.last), trace)
            if too_many:
                raise RetraceError(too_many_text(name, max_traces, changes))
            text = report(name, self.count + 1, changes)
            # A copy, because an observer may remove itself.
            for observer in list(self.observers):
                observer(text)
        elif too_many:
            raise RetraceError(too_many_text(name, max_traces, []))
        # After the check: a refused trace is not made.
        self.counts[trace.function] += 1
        self.last.append(trace)


def report(name: str, number: int, changes: list[str]) -> str:
    """Return the message about a trace after the first."""
    lines = [f"{name} was traced again (trace {number}), because of", *changes[:SHOWN]]
    if len(changes) > SHOWN:
        lines.append(f"and {len(changes) - SHOWN} more")
    return "\n  ".join(lines)


def too_many_text(name: str, max_traces: int | None, changes: list[str]) -> str:
    """Return the message about a function that was traced too often."""
    plural = "trace" if max_traces == 1 else "traces"
    return explain(
        f"{name}: this call needs more than {max_traces} {plural} (max_traces)",
        at=changes,
        hint="jnp.asarray(number)  # an array is no part of the program",
    )


def changes_between(
    before: Sequence[tuple[str, Any]], after: Sequence[tuple[str, Any]]
) -> list[str]:
    """Return the differences between the arguments of two calls, by name, a line for each path.

    It compares structures, static values, shapes and dtypes, and no other cause of a trace.
    """

    def trace(named: Sequence[tuple[str, Any]]) -> Trace:
        return Trace(tuple(n for n, _ in named), tuple(_typed(tree) for _, tree in named))

    return list(_differences(trace(before), trace(after)))


def _typed(tree: Any) -> Any:
    def of(leaf: Any) -> Any:
        is_data = is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
        return Slot(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)) if is_data else leaf

    return jtu.tree_map(of, tree)


def explain_change(earlier: list[Trace], new: Trace) -> list[str]:
    """The differences between a trace and the most similar earlier one, a line for each path."""
    # The latest first, because of two that are equally similar the reader remembers that one.
    candidates = [list(_differences(old, new)) for old in reversed(earlier)]
    best = min(candidates, key=len)
    return best or ["no argument: a setting of JAX changed, or its caches were cleared"]


def _differences(old: Trace, new: Trace) -> Iterator[str]:
    before = dict(zip(old.names, old.arguments, strict=True))
    after = dict(zip(new.names, new.arguments, strict=True))
    for name in {**before, **after}:
        if name not in before:
            yield f"{name}: not given before, now {side_text(after[name])}"
        elif name not in after:
            yield f"{name}: {side_text(before[name])} before, not given now"
        else:
            for found in compare(before[name], after[name]):
                yield _line(found, name)


def _line(found: Difference, root: str) -> str:
    if _differs_in_sharding(found.old, found.new):
        sides = (
            f"{describe(side)} {_sharding_text(side.sharding)}" for side in (found.old, found.new)
        )
        return f"{found.where(root)}: {' -> '.join(sides)}"
    old, new = found.texts
    if old != new:
        why = " (a weak type comes from a Python number)" if f"{old} (weak)" == new else ""
        return found.line(root) + why
    why = _why(found.old, found.new)
    return f"{found.where(root)}: {old} -> {new}{f' ({why})' if why else ''}"


def _differs_in_sharding(old: Any, new: Any) -> bool:
    """Whether the types of two arrays differ only by their shardings."""
    if not isinstance(old, Slot) or not isinstance(new, Slot):
        return False
    ours, theirs = ((x.shape, x.dtype, x.weak_type, varying_axes(x)) for x in (old.aval, new.aval))
    return ours == theirs and old.sharding != new.sharding


def _sharding_text(sharding: Any) -> str:
    """Return the sharding of an array, as far as a trace depends on it."""
    mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", None)
    if mesh is None or spec is None:
        return f"on {sharding}"
    # By its axes: `str` of a mesh lists every device, and a pod has thousands.
    kinds = [str(getattr(kind, "name", kind)).lower() for kind in mesh.axis_types]
    axes = ", ".join(f"{n}={size} {k}" for (n, size), k in zip(mesh.shape.items(), kinds))
    return f"as {spec} on a mesh ({axes})" if axes else "on no mesh"


def _why(old: Any, new: Any) -> str:
    """Return the reason why two values differ that look alike."""
    shown = leaf_text(old)
    if type(old) is not type(new) or shown != leaf_text(new):
        return ""
    if isinstance(old, tuple):
        # For example a transformation of optax, which is a tuple of functions.
        inside: Any = zip(cast("tuple[Any, ...]", old), new, strict=False)
        return next((_why(*pair) for pair in inside if not are_one(*pair)), "")
    # It looks alike and is not equal: one source line made it twice.
    if callable(old):
        return "an equal function, created again: create it once, outside the loop"
    hint = getattr(class_of(old), "__retrace_hint__", None)
    if hint is not None:
        return hint
    if type(old).__eq__ is object.__eq__:
        hint = "create it once, outside the loop"
        # The reader cannot change a class that is private, or Python's.
        if not _is_private(class_of(old)):
            hint = f"give it __eq__ and __hash__, or {hint}"
        return f"{with_article(class_of(old).__qualname__)} is only equal to itself: {hint}"
    return "further down" if shown.endswith("...") else "== is not True"


def _is_private(cls: type) -> bool:
    parts = (*cls.__module__.split("."), *cls.__qualname__.split("."))
    return parts[0] == "builtins" or any(p.startswith("_") and p != "__main__" for p in parts)
