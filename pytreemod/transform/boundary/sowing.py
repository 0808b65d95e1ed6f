"""`sow`, and how a transform returns the values that it records.

A pure function has no other way to report values: values recorded in a trace must become one more
output of the transform that traces. While a capture is active in a thread, there is a stack of
collectors: one for the capture, and one for each filtered transform inside it. `sow` adds to the
innermost. A transform returns the values it collected beside its result. JAX carries them with the
result, stacked or not, as the transform does. Then they are added to the outer collector.

Without a capture none of this happens: functions are called directly. All of JAX's caches
distinguish the two cases by their keys. So a function traced without a capture is traced once more
for the first capture, and the traces are never confused.

Values also go into functions through collectors (see `supplying`).

A collector remembers the trace in which it was opened. Values of another trace (inside plain
`jax.vmap`, or a while loop) could not be returned, and are refused.

The records of checks are returned in the same way, if requested (`collect_checks`, by
`filter_jit(checks="later")`), with or without a capture. Loops return them, too, and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, TypeVar

from pytreemod.errors import ArgumentError, CaptureError, describe, explain
from pytreemod.transform.boundary.cotangents import look
from pytreemod.transform.boundary.lost_updates import report_lost_updates
from pytreemod.tree.effects import Effects
from pytreemod.tree.traces import current_trace, traced_apart
from pytreemod.typing import PyTree, Tracer, jtu

_T = TypeVar("_T")

EVERY_CAPTURE = 0
"""The level of what `sow` records."""

CHECKS = -1
"""The level of what checks record."""


class AbstractNotedCheck:
    """A check that has recorded a value, whose meaning it knows."""

    def refuse(self) -> NoReturn:
        """Refuse a value that cannot be returned from here."""
        raise NotImplementedError

    def settle(self, value: Any) -> None:
        """Raise, if the value is known and is a failure."""
        raise NotImplementedError

    def in_step(self, axis: int) -> AbstractNotedCheck:
        """The same for values of several steps, on one more axis: this position from the end."""
        raise NotImplementedError


class Label(NamedTuple):
    """The label of a recorded value.

    Attributes:
        level: the capture that it is for, counted from the outside; or `EVERY_CAPTURE`, `CHECKS`.
        name: its name.
        route: the numbers of the transforms that returned it, outermost first. A number counts the
            transforms called in one function. Known only while a function is planned.
        source: the check that has recorded it; None for all others.
    """

    level: int
    name: str
    route: tuple[int, ...] = ()
    source: AbstractNotedCheck | None = None


class Collected:
    """Values with their labels, in order; a pytree whose children are the values."""

    __slots__ = ("labels", "values")

    def __init__(self, labels: Sequence[Label], values: Sequence[PyTree]):
        self.labels = tuple(labels)
        self.values = tuple(values)

    def sorted(self) -> Collected:
        """Return the same, sorted by name, because branches may record in different orders."""
        pairs = zip(self.labels, self.values, strict=True)
        return _from_pairs(sorted(pairs, key=lambda pair: pair[0][:2]))

    def in_steps(self) -> Collected:
        """Return the same with labels for the values of several steps, which JAX will stack."""
        pairs = zip(self.labels, self.values, strict=True)
        return _from_pairs([(_label_in_step(label, value), value) for label, value in pairs])

    def divide(self) -> tuple[Collected, Collected]:
        """Return the records of checks, and the rest."""
        pairs = [*zip(self.labels, self.values, strict=True)]
        checks = _from_pairs([pair for pair in pairs if pair[0].source is not None])
        return checks, _from_pairs([pair for pair in pairs if pair[0].source is None])


def _from_pairs(pairs: Sequence[tuple[Label, PyTree]]) -> Collected:
    return Collected([label for label, _ in pairs], [value for _, value in pairs])


def _label_in_step(label: Label, value: Any) -> Label:
    source = label.source
    return label if source is None else label._replace(source=source.in_step(value.ndim))


class WithCollected:
    """A result with the values recorded on the way to it; a pytree."""

    __slots__ = ("collected", "result")

    def __init__(self, result: PyTree, collected: Collected):
        self.result = result
        self.collected = collected


def _flatten_collected(node: Collected) -> tuple[list[tuple[Any, PyTree]], tuple[Label, ...]]:
    pairs = zip(node.labels, node.values, strict=True)
    return [(jtu.DictKey(label.name), value) for label, value in pairs], node.labels


def _flatten_with(node: WithCollected) -> tuple[tuple[tuple[Any, PyTree], ...], None]:
    keys = jtu.GetAttrKey("result"), jtu.GetAttrKey("sown")
    return ((keys[0], node.result), (keys[1], node.collected)), None


def _unflatten_with(_: None, children: Any) -> WithCollected:
    return WithCollected(*children)


jtu.register_pytree_with_keys(Collected, _flatten_collected, Collected)
jtu.register_pytree_with_keys(WithCollected, _flatten_with, _unflatten_with)


class Collector:
    """Collects values while one function runs, and supplies values to it.

    Attributes:
        level: the number of captures around it, in this thread.
        is_captured: whether there is a capture.
        is_planned: whether the function runs only to find the values that it records.
        takes_checks: whether checks record here, and do not call the host.
        is_loop: whether only checks may record here.
        labels: the labels of the values so far.
        values: the values so far.
        calls: the number of transforms called in it, while values are supplied.
        waiting: the supplied values that are not taken yet, by their labels.
        within: the values for the transforms that are called in it, by the number of the call.
        whole: values that go into each of them unchanged, by labels.
    """

    __slots__ = (
        "calls",
        "is_captured",
        "is_loop",
        "is_planned",
        "labels",
        "level",
        "takes_checks",
        "trace",
        "values",
        "waiting",
        "whole",
        "within",
    )

    def __init__(
        self,
        level: int = 0,
        is_captured: bool = False,
        is_planned: bool = False,
        takes_checks: bool = False,
    ):
        self.level = level
        self.is_captured = is_captured
        self.is_planned = is_planned
        self.takes_checks = takes_checks
        self.is_loop = False
        # The current trace: it returns the values sown in the function that is about to run.
        self.trace = current_trace()
        self.labels: list[Label] = []
        self.values: list[PyTree] = []
        self.calls = 0
        self.waiting: dict[Label, list[PyTree]] = {}
        self.within: dict[int, list[tuple[Label, PyTree]]] = {}
        self.whole: dict[Label, PyTree] = {}

    def add(self, label: Label, value: PyTree) -> None:
        """Record a value.

        Raises:
            CaptureError: if it belongs to another trace, which could not return it.
        """
        # A tracer of an inner trace would leak, and JAX would raise later, elsewhere.
        is_reached = self.trace == current_trace()
        if label.source is not None and not is_reached:
            label.source.refuse()
        if label.source is None and (self.is_loop or not is_reached):
            # A plan that is not for a capture is for supplied values.
            if self.is_planned and not self.is_captured:
                raise CaptureError(explain_no_way_in(f"value for {label.name!r}"))
            raise CaptureError(_explain_unreachable(label))
        self.labels.append(label)
        self.values.append(value)


def explain_no_way_in(what: str, inside: str = "a transform that accepts none") -> str:
    """Return the message about a value that cannot go into a transform."""
    return explain(
        what,
        "a call that can accept values",
        f"one inside {inside}",
        hint=[
            "use a transform that accepts them, instead of jax.jit, jax.vmap, jax.lax.scan, ...:",
            "pm.filter_jit, filter_vmap, filter_grad, filter_scan, filter_cond, filter_checkpoint",
        ],
    )


def _explain_unreachable(label: Label) -> str:
    what = f"sow({label.name!r})" if label.level == EVERY_CAPTURE else f"capture of {label.name!r}"
    return explain(
        f"{what}: a transform around the call cannot return values",
        hint="pm.filter_jit, pm.filter_vmap, pm.filter_scan, ... can",
    )


class _Collectors(threading.local):
    """The collectors of each thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Collector] = []


