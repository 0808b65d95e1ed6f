"""Checks inside compiled code: `error_if`.

A check is a host callback behind a conditional: a program whose checks hold never leaves the
device for them. The callback cannot be vectorized away, for `jax.vmap` hands it the whole batch of
predicates, so that the message can say which member failed.

Who raises? A call of `filter_jit` whose function was seen to contain a check *listens*: the
callback then only notes the failure, and the call waits for its results, looks, and raises from
the user's own line. Nothing is torn down half-way, so several devices cannot wait for each other.
Where nobody listens (plain `jax.jit`), the callback raises, and JAX passes that on in its own
error. A function without checks never listens, and never waits.
"""

import functools as ft
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from pytreemod.errors import ArgumentError, CheckError, describe, explain
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import divide
from pytreemod.typing import PyTree

ON_ERROR = "PYTREEMOD_ON_ERROR"
BREAKPOINT_FRAMES = "PYTREEMOD_ON_ERROR_BREAKPOINT_FRAMES"
_MODES = ("raise", "breakpoint", "nan", "off")


class _Failures:
    """Failures noted while somebody listens; calls in several threads share the list."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.listeners = 0
        self.noted: list[CheckError] = []

    def note(self, failure: CheckError) -> None:
        with self.lock:
            if self.listeners:
                self.noted.append(failure)
                return
        raise failure

    def take(self) -> CheckError | None:
        with self.lock:
            return self.noted.pop(0) if self.noted else None


_failures = _Failures()


@contextmanager
def listening() -> Iterator[Callable[[PyTree], None]]:
    """Have failures noted; yields a function that waits for results.

    Raises:
        CheckError: at the end, if a failure was noted meanwhile. (One of another thread's, perhaps:
            raised in the wrong place is better than lost.)
    """
    with _failures.lock:
        _failures.listeners += 1
    try:
        yield jax.block_until_ready
        failure = _failures.take()
    finally:
        with _failures.lock:
            _failures.listeners -= 1
            if not _failures.listeners:
                _failures.noted.clear()
    if failure is not None:
        raise failure


class _Tracing(threading.local):
    """The traces of `filter_jit` that are under way in this thread, innermost last."""

    def __init__(self) -> None:
        self.found: list[bool] = []


_tracing = _Tracing()


@contextmanager
def finding_checks() -> Iterator[Callable[[], bool]]:
    """Watch a trace; yields a function that tells whether it contained a check."""
    _tracing.found.append(False)
    position = len(_tracing.found) - 1
    seen = [False]

    def found() -> bool:
        return seen[0]

    try:
        yield found
    finally:
        seen[0] = _tracing.found.pop(position)
        if seen[0]:
            note_check()


def note_check() -> None:
    """Tell the trace that is under way that it contains a check."""
    if _tracing.found:
        _tracing.found[-1] = True


class _Report:
    """What to say when a check fails."""

    def __init__(self, messages: tuple[str, ...], site: str):
        self.messages = messages
        self.site = site

    def __call__(self, failed: Any, index: Any) -> Any:
        failed, index = np.asarray(failed), np.asarray(index)
        places = np.argwhere(failed)
        if failed.any():
            first = tuple(int(i) for i in places[0])
            message = self.messages[int(np.broadcast_to(index, failed.shape)[first])]
            _failures.note(self.error(message, first, len(places)))
        return np.asarray(True)

    def error(self, message: str, first: tuple[int, ...], count: int) -> CheckError:
        """The error for a failure, with where it happened as notes below the message."""
        error = CheckError(message)
        if first:
            others = f", and {count - 1} more" if count > 1 else ""
            error.add_note(f"for the batch index {first if len(first) > 1 else first[0]}{others}")
        if self.site:
            error.add_note(f"checked at {self.site}")
        return error


def _site() -> str:
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  (public in effect)
    here = os.path.dirname(os.path.dirname(__file__))
    while frame is not None and frame.f_code.co_filename.startswith(here):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"


def _make_check(on_failure: Callable[[Any, Any], Any]) -> Any:
    """A function `(failed, index) -> True` that calls `on_failure` if any of `failed` is True.

    Under `jax.vmap` it receives the whole batch, as one more leading axis, and its result is not
    mapped: the condition stays a condition and is not turned into a selection.
    """

    @custom_vmap
    def check(failed: Any, index: Any) -> Any:
        return jax.lax.cond(
            jnp.any(failed), on_failure, lambda failed, index: jnp.asarray(True), failed, index
        )

    @check.def_vmap
    def _(axis_size: int, in_batched: list[bool], failed: Any, index: Any) -> tuple[Any, bool]:  # pyright: ignore[reportUnusedFunction]
        if not in_batched[0]:
            failed = jnp.broadcast_to(failed, (axis_size, *jnp.shape(failed)))
        if not in_batched[1]:
            index = jnp.broadcast_to(index, (axis_size, *jnp.shape(index)))
        return check(failed, index), False

    return check


def _raising(report: _Report) -> Callable[[Any, Any], Any]:
    return ft.partial(
        jax.pure_callback, report, jax.ShapeDtypeStruct((), jnp.bool_), vmap_method="sequential"
    )


def _breaking(report: _Report) -> Callable[[Any, Any], Any]:
    frames = int(os.environ.get(BREAKPOINT_FRAMES, "1"))

    def stop(failed: Any, index: Any) -> Any:
        jax.debug.print(report.messages[0].replace("{", "{{").replace("}", "}}"))
        jax.debug.breakpoint(num_frames=frames)
        return _raising(report)(failed, index)

    return stop


@ft.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _guard(check: Any, arrays: list[Any], failed: Any, index: Any) -> list[Any]:
    passed = check(failed, index)
    # A selection that always gives the array: the check must not be dropped while it is used.
    return [_select(passed, array) for array in arrays]


def _select(passed: Any, array: Any) -> Any:
    return jax.lax.select(jnp.broadcast_to(passed, jnp.shape(array)), array, jnp.zeros_like(array))


@_guard.defjvp
def _guard_jvp(check: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _guard(check, *primals), tangents[0]


def error_if(x: PyTree, pred: Any, msg: str, *, on_error: str = "default") -> PyTree:
    """Raise an error if `pred` is True, also inside compiled code.

    Returns `x`, and takes effect only if what it returns is used. Under `filter_jit` the error is
    raised by the call; under plain `jax.jit`, JAX reports it when a result is waited for. Only a
    function that contains a check pays for it: such a call of `filter_jit` waits for its results.

    **Law.** If `pred` is False, `error_if(x, pred, msg)` is `x`; so are its derivatives.

    Args:
        x: any tree with at least one array.
        pred: a boolean, or a boolean array of any shape: any True is a failure.
        msg: what to say.
        on_error: `"raise"`; `"breakpoint"` (open a debugger, then raise); `"nan"` (replace
            floating arrays by NaN, raise nothing); `"off"`; `"default"` takes the environment
            variable PYTREEMOD_ON_ERROR, or else `"raise"`. Read when the function is traced.

    Returns:
        `x`.

    Raises:
        CheckError: the check failed. Its notes name the line of the check, and under `jax.vmap`
            the index in the batch.
        ArgumentError: `x` has no array, `pred` is not boolean, or `on_error` is unknown.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> @pm.filter_jit
        ... def root(x):
        ...     x = pm.error_if(x, x < 0, "x must not be negative")
        ...     return jnp.sqrt(x)
        >>> root(jnp.asarray(4.0))
        Array(2., dtype=float32, weak_type=True)
        >>> root(jnp.asarray(-4.0))
        Traceback (most recent call last):
            ...
        pytreemod.errors.CheckError: x must not be negative
        ...
    """
    return branched_error_if(x, pred, 0, [msg], on_error=on_error)


def branched_error_if(
    x: PyTree, pred: Any, index: Any, msgs: Sequence[str], *, on_error: str = "default"
) -> PyTree:
    """Like [`error_if`][pytreemod.error_if], with the message chosen by a traced index.

    Args:
        x: any tree with at least one array.
        pred: a boolean, or a boolean array.
        index: an integer: which message; of a shape that broadcasts against `pred`.
        msgs: the messages.
        on_error: as for `error_if`.

    Returns:
        `x`.

    Raises:
        CheckError: the check failed.
        ArgumentError: as for `error_if`; `msgs` is empty or holds something else than strings.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> pm.branched_error_if(jnp.asarray(1.0), False, 1, ["too small", "too large"])
        Array(1., dtype=float32, weak_type=True)
    """
    where = "error_if"
    messages = tuple(msgs)
    if not messages or not all(isinstance(m, str) for m in messages):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(explain(f"{where}(msg)", "text", describe(msgs)))
    mode = _mode(on_error)
    if not is_array(pred) and not isinstance(pred, bool):
        _refuse_pred(pred)
    if jnp.result_type(pred) != jnp.bool_:
        _refuse_pred(pred)
    arrays, structure = divide(x)
    if not arrays:
        raise ArgumentError(
            explain(
                f"{where}(x)",
                "a tree with at least one array",
                describe(x),
                cure="the check takes effect through the arrays that it returns",
            )
        )
    if mode == "off":
        return x
    if mode == "nan":
        failed = jnp.any(pred)
        return structure.assemble([_poison(failed, array) for array in arrays])
    report = _Report(messages, _site())
    failed, index = jnp.asarray(pred), jnp.asarray(index)
    if not isinstance(failed, jax.core.Tracer) and not isinstance(index, jax.core.Tracer):
        _check_now(report, np.asarray(failed), np.asarray(index))
        return x
    note_check()
    failed, index = jnp.broadcast_arrays(failed, index)
    any_failed = jnp.any(failed)
    first = jnp.argmax(failed.reshape(-1)) if failed.ndim else jnp.asarray(0)
    chosen = index.reshape(-1)[first] if failed.ndim else index
    check = _make_check((_breaking if mode == "breakpoint" else _raising)(report))
    return structure.assemble(_guard(check, arrays, any_failed, chosen))


def _check_now(report: _Report, failed: Any, index: Any) -> None:
    if not failed.any():
        return
    first = tuple(int(i) for i in np.argwhere(failed)[0])
    message = report.messages[int(np.broadcast_to(index, failed.shape)[first])]
    raise report.error(message, (), 1)


def _refuse_pred(pred: Any) -> None:
    raise ArgumentError(
        explain(
            "error_if(pred)",
            "a boolean, or an array of them",
            describe(pred),
            cure=["compare, for instance", "error_if(x, x < 0, ...)"],
        )
    )


def _mode(on_error: str) -> str:
    source = "on_error"
    if on_error == "default":
        source, on_error = ON_ERROR, os.environ.get(ON_ERROR, "raise")
    if on_error not in _MODES:
        raise ArgumentError(
            explain(f"error_if({source})", f"one of {', '.join(_MODES)}", describe(on_error))
        )
    return on_error


def _poison(failed: Any, array: Any) -> Any:
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return array
    return jnp.where(failed, jnp.full_like(array, jnp.nan), array)
