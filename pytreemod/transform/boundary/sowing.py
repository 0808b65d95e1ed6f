"""`sow`, and how what it records comes out of a transform.

A pure function cannot push values sideways, so what is recorded while a function is traced has to
become one more output of the transform that traces it. While a capture is active in a thread, there
is a stack of collectors: one for the capture, and one for each filtered transform that runs inside
it. `sow` adds to the innermost. What a transform collects while it calls its function comes out
beside the result, goes through JAX with it, stacked or not as the transform has it, and is added to
the collector outside.

Without a capture none of this happens: functions are called as they are. Which of the two it is
belongs to the key of all caches of JAX, so that what was traced without a capture is traced once
more for the first capture, and neither is ever taken for the other.

Values go in the same way (see `supplying`), and it is the collectors from which they are taken.

A collector remembers the trace in which it was opened. What is recorded in another one (inside of
plain `jax.vmap`, of a while loop) could not come out, and is refused.

What checks record comes out in the same way where it is asked for (`collect_checks`, by
`filter_jit(checks="later")`), whether there is a capture or not; and out of loops, which hand out
nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, TypeVar

from pytreemod.errors import ArgumentError, CaptureError, describe, explain
from pytreemod.transform.boundary.cotangents import look
from pytreemod.transform.boundary.lost_updates import tell_lost_updates
from pytreemod.tree.effects import Effects
from pytreemod.tree.traces import current_trace, traced_apart
from pytreemod.typing import PyTree, Tracer, jtu

_T = TypeVar("_T")

EVERY_CAPTURE = 0
"""The level of what `sow` records."""

CHECKS = -1
"""The level of what checks record."""


class AbstractNotedCheck:
    """A check that has recorded a value, which it understands."""

    def refuse(self) -> NoReturn:
        """Refuse to be where the value cannot come out."""
        raise NotImplementedError

    def settle(self, value: Any) -> None:
        """Raise, if the value is known, and is a failure."""
        raise NotImplementedError

    def in_step(self, axis: int) -> AbstractNotedCheck:
        """The same for values of several steps, on one more axis: at this position from the end."""
        raise NotImplementedError


class Label(NamedTuple):
    """What a value is recorded under.

    Attributes:
        level: the capture that it is for, counted from the outside; or `EVERY_CAPTURE`, `CHECKS`.
        name: its name.
        route: which transforms it came out of, outermost first: the number of each among those that
            were called in the same function. Known while a function is planned alone.
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
        """The same by name: branches may come to it in different orders."""
        pairs = zip(self.labels, self.values, strict=True)
        return _from_pairs(sorted(pairs, key=lambda pair: pair[0][:2]))

    def in_steps(self) -> Collected:
        """The same under labels for the values of several steps, which JAX will stack."""
        pairs = zip(self.labels, self.values, strict=True)
        return _from_pairs([(_label_in_step(label, value), value) for label, value in pairs])

    def divide(self) -> tuple[Collected, Collected]:
        """What checks have recorded, and the rest."""
        pairs = [*zip(self.labels, self.values, strict=True)]
        checks = _from_pairs([pair for pair in pairs if pair[0].source is not None])
        return checks, _from_pairs([pair for pair in pairs if pair[0].source is None])


def _from_pairs(pairs: Sequence[tuple[Label, PyTree]]) -> Collected:
    return Collected([label for label, _ in pairs], [value for _, value in pairs])


def _label_in_step(label: Label, value: Any) -> Label:
    source = label.source
    return label if source is None else label._replace(source=source.in_step(value.ndim))


class WithCollected:
    """A result with what was recorded on the way to it; a pytree."""

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
    """Where values are collected while one function runs, and from where it takes values.

    Attributes:
        level: how many captures there are around it, in this thread.
        is_captured: whether there is one.
        is_planned: whether the function runs only to see what is recorded in it.
        takes_checks: whether checks record here, and do not call the host.
        is_loop: whether nothing but checks may record here.
        labels: of the values so far.
        values: the values so far.
        calls: how many transforms were called in it, while values are handed in.
        waiting: the values that are handed in, by their labels, and that nothing has taken so far.
        within: those that go into the transforms that are called in it, by the number of the call.
        whole: what goes into each of them as it is, by labels.
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
        # Of now: what is sown in the function that is about to run comes out of this very trace.
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
            CaptureError: it belongs to another trace, and could not come out of that.
        """
        # A tracer of an inner trace would be led out of it, and JAX would complain later,
        # elsewhere.
        is_reached = self.trace == current_trace()
        if label.source is not None and not is_reached:
            label.source.refuse()
        if label.source is None and (self.is_loop or not is_reached):
            # A plan that is for no capture is for values.
            if self.is_planned and not self.is_captured:
                raise CaptureError(explain_no_way_in(f"value for {label.name!r}"))
            raise CaptureError(_explain_unreachable(label))
        self.labels.append(label)
        self.values.append(value)