_collectors = _Collectors()
# The captures in all threads, and collectors of checks: if empty, no thread looks at its stack.
_active: set[Collector] = set()
watching: set[Collector] = set()
"""Those that ask for cotangents: derivatives check whether there are any."""


def is_collecting() -> bool:
    """Whether values recorded in this thread are collected: by a capture, or for a plan."""
    collector = innermost()
    return collector is not None and (collector.is_captured or collector.is_planned)


def collects_checks() -> bool:
    """Whether checks that are traced in this thread record their failures."""
    collector = innermost()
    return collector is not None and collector.takes_checks


def innermost() -> Collector | None:
    """Return the innermost collector of this thread, if there is one."""
    return _collectors.stack[-1] if _active and _collectors.stack else None


@contextmanager
def opened(*, is_captured: bool = False, is_planned: bool = False) -> Generator[Collector]:
    """Collect, in this thread, until the end; do not pass the collected values on.

    The level is one more than around it. It has the properties of the collector around it.

    Args:
        is_captured: see `Collector`.
        is_planned: see `Collector`.
    """
    outer = innermost() or Collector()
    collector = _like(outer)
    collector.level += 1
    collector.is_captured |= is_captured
    collector.is_planned |= is_planned
    _active.add(collector)
    try:
        with _within(collector):
            yield collector
    finally:
        _active.discard(collector)


