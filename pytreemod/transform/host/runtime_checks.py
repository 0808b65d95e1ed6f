"""Checks inside compiled code: `error_if`.

A check is a host callback behind a conditional. (If no call waits for it, it is a number that the
program returns: see `later_checks`.) So a program whose checks succeed never leaves the device for
them. `jax.vmap` cannot vectorize the callback: it passes the whole batch of predicates, so that the
message can name the member that failed.

`failures` raises the errors that callbacks record.
"""

from __future__ import annotations

import functools as ft
import math
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from pytreemod.errors import (
    ArgumentError,
    MessageError,
    OptionError,
    ShapeError,
    describe,
)
from pytreemod.transform.boundary.sowing import collects_checks
from pytreemod.transform.host.check_texts import CheckText, print_error, user_line
from pytreemod.transform.host.failures import raise_into_jax, record_failure
from pytreemod.transform.host.later_checks import NotedCheck, record_later
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import Structure, divide
from pytreemod.tree.traces import decided_late
from pytreemod.typing import PyTree, Tracer

_T = TypeVar("_T")

ON_ERROR = "PYTREEMOD_ON_ERROR"
BREAKPOINT_FRAMES = "PYTREEMOD_ON_ERROR_BREAKPOINT_FRAMES"
_MODES = ("raise", "breakpoint", "nan", "off")
_MARK = "error_if_"
_SEVERAL, _AWAITED = 1, 2
_MANY = 64
"""How many failures a call records before its program is aborted, which JAX logs at length."""


