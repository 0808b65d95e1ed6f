"""Why a function was traced again: what differs between two traces, by path.

A trace is remembered as the structure of its arguments and the types of their arrays; no array,
and nothing of the model but its configuration, is kept.
"""

from __future__ import annotations

import re
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax

from pytreemod.errors import RetraceError, describe, explain
from pytreemod.tree.kinds import are_one
from pytreemod.tree.nodes import children_of, record_of, stop_below
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import Structure
from pytreemod.tree.stored_fields import stored
from pytreemod.typing import class_of, jtu

REMEMBERED = 16
"""How many traces of a function are remembered to compare new ones with."""

SHOWN = 20
"""How many differences a report lists: a structure that changed as a whole has hundreds."""


@dataclass(frozen=True)
class ArrayType:
    """What of an array a trace depends on."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    sharding: Any = None

    @property
    def ndim(self) -> int:
        """How many axes there are: nodes of other libraries may look when they are built."""
        return len(self.shape)

    def __str__(self) -> str:
        weak = "weak_" if self.weak_type else ""
        return f"{weak}{describe(self)}"


def array_type(value: Any) -> ArrayType:
    """The type of an array or a tracer."""
    # Tracers have one; NumPy's arrays and structs speak for themselves.
    aval: Any = getattr(value, "aval", value)
    return ArrayType(
        tuple(value.shape),
        value.dtype,
        bool(getattr(aval, "weak_type", False)),
        getattr(aval, "sharding", None),
    )


@dataclass(frozen=True)
class Trace:
    """One trace of a function: its arguments by name, with types for arrays."""

    names: tuple[str, ...]
    arguments: tuple[Any, ...]
    function: Any = None
    """What tells a function that is a pytree from others of its name: structure and shapes."""

    @classmethod
    def of(cls, names: tuple[str, ...], structure: Structure, values: list[Any]) -> Trace:
        """The trace of a call with this structure and these arrays."""
        try:
            head, args, kwargs = structure.assemble([array_type(v) for v in values])
        except Exception:
            # A node of another library's that takes nothing but arrays: then nothing is explained.
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
        counts: how many there were; of each pytree.
        last: the last of them.
        observers: who wants to hear of new ones.
    """

    counts: Counter[Any] = field(default_factory=lambda: Counter[Any]())
    last: deque[Trace] = field(default_factory=lambda: deque[Trace](maxlen=REMEMBERED))
    observers: list[Callable[[str], None]] = field(default_factory=list[Callable[[str], None]])

    @property
    def count(self) -> int:
        """How many traces there were."""
        return self.counts.total()

    def clear(self) -> None:
        """Forget the traces."""
        self.counts.clear()
        self.last.clear()

    def history(self, name: str) -> list[str]:
        """The texts for the traces that are remembered, but for the first of them."""
        traces = list(self.last)
        first = self.count - len(traces) + 1
        return [
            report(name, first + i, explain_change(traces[:i], traces[i]))
            for i in range(1, len(traces))
        ]

    def add(self, trace: Trace, name: str, max_traces: int | None) -> None:
        """Note a trace, tell observers why it was needed, refuse one too many.

        Raises:
            RetraceError: there were `max_traces` already.
        """
        too_many = max_traces is not None and self.counts[trace.function] >= max_traces
        # To compare takes long for a large model: only if somebody is to hear of it.
        if self.last and (self.observers or too_many):
            changes = explain_change(list(self.last), trace)
            if too_many:
                raise RetraceError(too_many_text(name, max_traces, changes))
            text = report(name, self.count + 1, changes)
            # A copy, for an observer may take itself away.
            for observer in list(self.observers):
                observer(text)
        elif too_many:
            raise RetraceError(too_many_text(name, max_traces, []))
        # After the refusal: a trace that is refused is not made.
        self.counts[trace.function] += 1
        self.last.append(trace)


def report(name: str, number: int, changes: list[str]) -> str:
    """The text for a trace after the first."""
    lines = [f"{name} was traced again (trace {number}), because of", *changes[:SHOWN]]
    if len(changes) > SHOWN:
        lines.append(f"and {len(changes) - SHOWN} more")
    return "\n  ".join(lines)