def watched_levels() -> list[int]:
    """Return the levels of the captures in this thread that ask for cotangents."""
    return [collector.level for collector in _collectors.stack if collector in watching]


def offered(label: Label) -> PyTree:
    """The value that an outer derivative supplies for a value being recorded; None if none."""
    collector = innermost()
    waiting = collector.waiting.get(label) if collector is not None else None
    return waiting.pop(0) if waiting else None


def _like(outer: Collector) -> Collector:
    """Return a collector inside another."""
    return Collector(outer.level, outer.is_captured, outer.is_planned, outer.takes_checks)


@contextmanager
def _within(collector: Collector) -> Generator[Collector]:
    _collectors.stack.append(collector)
    try:
        yield collector
    finally:
        _collectors.stack.pop()


@contextmanager
def closed() -> Generator[None]:
    """Refuse to record anything in this thread, until the end."""
    collector = Collector(is_captured=True)
    # No trace equals it.
    collector.trace = None
    with _within(collector):
        yield


@contextmanager
def capturing(*, cotangents: bool = False) -> Generator[Collector]:
    """Collect, in this thread, the values recorded until the end.

    Values for outer captures are passed on to them.

    Args:
        cotangents: whether derivatives inside record the cotangents, too.
    """
    # With another key in JAX's caches, because a trace without a capture returns less.
    flag = "cotangents" if cotangents else "capture"
    with traced_apart(flag), opened(is_captured=True) as collector:
        if cotangents:
            watching.add(collector)
        try:
            yield collector
        finally:
            watching.discard(collector)
    # After the collector is closed, so that the outer one is the innermost.
    pairs = zip(collector.labels, collector.values, strict=True)
    for_others = [pair for pair in pairs if pair[0].level < collector.level]
    add_collected(Collected(*zip(*for_others, strict=True)) if for_others else None)


def note(label: Label, value: PyTree) -> None:
    """Record a value in the innermost collector of this thread, if there is one.

    Raises:
        CaptureError: if the surrounding transform could not return it.
        CheckError: if it is the value of a check, is known, and is a failure.
    """
    if not (_active and _collectors.stack):
        return
    collector = _collectors.stack[-1]
    if label.source is not None and not isinstance(value, Tracer):
        label.source.settle(value)
    # Sown values are for captures, so no plan is made for them without one.
    elif (
        label.source is not None
        or collector.is_captured
        or (collector.is_planned and label.level != EVERY_CAPTURE)
    ):
        collector.add(label, value)


def collect(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    drawn: dict[Any, bool] | None = None,
) -> tuple[Any, Collected | None]:
    """Call a function inside a transform, and collect the values that it records.

    Args:
        fn: the function.
        args: its arguments.
        kwargs: its arguments by keyword.
        drawn: gets the identities of the random streams from outside that were drawn from, each
            with whether members of a map may share it.

    Returns:
        Its result, and the recorded values, to be added outside the transform; None if there are
        none.
    """
    # The active captures first: without one, no thread looks at its stack.
    if not (_active and _collectors.stack):
        return call_tracked(fn, args, kwargs, drawn), None
    with _within(_like(_collectors.stack[-1])) as collector:
        result = call_tracked(fn, args, kwargs, drawn)
    return result, Collected(collector.labels, collector.values) if collector.labels else None


def collect_checks(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, Collected]:
    """Call a function inside a transform, and collect its checks, which would call the host.

    Args:
        fn: the function.
        args: its arguments.
        kwargs: its arguments by keyword.

    Returns:
        Its result, `WithCollected` if there are other recorded values; and the records of checks.
    """
    collector = _like(innermost() or Collector())
    collector.takes_checks = True
    _active.add(collector)
    try:
        # With another key in JAX's caches, because a trace without checks returns less.
        with traced_apart("checks"), _within(collector):
            result = call_tracked(fn, args, kwargs)
    finally:
        _active.discard(collector)
    checks, rest = Collected(collector.labels, collector.values).divide()
    return with_collected(result, rest if rest.labels else None), checks


