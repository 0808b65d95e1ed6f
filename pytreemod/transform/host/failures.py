"""Who raises when a check in a compiled program has failed.

A call of `filter_jit` whose program contains a check *listens*: the callback then only
notes the failure, and the call waits for its results, looks, and raises from the user's own line.
Nothing is torn down half-way, so several devices cannot wait for each other. Where nobody listens
(plain `jax.jit`, a transform that nothing compiles), the callback raises, and JAX passes that on in
its own error, of which our transforms make the check's again; on several devices it prints, and the
results are NaN, because the others would wait for the one that raised, forever. A function without
checks never listens, and never waits.
"""

from __future__ import annotations

import functools as ft
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar, cast

import jax

from pytreemod.errors import CheckError
from pytreemod.transform.boundary.wrapping import passing_on

_P = ParamSpec("_P")
_T = TypeVar("_T")


def call_listening(checks: Collection[str], call: Callable[[], _T], *, is_once: bool) -> _T:
    """Call, wait for the results, and raise the check that failed.

    Nothing tells which of several calls of one program it was in which a check failed. Where one
    failed that may have been another thread's, the call is made again while all others wait: how
    that ends is how it ends. (A callback inside of it that makes such a call, too, would wait
    forever; JAX does not allow callbacks to call it.)

    Args:
        checks: the checks to listen to, by name (see `checks_in`).
        call: makes the call.
        is_once: whether it may not be made again, for it gives its arguments away or has effects:
            then it is alone from the start.

    Raises:
        CheckError: a check failed.
    """
    listener = _Listener(checks, is_alone=is_once)
    result = listener.run(call)
    if listener.noted and not listener.own:
        # Alone, what it hears is its own.
        listener = _Listener(checks, is_alone=True)
        result = listener.run(call)
    listener.raise_first(listener.noted, None)
    return result


def surfacing(fn: Callable[_P, _T]) -> Callable[_P, _T]:
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
            raise_unheard(error)
            raise

    return call


def raise_unheard(cause: Exception) -> None:
    """Raise the check that failed while nobody listened, if `cause` is what JAX made of it."""
    # Without the lock: mostly nothing is there, and every error of a transform comes by here.
    if isinstance(cause, CheckError) or not _unheard:
        return
    text = str(cause)
    with _lock:
        found = next((failure for failure in _unheard if failure.mark in text), None)
        if found is not None:
            _unheard.remove(found)
    if found is not None:
        # Its traceback is that of a callback, in a thread of JAX's.
        raise found.error.with_traceback(None) from cause


class _Listener:
    """A call that wants to know of failures of its own checks."""

    def __init__(self, checks: Collection[str], is_alone: bool):
        self.checks = frozenset(checks)
        self.is_alone = is_alone
        self.thread = threading.get_ident()
        self.noted: list[Callable[[], CheckError]] = []
        # Those of which nobody but this call can have been the cause.
        self.own: list[Callable[[], CheckError]] = []

    def bars(self, other: _Listener) -> bool:
        """Whether another call must not run at the same time."""
        apart = self.thread != other.thread and (self.is_alone or other.is_alone)
        return apart and not self.checks.isdisjoint(other.checks)

    def run(self, call: Callable[[], Any]) -> Any:
        """Call, and wait for the results."""
        with _turns:
            _waiting.append(self)
            try:
                # In turn, so that one that must be alone comes to it.
                _turns.wait_for(lambda: not any(other.bars(self) for other in self.before()))
                _listeners.append(self)
            finally:
                _waiting.remove(self)
        try:
            return cast("Any", jax.block_until_ready(call()))
        except Exception as error:
            # What a failure has brought about: the debugger was quit, say.
            self.raise_first(self.own, error)
            # JAX may run what it had compiled while nobody listened.
            raise_unheard(error)
            raise
        finally:
            with _turns:
                _listeners.remove(self)
                _turns.notify_all()

    def before(self) -> list[_Listener]:
        """Those that run, and those that wait for longer."""
        return [*_listeners, *_waiting[: _waiting.index(self)]]

    def raise_first(self, noted: list[Callable[[], CheckError]], cause: Exception | None) -> None:
        if noted:
            raise noted[0]() from cause


_listeners: list[_Listener] = []
_waiting: list[_Listener] = []
_lock = threading.Lock()
_turns = threading.Condition(_lock)


def tell_listeners(check: str, make_error: Callable[[], CheckError]) -> int:
    """Tell those who listen to a check that it failed.

    Args:
        check: its name.
        make_error: makes the error, if it is to be raised.

    Returns:
        How often a listener has heard of a failure by now; 0 if nobody listens.
    """
    with _lock:
        heard = [listener for listener in _listeners if check in listener.checks]
        for listener in heard:
            listener.noted.append(make_error)
            # If several run this check, nothing tells whose failure it is.
            if len(heard) == 1:
                listener.own.append(make_error)
    return max((len(listener.noted) for listener in heard), default=0)


class _Unheard(NamedTuple):
    """A failure that was raised into JAX, because nobody listened."""

    mark: str
    error: CheckError


# The last of them: see `surfacing`.
_unheard: deque[_Unheard] = deque(maxlen=32)
_numbers = itertools.count()


def raise_into_jax(error: CheckError) -> NoReturn:
    """Raise in a callback, so that the error that JAX makes of it can be recognized.

    Of ours, that has the text alone, which others may have, too, and names of functions in a
    traceback: so this is raised in a function of a name that no other has.
    """
    mark = f"failure_{os.getpid()}_{next(_numbers)}_of_error_if"
    with _lock:
        _unheard.append(_Unheard(mark, error))

    # JAX passes the message on, and no notes.
    whole = CheckError("\n".join([str(error), *getattr(error, "__notes__", ())]))

    def fail() -> NoReturn:
        raise whole

    fail.__code__ = fail.__code__.replace(co_name=mark)
    fail()
