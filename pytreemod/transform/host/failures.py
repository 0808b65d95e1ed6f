"""Who raises when a check in a compiled program has failed.

A call of `filter_jit` whose program contains a check waits for its results: the callback of the
check only records the failure, and the call raises it, from the user's own line. Nothing is torn
down half-way, so several devices cannot wait for each other. Nothing says which of several calls,
made by several threads, a failure belongs to: such calls are made again, one at a time.

Where no call waits (plain `jax.jit`, a transform that nothing compiles), the callback raises, and
JAX passes that on in its own error, of which our transforms make the check's again; on several
devices it prints, and the results are NaN, because the others would wait for the one that raised,
forever. A function without checks never waits.
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
# The last of the failures that were raised into JAX, by their marks.
_raised: dict[str, CheckError] = {}
_MAX_RAISED = 32
_numbers = itertools.count()


def call_checked(checks: Collection[str], call: Callable[[], _T], *, is_once: bool) -> _T:
    """Call, wait for the results, and raise the check that failed.

    Where a check failed in one of several calls that ran at the same time, the call is made again
    with no other: that result counts. (A callback that waits for a call with the same check, made
    by another thread, must not be in a program that runs once: it would wait forever.)

    Args:
        checks: the checks in the program, by name (see `checks_in`).
        call: makes the call.
        is_once: whether it may not be made again, because it donates or has effects: then it runs
            with no other from the start.

    Raises:
        CheckError: a check failed.
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
    """A call that waits for its results, to raise a check of its own that failed."""

    def __init__(self, checks: Collection[str], is_alone: bool):
        self.checks = frozenset(checks)
        self.is_alone = is_alone
        self.thread = threading.get_ident()
        self.failures: list[Callable[[], CheckError]] = []
        # Those that happened while no other call had the check.
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
            # What a failure has brought about: the debugger was quit, say.
            if self.own:
                raise self.own[0]() from error
            # JAX may run what it had compiled for a caller that did not wait.
            raise_recorded(error)
            raise
        finally:
            with _turns:
                _running.remove(self)
                _turns.notify_all()

    def before(self) -> list[_Call]:
        """The calls that run, and those that wait for longer."""
        return [*_running, *_waiting[: _waiting.index(self)]]


def record_failure(check: str, make_error: Callable[[], CheckError]) -> int:
    """Record the failure of a check for the calls that wait for it.

    Args:
        check: its name.
        make_error: makes the error, if it is to be raised.

    Returns:
        How many failures such a call has by now; 0 if no call waits.
    """
    with _turns:
        calls = [call for call in _running if check in call.checks]
        for call in calls:
            call.failures.append(make_error)
            # Of several calls, nothing says whose failure it is.
            call.own += [make_error] if len(calls) == 1 else []
    return max((len(call.failures) for call in calls), default=0)


def raises_checks(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function that raises the check that failed in it, where JAX raises an error of its own.

    For the transforms: called outside `filter_jit`, JAX may yet compile what is inside.
    """

    @passing_on
    @ft.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return fn(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            # JAX's error: of the one class or, where it has called the function before, the other.
            raise_recorded(error)
            raise

    return call


def raise_recorded(cause: Exception) -> None:
    """Raise the check that failed, and no call waited for, if `cause` is what JAX made of it."""
    # First, for mostly there is none, and every error of a transform comes by here.
    if not _raised or isinstance(cause, CheckError):
        return
    text = str(cause)
    mark = next((mark for mark in [*_raised] if mark in text), "")
    error = _raised.pop(mark, None)
    if error is not None:
        # Its traceback is that of a callback, in a thread of JAX's.
        raise error.with_traceback(None) from cause


def raise_into_jax(error: CheckError) -> NoReturn:
    """Raise in a callback, so that the error that JAX makes of it can be recognized.

    Of ours, that has the text alone, which others may have, too, and names of functions in a
    traceback: so this is raised in a function of a name that no other has.
    """
    mark = f"failure_{os.getpid()}_{next(_numbers)}_of_error_if"
    _raised[mark] = error
    for old in [*_raised][:-_MAX_RAISED]:
        _raised.pop(old, None)

    # JAX passes the message on, and no notes.
    whole = CheckError("\n".join([str(error), *getattr(error, "__notes__", ())]))

    def fail() -> NoReturn:
        raise whole

    fail.__code__ = fail.__code__.replace(co_name=mark)
    fail()