def too_many_text(name: str, max_traces: int | None, changes: list[str]) -> str:
    """The text for a function that was traced too often."""
    plural = "trace" if max_traces == 1 else "traces"
    return explain(
        name,
        f"at most {max_traces} {plural} (max_traces)",
        "a call that needs another",
        places=changes,
        hint="keep what is named here the same from call to call, or pass it as an array",
    )


def changes_between(
    before: Sequence[tuple[str, Any]], after: Sequence[tuple[str, Any]]
) -> list[str]:
    """What differs between the arguments of two calls, by name, a line for each place.

    Structures, static values, shapes and dtypes are compared, not what else a trace depends on.
    """

    def trace(named: Sequence[tuple[str, Any]]) -> Trace:
        return Trace(tuple(n for n, _ in named), tuple(_typed(tree) for _, tree in named))

    return list(_differences(trace(before), trace(after)))


def _typed(tree: Any) -> Any:
    def of(leaf: Any) -> Any:
        is_data = is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
        return ArrayType(tuple(leaf.shape), leaf.dtype, False) if is_data else leaf

    return jtu.tree_map(of, tree)


def explain_change(earlier: list[Trace], new: Trace) -> list[str]:
    """What differs between a trace and the most similar one before it, a line for each place."""
    # The latest first: of two that are equally near, the reader remembers that one.
    candidates = [list(_differences(old, new)) for old in reversed(earlier)]
    best = min(candidates, key=len)
    return best or ["nothing in the arguments: a setting of JAX, or JAX's own caches were cleared"]


def _differences(old: Trace, new: Trace) -> Iterator[str]:
    before = dict(zip(old.names, old.arguments, strict=True))
    after = dict(zip(new.names, new.arguments, strict=True))
    for name in {**before, **after}:
        if name not in before:
            yield f"{name}: not given before, now {_show(after[name])}"
        elif name not in after:
            yield f"{name}: {_show(before[name])} before, not given now"
        else:
            yield from _compare(before[name], after[name], (), name)


def _compare(old: Any, new: Any, path: tuple[Any, ...], root: str) -> Iterator[str]:
    if type(old) is not type(new):
        yield _line(path, root, _show(old), _show(new))
    elif isinstance(old, ArrayType):
        if old != new:
            yield from _compare_arrays(old, new, path, root)
    elif children_of(old) is None:
        if not are_one(old, new):
            yield _change(path_text(path, root), old, new)
    elif record_of(old) is not None:
        yield from _compare_fields(old, new, path, root)
    else:
        yield from _compare_auxiliary(old, new, path, root)
        yield from _compare_children(old, new, path, root)


def _compare_children(old: Any, new: Any, path: tuple[Any, ...], root: str) -> Iterator[str]:
    before, after = dict(children_of(old) or ()), dict(children_of(new) or ())
    for key in {**before, **after}:
        below = (*path, key)
        if key not in before:
            yield _line(below, root, "absent", _show(after[key]))
        elif key not in after:
            yield _line(below, root, _show(before[key]), "absent")
        else:
            yield from _compare(before[key], after[key], below, root)


def _compare_arrays(
    old: ArrayType, new: ArrayType, path: tuple[Any, ...], root: str
) -> Iterator[str]:
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        yield _line(path, root, str(old), str(new))
    elif old.weak_type != new.weak_type:
        names = {True: "a weak type (from a Python number)", False: "a strong type"}
        yield _line(
            path, root, f"{old} of {names[old.weak_type]}", f"{new} of {names[new.weak_type]}"
        )
    else:
        yield _line(path, root, f"{old} {_lie(old.sharding)}", f"{new} {_lie(new.sharding)}")


def _lie(sharding: Any) -> str:
    """How an array lies on its devices, as far as a trace depends on it."""
    mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", None)
    if mesh is None or spec is None:
        return f"on {sharding}"
    # By its axes: the text of a mesh lists every device, and a pod has thousands.
    kinds = [str(getattr(kind, "name", kind)).lower() for kind in mesh.axis_types]
    axes = ", ".join(f"{n}={size} {k}" for (n, size), k in zip(mesh.shape.items(), kinds))
    return f"as {spec} on a mesh ({axes})" if axes else "on no mesh"