def collect_from_step(fn: Callable[[], Any]) -> tuple[Any, Collected]:
    """Call a function in the step of a loop, which returns only the records of checks."""
    collector = _like(_collectors.stack[-1])
    collector.is_loop = True
    with _within(collector):
        result = fn()
    return result, Collected(collector.labels, collector.values)


def call_tracked(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    drawn: dict[Any, bool] | None = None,
) -> Any:
    """Call a function inside a transform that returns only its result.

    Every transform calls the user's function this way, or by `collect`, which describes `drawn`. It
    warns about a State in the arguments whose update the function drops.
    """
    with Effects() as effects:
        result = fn(*args, **kwargs)
    # Rare, because most functions get no State.
    if effects.captured or effects.changed:
        report_lost_updates(fn, args, kwargs, result, effects)
    if drawn is not None and effects.drawn:
        drawn.update(effects.drawn_from_outside())
    return result


def add_collected(collected: Collected | None) -> None:
    """Record, outside a transform, the values collected inside.

    Raises:
        CaptureError: if the next transform cannot return them.
    """
    if collected is not None:
        outer = innermost()
        # The number of the transform called last, because this one has ended.
        step = (outer.calls - 1,) if outer is not None and outer.is_planned else ()
        for label, value in zip(collected.labels, collected.values, strict=True):
            note(label._replace(route=(*step, *label.route)), value)


def shown_names(names: Sequence[str]) -> list[str]:
    """Return the names that several values are shown with: for a second one `name#2`, and so on."""
    # The first value of a name has that name, whatever the others are called.
    taken, counts, shown = set(names), dict[str, int](), list[str]()
    for name in names:
        count = counts.get(name, 0) + 1
        while count > 1 and f"{name}#{count}" in taken:
            count += 1
        counts[name] = count
        shown.append(name if count == 1 else f"{name}#{count}")
        taken.add(shown[-1])
    return shown


def with_collected(result: Any, collected: Collected | None) -> Any:
    """`result`, as `WithCollected` if values were recorded on the way to it."""
    return result if collected is None else WithCollected(result, collected)


def labels_of(result: Any) -> tuple[Label, ...]:
    """Return the labels of the values recorded on the way to a result."""
    return result.collected.labels if type(result) is WithCollected else ()


def collecting(fn: Callable[..., Any], drawn: dict[Any, bool] | None = None) -> Callable[..., Any]:
    """`fn` inside a transform; it returns `WithCollected` if values are recorded.

    See `collect` for `drawn`.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return with_collected(*collect(fn, args, kwargs, drawn))

    return run


def take_result(result: Any) -> Any:
    """The result of a function under `collecting`; the collected values are added outside."""
    if type(result) is not WithCollected:
        return result
    add_collected(result.collected)
    return result.result


def _same(leaf: Any) -> Any:
    return leaf


def sow(name: str, value: _T) -> _T:
    """Show a value to the [`capture`][pytreemod.capture]s around this call, if there are any.

    Use it to look at intermediate values. The program computes the same with or without it. Without
    a capture it does nothing, and costs nothing.

    **Law.** `sow(name, value)` is `value`.

    Args:
        name: the name to show it with. A second value of that name is shown as `name#2`, and so on.
            A number is left out if `name#2` is itself a name.
        value: any tree.

    Returns:
        `value`, unchanged.

    Raises:
        ArgumentError: inside a capture: if `name` is not a string.
        CaptureError: inside a capture: if the call is also inside a transform of plain JAX, or a
            while loop, which could not return the value.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> @pm.filter_jit
        ... def f(x):
        ...     h = pm.sow("hidden", 2 * x)
        ...     return h + 1
        >>> pm.capture(f)(jnp.arange(3))
        (Array([1, 3, 5], dtype=int32), {'hidden': Array([0, 2, 4], dtype=int32)})
    """
    if _active:
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
            raise ArgumentError("sow(name)", "a string", describe(name))
        label = Label(EVERY_CAPTURE, name)
        # Containers are copied, because the function may change them later.
        note(label, jtu.tree_map(_same, value))
        zeros = offered(label) if watching else None
        if zeros is not None:
            return look(value, zeros)
    return value