def error_if(x: _T, pred: Any, msg: str, *, on_error: str = "default") -> _T:
    """Raise an error if `pred` is True, also inside compiled code.

    Returns `x`. The check takes effect only if you use this result. Under `filter_jit` the call
    raises the error. Other filtered transforms outside `filter_jit` raise it, too, if JAX waits for
    the computation (on a CPU it does). Under plain `jax.jit`, JAX reports the error in its own way,
    when a result is waited for. On several devices only `filter_jit` raises, because raising
    elsewhere would leave devices waiting. Other transforms print the error, and the result is NaN.

    Only a function that contains a check waits, and so is slower. With
    [`filter_jit(checks="later")`][pytreemod.filter_jit] it does not wait: a later call raises.

    A Python bool is known during the trace. True raises at once, and False adds nothing to the
    program. To mark a branch that must not be reached when the program runs, pass an array:
    `error_if(x, jnp.array(True), "unreachable")`.

    **Law.** If `pred` is False, `error_if(x, pred, msg)` is `x`; so are its derivatives.

    Args:
        x: any tree; with at least one array, unless `pred` is known.
        pred: a boolean, or a boolean array of any shape: any True is a failure. Integers work, too:
            any number except 0 is a failure, such as a count of failures.
        msg: the message.
        on_error: `"raise"`; `"breakpoint"` (open a debugger that shows `x` and `pred`, then
            raise); `"nan"` (replace floating arrays by NaN, raise nothing); `"off"`; or
            `"default"`: the environment variable PYTREEMOD_ON_ERROR, or EQX_ON_ERROR, or else
            `"raise"`. It is read when the function is traced.

    Returns:
        `x`.

    Raises:
        CheckError: if the check failed. Its notes name the line of the check, and under `jax.vmap`
            the index in the batch.
        ArgumentError: if `x` has no array and `pred` is not known, if `pred` is neither boolean nor
            integer, or if `msg` is not a string.
        OptionError: if `on_error` is unknown.

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
    if not isinstance(msg, str):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
        raise ArgumentError("error_if(msg)", "text", describe(msg))
    return _check("error_if", x, pred, 0, (msg,), on_error)


def branched_error_if(
    x: _T, pred: Any, index: Any, msgs: Sequence[str], *, on_error: str = "default"
) -> _T:
    """Like [`error_if`][pytreemod.error_if], with the message chosen by a traced index.

    Args:
        x: any tree; with at least one array, unless `pred` is known.
        pred: as for `error_if`.
        index: the index of the message, an integer. For one message per element, an array of a
            shape that broadcasts against `pred` (the first failure's message is shown).
        msgs: the messages.
        on_error: as for `error_if`.

    Returns:
        `x`.

    Raises:
        CheckError: if the check failed.
        ArgumentError: as for `error_if`; or if `msgs` contains values other than strings.
        MessageError: if `msgs` is empty, or `index` is not an integer, or is known and out of
            range.
        ShapeError: if `index` does not broadcast against `pred`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> pm.branched_error_if(jnp.asarray(1.0), False, 1, ["too small", "too large"])
        Array(1., dtype=float32, weak_type=True)
    """
    if isinstance(msgs, str) or not all(isinstance(m, str) for m in msgs):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
        raise ArgumentError("branched_error_if(msgs)", "a list of strings", describe(msgs))
    if not msgs:
        raise MessageError("branched_error_if(msgs)", "a list of strings", describe(msgs))
    return _check("branched_error_if", x, pred, index, tuple(msgs), on_error)


def _check(
    where: str, x: PyTree, pred: Any, index: Any, messages: tuple[str, ...], on_error: str
) -> PyTree:
    mode = _mode(where, on_error)
    _require_truth(where, pred)
    _require_index(where, index, len(messages))
    # A bool is checked at once, also in a program: it is known whether or not `x` is used.
    is_known = isinstance(pred, int) or not _is_traced(pred)
    # In NumPy if the values are known: in a trace, jnp would make tracers.
    failed: Any = pred if isinstance(pred, Tracer) else np.asarray(pred)
    failed = failed if failed.dtype == jnp.bool_ else failed != 0
    index = index if isinstance(index, Tracer) else np.asarray(index)
    _require_fit(where, failed, index)
    if mode == "off" or (not isinstance(failed, Tracer) and not failed.any()):
        return x
    arrays, structure = divide(x)
    text = CheckText(messages, user_line())
    check = _Check(text, structure if mode == "breakpoint" else None)
    # Values for a debugger must go to the host with the failure, so only if one is wanted.
    seen = arrays if mode == "breakpoint" else []
    if is_known and mode != "nan" and not isinstance(index, Tracer):
        check.raise_now(failed, index, seen, is_batch=False)
    if not arrays:
        raise ArgumentError(
            f"{where}(x)",
            "a tree with at least one array",
            describe(x),
            hint="the check takes effect through the arrays that it returns",
        )
    if mode == "nan":
        arrays = [jnp.asarray(array) for array in arrays]
        return structure.assemble(_poisoned(arrays, jnp.any(failed)))
    if mode == "raise" and collects_checks():
        record_later(check.name, text, failed, index)
        return x
    guard = _make_guard(check)
    guarded = cast("list[Any]", _guarded(guard, arrays, *_first_of(failed, index), seen))
    return structure.assemble(guarded)


def check_again(
    arrays: list[Any], source: NotedCheck, shape: tuple[int, ...], numbers: Any
) -> list[Any]:
    """Repeat a check of an inner program in the program around it.

    Args:
        arrays: the arrays that go through the check.
        source: the meaning of its numbers.
        shape: the shape of its numbers.
        numbers: its part of the program's summary.

    Returns:
        The arrays.
    """
    code = numbers[0]
    index = jnp.where(code > 0, code - 1, code)
    # The first that failed; among steps, which have no number here, any of them.
    failed = code != 0
    if shape and not source.steps:
        position = jnp.arange(math.prod(shape), dtype=numbers.dtype) == numbers[1]
        failed = (failed & position).reshape(shape)
    check = _Check(source.text)
    if collects_checks():
        record_later(check.name, source.text, failed, index)
        return arrays
    if not arrays:
        return arrays
    guard = _make_guard(check)
    return cast(
        "list[Any]", _guarded(guard, arrays, failed, jnp.broadcast_to(index, failed.shape), [])
    )


def _first_of(failed: Any, index: Any) -> tuple[Any, Any]:
    """Whether any failed, and the index of the first that did."""
    if index.ndim == 0:
        return jnp.any(failed), jnp.asarray(index)
    # Each element may have its own message.
    failed, index = jnp.broadcast_arrays(failed, index)
    return jnp.any(failed), index.reshape(-1)[jnp.argmax(failed.reshape(-1))]


def _is_traced(value: Any) -> bool:
    """Whether a value, known or not, is part of a program that runs later, or never."""
    return isinstance(value, Tracer) or isinstance(jnp.logical_not(value), Tracer)


class _Check:
    """A check: the messages and the action for a failure."""

    def __init__(self, text: CheckText, structure: Structure | None = None):
        self.text = text
        # The same for each trace of the same line.
        self.name = f"{_MARK}{zlib.crc32(repr((*text,)).encode()):08x}"
        # The structure of `x` for the debugger; None without a debugger.
        self.structure = structure
        self.frames = 0 if structure is None else _frames()

    def fail(self, failed: Any, index: Any, seen: list[Any]) -> Any:
        """Call the host, on the device, after a failure."""
        manner = _manner()()
        if self.structure is not None:
            failed = self.call_back(self.announce, failed, failed, index, manner)
            failed = self.stop(failed, self.structure.assemble(seen))
        return self.call_back(self.report, jnp.asarray(True), failed, index, manner)

    def succeed(self, failed: Any, index: Any, seen: list[Any]) -> Any:
        """Do nothing, on the device, without a failure."""
        return jnp.asarray(True)

    def stop(self, pred: Any, x: PyTree) -> Any:
        """Open a debugger, which shows `x` and `pred`: the locals of this frame."""
        # With the token, so that the effects happen in the order written here.
        return jax.debug.breakpoint(num_frames=self.frames, token=pred)

    def call_back(self, function: Callable[..., Any], like: Any, *args: Any) -> Any:
        """Call a function on the host, which returns an array like `like`."""
        result = jax.ShapeDtypeStruct(like.shape, like.dtype)
        return jax.pure_callback(function, result, *args, vmap_method="sequential")

    def report(self, failed: Any, index: Any, manner: Any) -> Any:
        """Record the failure on the host, or raise."""
        make_error = ft.partial(self.text.error, failed, index, is_batch=True)
        # A program that no call waits for does not count among those that wait for this check.
        count = record_failure(self.name, make_error) if manner & _AWAITED else 0
        # A loop that the check should end may never end.
        if not (0 < count <= _MANY or manner & _SEVERAL):
            raise_into_jax(make_error())
        if not count:
            error = make_error()
            error.add_note(
                "printed, because jax.jit on several devices cannot raise it; filter_jit can"
            )
            print_error(error)
        return np.asarray(False)

    def announce(self, failed: Any, index: Any, manner: Any) -> Any:
        """Record the failure on the host, and print it, before the debugger opens."""
        make_error = ft.partial(self.text.error, failed, index, is_batch=True)
        if manner & _AWAITED:
            record_failure(self.name, make_error)
        print_error(make_error())
        return np.asarray(failed)

    def raise_now(self, failed: Any, index: Any, seen: list[Any], *, is_batch: bool) -> None:
        """Raise from the line of the check itself, because everything is known there."""
        error = self.text.error(failed, index, is_batch=is_batch)
        if self.structure is not None:
            print_error(error)
            try:
                self.stop(jnp.asarray(failed), self.structure.assemble(seen))
            # After quitting the debugger, the error must still show why it was opened.
            except RuntimeError as quit_debugger:
                raise error from quit_debugger
        raise error


def _make_guard(check: _Check) -> Any:
    """Return a function `(failed, index, seen) -> passed` that calls `check.fail` if any failed.

    Under `jax.vmap` it receives the whole batch, with one more leading axis, and its result is not
    mapped. So the condition remains one, and does not become a selection.
    """

    def run(failed: Any, index: Any, seen: list[Any]) -> Any:
        cond = cast("Any", jax.lax.cond)
        return cond(jnp.any(failed), check.fail, check.succeed, failed, index, seen)

    run.__name__ = run.__qualname__ = check.name
    # Compiled under the name of the check, by which `checks_in` finds it in the program.
    guard: Any = custom_vmap(jax.jit(run))

    @guard.def_vmap
    def _(  # pyright: ignore[reportUnusedFunction]
        axis_size: int, in_batched: list[Any], failed: Any, index: Any, seen: list[Any]
    ) -> tuple[Any, bool]:
        def batch(is_batched: bool, value: Any) -> Any:
            return value if is_batched else jnp.broadcast_to(value, (axis_size, *value.shape))

        failed, index, seen = jax.tree.map(batch, list(in_batched), [failed, index, seen])
        # There is another transform around: the guard remains one, for the whole batch.
        if _is_traced(failed) or _is_traced(index):
            return guard(failed, index, seen), False
        if np.asarray(failed).any():
            check.raise_now(failed, index, seen, is_batch=True)
        return jnp.asarray(True), False

    return guard


@ft.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _guarded(guard: Any, arrays: list[Any], failed: Any, index: Any, seen: list[Any]) -> list[Any]:
    # Not differentiated: the rule below passes tangents by.
    passed = guard(failed, index, seen)
    # A selection, so that the check is not dropped while one of the arrays is used.
    return [jax.lax.select(passed, array, _after_failure(array, passed)) for array in arrays]


@_guarded.defjvp
def _guarded_jvp(guard: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    return cast("Any", _guarded(guard, *primals)), tangents[0]


def _after_failure(array: Any, passed: Any) -> Any:
    """Return the value that replaces an array when its check has failed."""
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return jnp.full_like(array, jnp.nan)
    # Integers have no NaN, and a counter that starts again would count forever. So they are
    # unchanged, by code that no compiler can simplify, because that would drop the check.
    if array.dtype == bool:
        return array | passed
    if jnp.issubdtype(array.dtype, jnp.integer):
        # Python numbers, so that a weak type remains weak.
        return array + jnp.where(passed, 1, 0)
    return jnp.zeros_like(array)


@jax.custom_jvp
def _poisoned(arrays: list[Any], failed: Any) -> list[Any]:
    return [
        jnp.where(failed, jnp.full_like(array, jnp.nan), array)
        if jnp.issubdtype(array.dtype, jnp.inexact)
        else array
        for array in arrays
    ]


@_poisoned.defjvp
def _poisoned_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    # The tangents of `x`, because the law of a check includes derivatives.
    return _poisoned(*primals), tangents[0]


def checks_in(jaxpr: Any) -> frozenset[str]:
    """Return the names of the checks in a program.

    Searching the program finds them all. Watching the trace would miss those in functions that JAX
    had traced before: the body of a `scan`, an inner `jax.jit`.
    """
    names: set[str] = set()
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if type(value) in (tuple, list):
            for item in value:
                visit(item)
        # A jaxpr that is called twice is one object. Without the set, nested calls would take
        # exponential time.
        elif hasattr(value, "eqns") and id(value) not in seen:
            seen.add(id(value))
            for equation in value.eqns:
                name = equation.params.get("name")
                if isinstance(name, str) and name.startswith(_MARK):
                    names.add(name)
                for parameter in equation.params.values():
                    visit(parameter)

    visit(jaxpr)
    return frozenset(names)


class _Making(threading.local):
    """The number of programs being made in this thread whose callers will wait for checks."""

    def __init__(self) -> None:
        self.count = 0


_making = _Making()


def begin_making() -> None:
    """Let `call_checked` run the programs that this thread lowers from now on."""
    _making.count += 1


def end_making() -> None:
    """Undo one `begin_making`."""
    _making.count -= 1


@ft.cache
def _manner() -> Any:
    """Return how the program runs, as a value: on several devices, and with a caller that waits.

    Both are known when the program is lowered. Only JAX knows the first. The second depends on who
    makes the program, even if JAX had traced parts of it before, for others.
    """

    def decide(is_several: bool) -> Any:
        return np.int32(_SEVERAL * is_several + _AWAITED * (_making.count > 0))

    return decided_late("manner", np.int32(0), decide)


def _require_truth(where: str, pred: Any) -> None:
    # Floats are refused: they appear if `x` and `pred` are swapped, or nothing is compared.
    if isinstance(pred, int) or (is_array(pred) and _is_discrete(pred)):
        return
    raise ArgumentError(
        f"{where}(pred)",
        "a boolean, an integer, or an array of them",
        describe(pred),
        hint=["compare, for example:", "error_if(x, x < 0, ...)"],
    )


def _is_discrete(array: Any) -> bool:
    return array.dtype == jnp.bool_ or jnp.issubdtype(array.dtype, jnp.integer)


def _require_index(where: str, index: Any, count: int) -> None:
    is_number = is_array(index) or type(index) is int
    fits = is_number and jnp.issubdtype(jnp.result_type(index), jnp.integer)
    if fits and not isinstance(index, Tracer):
        fits = bool(np.all((np.asarray(index) >= -count) & (np.asarray(index) < count)))
    if not fits:
        is_known = is_number and not isinstance(index, Tracer) and np.ndim(index) == 0
        got = np.asarray(index).item() if is_known else index
        expected = f"an index of msgs (an integer below {count})"
        raise MessageError(f"{where}(index)", expected, describe(got))


def _require_fit(where: str, failed: Any, index: Any) -> None:
    try:
        np.broadcast_shapes(failed.shape, index.shape)
    except ValueError:
        expected = f"a shape that broadcasts against that of pred ({describe(failed)})"
        raise ShapeError(f"{where}(index)", expected, describe(index)) from None


def _mode(where: str, on_error: str) -> str:
    source = f"{where}(on_error)"
    if on_error == "default":
        source, on_error = _setting(ON_ERROR, "raise")
    if on_error not in _MODES:
        hint = ["for example:", f"{'on_error' if '(' in source else source}='raise'"]
        raise OptionError(source, f"one of {', '.join(_MODES)}", describe(on_error), hint=hint)
    return on_error


def _frames() -> int:
    source, text = _setting(BREAKPOINT_FRAMES, "1")
    if not text.isdecimal():
        raise ArgumentError(source, "a count of frames", describe(text))
    return int(text)


def _setting(name: str, default: str) -> tuple[str, str]:
    """Return the environment variable to use, and its value."""
    # Scripts that set Equinox's variable continue to work.
    theirs = name.replace("PYTREEMOD", "EQX")
    source = theirs if name not in os.environ and theirs in os.environ else name
    return source, os.environ.get(source, default)