def _compare_auxiliary(old: Any, new: Any, path: tuple[Any, ...], root: str) -> Iterator[str]:
    """What a node of JAX's, or of the user's, keeps beside its children."""
    # Their keys are compared with their children, where they have paths.
    if isinstance(old, (tuple, list, dict)):
        return
    was, now = (jtu.tree_structure(x, is_leaf=stop_below(x)).node_data() for x in (old, new))
    if was is None or now is None:
        return
    pairs = [(was[1], now[1])]
    # Item by item, so that only what has changed is shown.
    if isinstance(was[1], tuple) and isinstance(now[1], tuple) and len(was[1]) == len(now[1]):
        pairs = list(zip(was[1], now[1], strict=True))
    for before, after in pairs:
        if not are_one(before, after):
            yield _change(f"{path_text(path, root)} (auxiliary data)", before, after)


def _compare_fields(old: Any, new: Any, path: tuple[Any, ...], root: str) -> Iterator[str]:
    """The fields of two records of one class; a value may be data in one and not in the other."""
    (before, data), (after, other_data) = _fields(old), _fields(new)
    for name in {**before, **after}:
        below = (*path, jtu.GetAttrKey(name))
        states = [name in side for side in (before, after, data, other_data)]
        if all(states):
            yield from _compare(before[name], after[name], below, root)
        # Configuration on both sides; what is data on one side alone has no common form to compare.
        elif states == [True, True, False, False]:
            if not are_one(before[name], after[name]):
                yield _change(path_text(below, root), before[name], after[name])
        else:
            shown = [_show(side[name]) if name in side else "absent" for side in (before, after)]
            yield _line(below, root, *shown)


def _fields(node: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields of a record by name, and the names of those that are data."""
    record: Any = record_of(node)
    return {name: stored(node, name) for name in record.names(node)}, record.data_names(node)


def _line(path: tuple[Any, ...], root: str, old: str, new: str) -> str:
    return f"{path_text(path, root)}: {old} -> {new}"


def _change(place: str, old: Any, new: Any) -> str:
    why = _why(old, new)
    return f"{place}: {_text(old)} -> {_text(new)}{f' ({why})' if why else ''}"


def _show(value: Any) -> str:
    if isinstance(value, ArrayType) or value is None:
        return str(value)
    return _a(class_of(value)) if children_of(value) is not None else _text(value)


def _text(value: Any) -> str:
    """A static value in short: functions by name and line, and no addresses, which tell nothing."""
    code = getattr(value, "__code__", None)
    if isinstance(code, types.CodeType):
        return f"{value.__qualname__} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
    # An address differs from run to run, and would be taken for the reason.
    return describe(value) if isinstance(value, type) else describe(_WithoutAddress(value))


class _WithoutAddress:
    def __init__(self, value: Any):
        self.value = value

    def __repr__(self) -> str:
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(self.value))


def _a(cls: type) -> str:
    return f"{'an' if cls.__qualname__[0] in 'aeiouAEIOU' else 'a'} {cls.__qualname__}"


def _why(old: Any, new: Any) -> str:
    """What makes two values different that look alike."""
    shown = _text(old)
    if type(old) is not type(new) or shown != _text(new):
        return ""
    if isinstance(old, tuple):
        # Such as a transformation of optax, which is a tuple of functions.
        inside: Any = zip(cast("tuple[Any, ...]", old), new, strict=False)
        return next((_why(*pair) for pair in inside if not are_one(*pair)), "")
    # It looks alike and is not equal, so it was made twice from one source line.
    if callable(old):
        return "the same function made anew: make it once, outside the loop"
    hint = getattr(class_of(old), "__made_anew__", None)
    if hint is not None:
        return hint
    if type(old).__eq__ is object.__eq__:
        hint = "make it once, outside the loop"
        # What is private, or Python's own, is not the reader's to change.
        if not _is_private(class_of(old)):
            hint = f"give it __eq__ and __hash__, or {hint}"
        return f"{_a(class_of(old))} is equal to itself alone: {hint}"
    return "further on" if shown.endswith("...") else "== does not say that they are the same"


def _is_private(cls: type) -> bool:
    parts = (*cls.__module__.split("."), *cls.__qualname__.split("."))
    return parts[0] == "builtins" or any(p.startswith("_") and p != "__main__" for p in parts)
