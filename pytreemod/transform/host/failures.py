"""Raise failed checks of compiled programs.

A call of `filter_jit` waits for its results if its program contains a check. The callback of the
check only records the failure, and the call raises it, from the user's line. The program always
runs to its end, so several devices cannot wait for each other. If several threads call at once, a
failure may belong to any of the calls. Such calls are repeated, one at a time.

Without a call that waits (plain `jax.jit`, a transform without compilation), the callback raises.
JAX converts this to its own error, and our transforms convert that back to the error of the check.
On several devices the callback prints, and the results are NaN. If it raised there, the other
devices would wait forever. A function without checks never waits.
"""

from __future__ import annotations

import functools as ft
import itertools
import os
import threading
from collections.abc import Callable, Collection
from typing import NoReturn, ParamSpec, TypeVar, cast

import jax

from pytreemod.errors import CheckError
from pytreemod.transform.boundary.signatures import passing_on

_P = ParamSpec("_P")
_T = TypeVar("_T")

_waiting: list[_Call] = []
_running: list[_Call] = []
_turns = threading.Condition()
# The last failures that were raised into JAX, by their marks.
_raised: dict[str, CheckError] = {}
_MAX_RAISED = 32
_numbers = itertools.count()


def call_checked(checks: Collection[str], call: Callable[[], _T], *, is_once: bool) -> _T:
    """Call, wait for the results, and raise the failed check.

    If a check failed in one of several simultaneous calls, the call is repeated alone, and that
    result counts. (A program that runs once must not contain a callback that waits for another
    thread's call with the same check: it would wait forever.)

    Args:
        checks: the checks in the program, by name (see `checks_in`).
        call: makes the call.
        is_once: whether the call cannot be repeated, because it donates or has effects. Then it
            runs alone from the start.

    Raises:
        CheckError: if a check failed.
    """
    first = _Call(checks, is_alone=is_once)
    result = first.run(call)
    if first.failures and not first.own:
        first = _Call(checks, is_alone=True)
        result = first.run(call)
    if first.failures:
        raise first.failures[0]() from None
    return result


class _Call:
    """A call that waits for its results, in order to raise its own failed check."""

    def __init__(self, checks: Collection[str], is_alone: bool):
        self.checks = frozenset(checks)
        self.is_alone = is_alone
        self.thread = threading.get_ident()
        self.failures: list[Callable[[], CheckError]] = []
        # The failures that happened while no other call had the check.
        self.own: list[Callable[[], CheckError]] = []

    def bars(self, other: _Call) -> bool:
        """Whether another call must not run at the same time."""
        is_apart = self.thread != other.thread and (self.is_alone or other.is_alone)
        return is_apart and not self.checks.isdisjoint(other.checks)

    def run(self, call: Callable[[], _T]) -> _T:
        """Call, and wait for the results."""
        with _turns:
            _waiting.append(self)
            try:
                # In turn, so that a call that must be alone is not overtaken forever.
                _turns.wait_for(lambda: not any(other.bars(self) for other in self.before()))
                _running.append(self)
            finally:
                _waiting.remove(self)
        try:
            return cast("_T", jax.block_until_ready(call()))
        except Exception as error:
            # The error may follow from a failure: for example, the user quit the debugger.
            if self.own:
                raise self.own[0]() from error
            # JAX may run a program that it compiled for a caller that did not wait.
            raise_recorded(error)
            raise
        finally:
            with _turns:
                _running.remove(self)
                _turns.notify_all()

    def before(self) -> list[_Call]:
        """Return the calls that run, and those that have waited longer."""
        return [*_running, *_waiting[: _waiting.index(self)]]


def record_failure(check: str, make_error: Callable[[], CheckError]) -> int:
    """Record the failure of a check for the calls that wait for it.

    Args:
        check: its name.
        make_error: makes the error, if it is to be raised.

    Returns:
        The number of failures that such a call has by now; 0 if no call waits.
    """
    with _turns:
        calls = [call for call in _running if check in call.checks]
        for call in calls:
            call.failures.append(make_error)
            # With several calls, it is unknown whose failure it is.
            call.own += [make_error] if len(calls) == 1 else []
    return max((len(call.failures) for call in calls), default=0)


def raises_checks(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap a function so that it raises a failed check instead of JAX's error.

    For the transforms: outside `filter_jit`, JAX may still compile their contents.
    """

    @passing_on
    @ft.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return fn(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            # JAX's error has one class in the first call of a function, and another later.
            raise_recorded(error)
            raise

    return call


def raise_recorded(cause: Exception) -> None:
    """Raise a failed check that no call waited for, if `cause` is JAX's error about it."""
    # First, because most errors of a transform are not about a check.
    if not _raised or isinstance(cause, CheckError):
        return
    text = str(cause)
    mark = next((mark for mark in [*_raised] if mark in text), "")
    error = _raised.pop(mark, None)
    if error is not None:
        # Its traceback is that of a callback, in a thread of JAX.
        raise error.with_traceback(None) from cause


def raise_into_jax(error: CheckError) -> NoReturn:
    """Raise in a callback, so that JAX's error about it can be recognized.

    JAX's error has only our message, which others may share, and the names of functions in a
    traceback. So the error is raised in a function with a unique name.
    """
    mark = f"failure_{os.getpid()}_{next(_numbers)}_of_error_if"
    _raised[mark] = error
    for old in [*_raised][:-_MAX_RAISED]:
        _raised.pop(old, None)

    # JAX passes the message on, without notes.
    whole = CheckError("\n".join([str(error), *getattr(error, "__notes__", ())]))

    def fail() -> NoReturn:
        raise whole

    fail.__code__ = fail.__code__.replace(co_name=mark)
    fail()
