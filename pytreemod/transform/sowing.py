"""`sow`: one more output of every transform around it.

A pure function has no other way to report a value: what is recorded in a trace must become an
output of the transform that traces. While a capture is active in a thread, there is a stack of
collectors: one for the capture, and one for each transform inside it. `sow` adds to the innermost.
A transform returns what its own collector got beside its result (`collecting`), stacked or not as
the transform stacks, and adds it outside (`take_result`). Without a capture, functions are called
directly. JAX's caches distinguish the cases (`trace_context`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from pytreemod.errors import StateError
from pytreemod.transform.lost_updates import warn_of_lost_updates
from pytreemod.tree.snapshots import last_use
from pytreemod.tree.traces import context_value, current_trace, trace_context
from pytreemod.typing import PyTree, jtu

_T = TypeVar("_T")


class Label(NamedTuple):
    """What is known of a sown value.

    Attributes:
        depth: of the capture it is for; 0 for all.
        name: its name.
        stacked: the transforms along whose axes it is stacked, outermost first: `"map"`, `"loop"`
            or `"reversed"`, each with a number that the values of one call have in common.
    """

    depth: int
    name: str
    stacked: tuple[tuple[str, int], ...] = ()

    def stack(self, kind: str) -> Label:
        """Return the label of the value with one more axis, of a call that still runs."""
        return self._replace(stacked=((kind, _RUNS), *self.stacked))

    def leave(self, number: int) -> Label:
        """Return the label outside of a transform, whose call gets this number."""
        ended = tuple((kind, number if own == _RUNS else own) for kind, own in self.stacked)
        return self._replace(stacked=ended)


# The number of a call that still runs: its trace may serve many calls.
_RUNS = 0


_Found = list[tuple[Label, PyTree]]


class _Threads(threading.local):
    def __init__(self) -> None:
        # The collectors of this thread, innermost last: the trace that returns it, and the values.
        self.stack: list[tuple[Any, _Found]] = []
        # The calls of functions inside transforms.
        self.calls: list[tuple[Any, ...]] = []


_thread = _Threads()


class WithSown:
    """A result with the values that were sown on the way to it; a pytree."""

    def __init__(self, result: PyTree, labels: tuple[Label, ...], values: Sequence[PyTree]):
        self.result, self.labels, self.values = result, labels, values


def _flatten(node: WithSown) -> Any:
    return (node.result, node.values), node.labels


def _unflatten(labels: Any, children: Any) -> WithSown:
    return WithSown(children[0], labels, children[1])


jtu.register_pytree_node(WithSown, _flatten, _unflatten)


@contextmanager
def capturing() -> Generator[tuple[int, _Found]]:
    """Collect, in this thread, what is sown until the end; returns the depth of this capture."""
    depth = (context_value("capture") or 0) + 1
    with trace_context("capture", depth), _collector() as found:
        yield depth, found


@contextmanager
def _collector() -> Generator[_Found]:
    found: _Found = []
    _thread.stack.append((current_trace(), found))
    try:
        yield found
    finally:
        _thread.stack.pop()


@contextmanager
def unseen() -> Generator[None]:
    """A trace that never runs: what is sown or used up in it is nobody's."""
    around = _thread.stack, _thread.calls
    _thread.stack, _thread.calls = [], []
    try:
        yield
    finally:
        _thread.stack, _thread.calls = around


def sow_value(label: Label, value: PyTree) -> None:
    """Add a value to the innermost collector of this thread, if there is one.

    Raises:
        StateError: if it is in a transform that does not return it.
    """
    if _thread.stack:
        trace, found = _thread.stack[-1]
        if trace != current_trace():
            raise StateError(
                f"{label.name!r} cannot leave a transform of plain JAX, a loop without outputs "
                "or a rule",
                hint="use pm.filter_jit, filter_vmap, filter_scan, ...",
            )
        # Containers are copied, because the function may change them later.
        leaves, treedef = jtu.tree_flatten(value)
        found.append((label, treedef.unflatten(leaves)))


def tracked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` inside a transform: warns of updates that its result lacks."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before, calls = last_use.mark, _thread.calls
        calls.append((fn, args, kwargs))
        try:
            result = fn(*args, **kwargs)
        finally:
            calls.pop()
        if last_use.mark is not before:
            warn_of_lost_updates(fn, args, kwargs, result, calls[-1:])
        return result

    return run


def collecting(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` inside a transform that may return more: `WithSown` if something is sown."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not _thread.stack:
            return tracked(fn)(*args, **kwargs)
        with _collector() as found:
            result = tracked(fn)(*args, **kwargs)
        return WithSown(result, *zip(*found, strict=True)) if found else result

    return run


def split_sown(result: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return the result itself, and a function that gives another one the values that were sown."""
    if type(result) is not WithSown:
        return result, lambda other: other
    return result.result, lambda other: WithSown(other, result.labels, result.values)


def take_result(result: Any) -> Any:
    """The result of a function under `collecting`; its sown values are added outside."""
    # The same in each trace of a function: JAX compares the labels of two branches.
    number = 1 + len(_thread.stack[-1][1]) if _thread.stack else 1
    for label, value in zip(result.labels, result.values, strict=True):
        sow_value(label.leave(number), value)
    return result.result


def sow(name: str, value: _T) -> _T:
    """Show a value to the [`capture`][pytreemod.capture] around this call, if there is one.

    Without a capture it does nothing, and costs nothing. In
    [`filter_vmap`][pytreemod.filter_vmap] and [`filter_scan`][pytreemod.filter_scan], values are
    stacked along axis 0.

    **Law.** `sow(name, value)` is `value`.

    Args:
        name: its name.
        value: any tree.

    Returns:
        `value`.

    Raises:
        StateError: if there is a capture, and the value cannot leave the transform it is in: one
            of plain JAX, a while loop.

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
    sow_value(Label(0, name), value)
    return value
