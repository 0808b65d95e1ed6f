"""Who raises when a check in a compiled program has failed.

A call of `filter_jit` whose program contains a check waits for its results: the callback of the
check only records the failure, and the call raises it, from the user's own line. Nothing is torn
down half-way, so several devices cannot wait for each other. Nothing says which of several calls
a failure belongs to: so calls with a check in common run one at a time.

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
from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack, contextmanager
from typing import NoReturn, ParamSpec, TypeVar, cast

import jax

from pytreemod.errors import CheckError
from pytreemod.transform.boundary.signatures import passing_on

_P = ParamSpec("_P")
_T = TypeVar("_T")

# By the name of the check: a lock for the call that waits for it, and the failures in that call.
_locks: dict[str, threading.RLock] = {}
_failures: dict[str, list[Callable[[], CheckError]]] = {}
# The last of the failures that were raised into JAX, by their marks.
_raised: dict[str, CheckError] = {}
_MAX_RAISED = 32
_numbers = itertools.count()


def call_checked(checks: Collection[str], call: Callable[[], _T]) -> _T:
    """Call, wait for the results, and raise the check that failed.

    Args:
        checks: the checks in the program, by name (see `checks_in`).
        call: makes the call.

    Raises:
        CheckError: a check failed.
    """
    failures: list[Callable[[], CheckError]] = []
    with ExitStack() as stack:
        # In one order, so that no two calls wait for each other.
        for check in sorted(checks):
            stack.enter_context(_recording(check, failures))
        try:
            result = cast("_T", jax.block_until_ready(call()))
        except Exception as error:
            # What a failure has brought about: the debugger was quit, say.
            if failures:
                raise failures[0]() from error
            # JAX may run what it had compiled for a caller that did not wait.
            raise_recorded(error)
            raise
    if failures:
        raise failures[0]() from None
    return result


@contextmanager
def _recording(check: str, failures: list[Callable[[], CheckError]]) -> Generator[None]:
    with _locks.setdefault(check, threading.RLock()):
        outer = _failures.get(check)
        _failures[check] = failures
        try:
            yield
        finally:
            if outer is None:
                del _failures[check]
            else:
                _failures[check] = outer


def record_failure(check: str, make_error: Callable[[], CheckError]) -> int:
    """Record the failure of a check for the call that waits for it.

    Args:
        check: its name.
        make_error: makes the error, if it is to be raised.

    Returns:
        How many failures that call has by now; 0 if no call waits.
    """
    failures = _failures.get(check)
    if failures is None:
        return 0
    failures.append(make_error)
    return len(failures)


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