def explain_no_way_in(what: str, inside: str = "a transform that takes none in") -> str:
    """The text of the error for a value that cannot go into a transform."""
    return explain(
        what,
        "a place that values can go into",
        f"one inside {inside}",
        hint=[
            "use what takes them in instead of jax.jit, jax.vmap, jax.lax.scan, ...:",
            "pm.filter_jit, filter_vmap, filter_grad, filter_scan, filter_cond, filter_checkpoint",
        ],
    )


def _explain_unreachable(label: Label) -> str:
    what = f"sow({label.name!r})" if label.level == EVERY_CAPTURE else f"capture of {label.name!r}"
    return explain(
        what,
        "a place that values can come out of",
        "one inside a transform that hands none out",
        hint=[
            "use what hands them out instead of jax.jit, jax.vmap, jax.lax.scan, ...:",
            "pm.filter_jit, filter_vmap, filter_grad, filter_scan, filter_cond, filter_checkpoint",
            "or return the value; from a while loop, in its carry",
        ],
    )


class _Collectors(threading.local):
    """The collectors of each thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Collector] = []


_collectors = _Collectors()
# The captures in all threads, and what collects checks: without one, no thread asks for its stack.
_active: set[Collector] = set()
watching: set[Collector] = set()
"""Those of them that ask for cotangents: derivatives look whether there is one."""


def is_collecting() -> bool:
    """Whether what is recorded in this thread is collected: by a capture, or to plan one."""
    collector = innermost()
    return collector is not None and (collector.is_captured or collector.is_planned)


def collects_checks() -> bool:
    """Whether checks that are traced here, in this thread, are to record what they find."""
    collector = innermost()
    return collector is not None and collector.takes_checks


def innermost() -> Collector | None:
    """The innermost collector of this thread, if there is one."""
    return _collectors.stack[-1] if _active and _collectors.stack else None


@contextmanager
def opened(*, is_captured: bool = False, is_planned: bool = False) -> Generator[Collector]:
    """Collect, in this thread, until the end; what was collected is not passed on.

    The level is one more than around it. What is true of those around it is true of this one.

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
    """The levels of the captures in this thread that ask for cotangents."""
    return [collector.level for collector in _collectors.stack if collector in watching]


def offered(label: Label) -> PyTree:
    """What a derivative around supplies for a value that is being recorded; None if nothing."""
    collector = innermost()
    waiting = collector.waiting.get(label) if collector is not None else None
    return waiting.pop(0) if waiting else None


def _like(outer: Collector) -> Collector:
    """A collector inside another."""
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
    # No trace is equal to it.
    collector.trace = None
    with _within(collector):
        yield


@contextmanager
def capturing(*, cotangents: bool = False) -> Generator[Collector]:
    """Collect, in this thread, what is recorded until the end.

    What is for captures around this one is passed on to them.

    Args:
        cotangents: whether derivatives inside are to record the cotangents, too.
    """
    # Under another key of JAX's caches: what was traced without a capture returns less.
    flag = "cotangents" if cotangents else "capture"
    with traced_apart(flag), opened(is_captured=True) as collector:
        if cotangents:
            watching.add(collector)
        try:
            yield collector
        finally:
            watching.discard(collector)
    # After the collector is closed, so that the one around is the innermost.
    pairs = zip(collector.labels, collector.values, strict=True)
    for_others = [pair for pair in pairs if pair[0].level < collector.level]
    add_collected(Collected(*zip(*for_others, strict=True)) if for_others else None)


def note(label: Label, value: PyTree) -> None:
    """Record a value in the innermost collector of this thread, if there is one.

    Raises:
        CaptureError: it could not come out of the transform that it is in.
        CheckError: it is that of a check, and is known: a failure.
    """
    if not (_active and _collectors.stack):
        return
    collector = _collectors.stack[-1]
    if label.source is not None and not isinstance(value, Tracer):
        label.source.settle(value)
    # Sown values are for captures: no plan is made for them without one.
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
    drawn: set[Any] | None = None,
) -> tuple[Any, Collected | None]:
    """Call a function inside a transform, and collect what is recorded in it.

    Args:
        fn: the function.
        args: its arguments.
        kwargs: its arguments by keyword.
        drawn: gets what the random streams are recognized by that came in and were drawn from.

    Returns:
        Its result, and what was recorded, to be added outside of the transform; None if that
        is nothing.
    """
    # The count first: without a capture, no thread asks for its stack.
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
        Its result, `WithCollected` if something else was recorded; and what the checks recorded.
    """
    collector = _like(innermost() or Collector())
    collector.takes_checks = True
    _active.add(collector)
    try:
        # Under another key of JAX's caches: what was traced without returns less.
        with traced_apart("checks"), _within(collector):
            result = call_tracked(fn, args, kwargs)
    finally:
        _active.discard(collector)
    checks, rest = Collected(collector.labels, collector.values).divide()
    return with_collected(result, rest if rest.labels else None), checks


def collect_from_step(fn: Callable[[], Any]) -> tuple[Any, Collected]:
    """Call a function in the step of a loop, which hands out nothing but what checks record."""
    collector = _like(_collectors.stack[-1])
    collector.is_loop = True
    with _within(collector):
        result = fn()
    return result, Collected(collector.labels, collector.values)


def call_tracked(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    drawn: set[Any] | None = None,
) -> Any:
    """Call a function inside a transform that hands out nothing but its result.

    As every transform calls the user's function, if not by `collect`, which describes `drawn`. It
    warns of a State that the function is given, and whose update it drops.
    """
    with Effects() as effects:
        result = fn(*args, **kwargs)
    # Rarely: most functions are given no State.
    if effects.captured or effects.changed:
        tell_lost_updates(fn, args, kwargs, result, effects)
    if drawn is not None and effects.drawn:
        drawn.update(name for name, is_old in effects.drawn.items() if is_old)
    return result


def add_collected(collected: Collected | None) -> None:
    """Record, outside of a transform, what was collected inside.

    Raises:
        CaptureError: it cannot come out of the next transform.
    """
    if collected is not None:
        outer = innermost()
        # Of the transform that was called last, because it is this one that has ended.
        step = (outer.calls - 1,) if outer is not None and outer.is_planned else ()
        for label, value in zip(collected.labels, collected.values, strict=True):
            note(label._replace(route=(*step, *label.route)), value)


def shown_names(names: Sequence[str]) -> list[str]:
    """The names under which several values are shown: for a second one `name#2`, and so on."""
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
    """`result`, as `WithCollected` if something was recorded on the way to it."""
    return result if collected is None else WithCollected(result, collected)


def labels_of(result: Any) -> tuple[Label, ...]:
    """What was recorded on the way to a result."""
    return result.collected.labels if type(result) is WithCollected else ()


def collecting(fn: Callable[..., Any], drawn: set[Any] | None = None) -> Callable[..., Any]:
    """`fn` inside a transform; it returns `WithCollected` if something is recorded.

    See `collect` for `drawn`.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return with_collected(*collect(fn, args, kwargs, drawn))

    return run


def take_result(result: Any) -> Any:
    """The result of a function under `collecting`; what was collected is added outside."""
    if type(result) is not WithCollected:
        return result
    add_collected(result.collected)
    return result.result


def _same(leaf: Any) -> Any:
    return leaf


def sow(name: str, value: _T) -> _T:
    """Show a value to the [`capture`][pytreemod.capture]s around this call, if there are any.

    For looking at intermediate values: the program computes the same with it and without. Without
    a capture it does nothing, and costs nothing.

    **Law.** `sow(name, value)` is `value`.

    Args:
        name: what to show it as. The second value of that name is shown as `name#2`, and so on; a
            number is left out where `name#2` is itself a name.
        value: any tree.

    Returns:
        `value`, unchanged.

    Raises:
        ArgumentError: inside a capture, `name` is no string.
        CaptureError: inside a capture, but also inside a transform of plain JAX, or a while loop,
            from which the value could not come out.

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
        # Containers are copied, for the function may change them later on.
        note(label, jtu.tree_map(_same, value))
        zeros = offered(label) if watching else None
        if zeros is not None:
            return look(value, zeros)
    return value
