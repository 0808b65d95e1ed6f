"""Checks inside compiled code: `error_if`.

A check is a host callback behind a conditional, so a program whose checks succeed never leaves the
device for them. The callback records the failure; the call of `filter_jit` that waits for its
results raises it, from the user's line. Without such a call (plain `jax.jit`), the callback raises,
and JAX reports it in its own way; on several devices it prints, because raising would leave the
other devices waiting. `jax.vmap` cannot vectorize the callback: it passes the whole batch of
predicates, so the message can name the member that failed.

Inside `filter_checkify` a check is one of `checkify`, whose error is a value.
"""

from __future__ import annotations

import functools as ft
import itertools
import os
import sys
import threading
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from pytreemod.errors import ArgumentError, CheckError, describe
from pytreemod.tree.snapshots import Structure, divide
from pytreemod.tree.traces import context_value
from pytreemod.typing import PyTree, Tracer, untyped_jax

_T = TypeVar("_T")

CHECKIFIED = "checkify"
"""The context in which a check is one of `checkify`."""

_MODES = ("raise", "breakpoint", "nan", "off")
_MARK = "error_if_"
_MANY = 64
"""How many failures a call records before its program is aborted: a loop might never end."""

_lax: Any = jax.lax


def error_if(x: _T, pred: Any, msg: str, *, on_error: str = "default") -> _T:
    """Raise an error if `pred` is True, also inside compiled code.

    Returns `x`. The check takes effect only if you use this result. Under `filter_jit` the call
    raises the error. Other filtered transforms raise it, too, if JAX waits for the computation (on
    a CPU it does). Under plain `jax.jit`, JAX reports the error in its own way; on several devices
    it is printed, and the result is NaN. Only a function that contains a check waits, and so is
    slower; inside [`filter_checkify`][pytreemod.filter_checkify] the error is a value, and nothing
    waits.

    A predicate that is known during the trace raises at once, or adds nothing to the program.

    **Law.** If `pred` is False, `error_if(x, pred, msg)` is `x`; so are its derivatives.

    Args:
        x: any tree; with at least one array, unless `pred` is known.
        pred: a boolean, or a boolean array of any shape: any True is a failure. Integers work, too:
            any number except 0 is a failure.
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
        ArgumentError: if `x` has no array and `pred` is not known, or `pred` is neither boolean nor
            integer, or `on_error` is unknown.

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
        ArgumentError: as for `error_if`; or if `msgs` is empty, or `index` is known and out of
            range.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> pm.branched_error_if(jnp.asarray(1.0), False, 1, ["too small", "too large"])
        Array(1., dtype=float32, weak_type=True)
    """
    if isinstance(msgs, str) or not msgs:
        raise ArgumentError(f"branched_error_if: the messages are a list, not {describe(msgs)}")
    known = not isinstance(index, Tracer)
    if known and not np.all((np.asarray(index) >= -len(msgs)) & (np.asarray(index) < len(msgs))):
        raise ArgumentError(f"branched_error_if: there is no message {describe(index)}")
    return _check("branched_error_if", x, pred, index, tuple(msgs), on_error)


def _check(
    where: str, x: Any, pred: Any, index: Any, messages: tuple[str, ...], on_error: str
) -> Any:
    if on_error == "default":
        on_error = _setting("", "raise")
    if on_error not in _MODES:
        raise ArgumentError(f"on_error is one of {', '.join(_MODES)}, not {describe(on_error)}")
    dtype = jnp.result_type(pred)
    if dtype != jnp.bool_ and not jnp.issubdtype(dtype, jnp.integer):
        # Floats appear if `x` and `pred` are swapped, or nothing is compared.
        fact = f"{where}: the predicate is no boolean, but {describe(pred)}"
        raise ArgumentError(fact, hint=f"{where}(x, x < 0, ...)")
    if on_error == "off":
        return x
    check = _Check(messages, _user_line())
    # In NumPy if the values are known: in a trace, jnp would make tracers.
    failed: Any = pred if isinstance(pred, Tracer) else np.asarray(pred)
    failed = failed if failed.dtype == jnp.bool_ else failed != 0
    if not isinstance(failed, Tracer):
        if not failed.any():
            return x
        if on_error != "nan" and not isinstance(index, Tracer):
            check.raise_now(failed, index, x if on_error == "breakpoint" else None, is_batch=False)
    arrays, structure = divide(x)
    arrays = [jnp.asarray(array) for array in arrays]
    if not arrays:
        fact = f"{where}: the check takes effect through arrays, and x is {describe(x)}"
        raise ArgumentError(fact)
    failed, index = _first_of(jnp.asarray(failed), jnp.asarray(index))
    if on_error == "nan":
        return structure.assemble(_poisoned(arrays, failed))
    if context_value(CHECKIFIED) and on_error == "raise":
        check.checkify(failed, index)
        return x
    check.structure = structure if on_error == "breakpoint" else None
    seen = [] if check.structure is None else arrays
    guarded = _guarded(check.guard(), arrays, failed, index, seen)
    return structure.assemble(guarded)


def _first_of(failed: Any, index: Any) -> tuple[Any, Any]:
    """Whether any failed, and the index of the first that did."""
    if index.ndim == 0:
        return jnp.any(failed), index
    # Each element may have its own message.
    failed, index = jnp.broadcast_arrays(failed, index)
    return jnp.any(failed), index.reshape(-1)[jnp.argmax(failed.reshape(-1))]


@ft.partial(untyped_jax.custom_jvp, nondiff_argnums=(0,))
def _guarded(guard: Any, arrays: list[Any], failed: Any, index: Any, seen: list[Any]) -> Any:
    # Not differentiated: the rule below passes tangents by.
    passed = guard(failed, index, seen)
    # A selection, so that the check is not dropped while one of the arrays is used.
    return [_lax.select(passed, array, _after_failure(array, passed)) for array in arrays]


@_guarded.defjvp
def _guarded_jvp(guard: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _guarded(guard, *primals), tangents[0]


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
def _poisoned(arrays: list[Any], failed: Any) -> Any:
    def poison(array: Any) -> Any:
        return jnp.where(failed, jnp.full_like(array, jnp.nan), array)

    return [poison(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in arrays]


@_poisoned.defjvp
def _poisoned_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    # The tangents of `x`, because the law of a check includes derivatives.
    return _poisoned(*primals), tangents[0]


class _Check:
    """A check: its messages, its line, and what happens after a failure."""

    def __init__(self, messages: tuple[str, ...], line: str):
        self.messages, self.line = messages, line
        # Of `x`, for the debugger; None without one.
        self.structure: Structure | None = None
        # The same for each trace of the same line.
        self.name = f"{_MARK}{zlib.crc32(repr((messages, line)).encode()):08x}"

    def error(self, failed: Any, index: Any, *, is_batch: bool) -> CheckError:
        """Return the error for a failure, with notes on where it happened."""
        failed, index = np.broadcast_arrays(failed, index)
        place = tuple(map(int, np.argwhere(failed)[0]))
        i = int(index[place])
        known = -len(self.messages) <= i < len(self.messages)
        error = CheckError(self.messages[i] if known else f"message {i} (no such message)")
        error.__notes__ = []
        if place and is_batch:
            error.add_note(f"for the batch index {place[0] if len(place) == 1 else place}")
        if self.line:
            error.add_note(f"checked at {self.line}")
        return error

    def raise_now(self, failed: Any, index: Any, x: PyTree, *, is_batch: bool) -> NoReturn:
        """Raise the error at once; open a debugger first, if there is an `x` to show."""
        error = self.error(failed, index, is_batch=is_batch)
        if x is not None:
            _print(error)
            _stop(jnp.asarray(failed), x)
        raise error

    def checkify(self, failed: Any, index: Any) -> None:
        """Add the check to the `checkify` around it: one for each message."""
        from jax.experimental import checkify  # Here, because the import takes time.

        count = len(self.messages)
        known = (index >= -count) & (index < count)
        checkify.check(~failed | known, "there is no message of that index")
        for i, message in enumerate(self.messages):
            is_own = failed & ((index == i) | (index == i - count))
            # Braces would be the names of values.
            checkify.check(~is_own, message.replace("{", "{{").replace("}", "}}"))

    def guard(self) -> Any:
        """Return a function `(failed, index, seen) -> passed` that calls the host if any failed.

        Under `jax.vmap` it receives the whole batch, and its result is not mapped: so the
        condition remains one, and does not become a selection.
        """

        def fail(failed: Any, index: Any, seen: list[Any]) -> Any:
            if self.structure is not None:
                struct = jax.ShapeDtypeStruct(failed.shape, bool)
                failed = jax.pure_callback(self.announce, struct, failed, index)
                failed = _stop(failed, self.structure.assemble(seen))
            struct = jax.ShapeDtypeStruct((), bool)
            return jax.pure_callback(self.report, struct, failed, index, _is_several()(failed))

        def run(failed: Any, index: Any, seen: list[Any]) -> Any:
            passed = _always(jnp.asarray(True))
            return _lax.cond(jnp.any(failed), fail, passed, failed, index, seen)

        # Compiled under the name of the check, by which `checks_in` finds it in the program.
        run.__name__ = run.__qualname__ = self.name
        guard: Any = custom_vmap(jax.jit(run))

        @guard.def_vmap
        def _(  # pyright: ignore[reportUnusedFunction]
            size: int, batched: list[Any], failed: Any, index: Any, seen: list[Any]
        ) -> tuple[Any, bool]:
            def whole(is_batched: bool, value: Any) -> Any:
                return value if is_batched else jnp.broadcast_to(value, (size, *value.shape))

            failed, index, seen = jax.tree.map(whole, [*batched], [failed, index, seen])
            if isinstance(failed, Tracer) or isinstance(index, Tracer):
                return guard(failed, index, seen), False
            if np.asarray(failed).any():
                x = None if self.structure is None else self.structure.assemble(seen)
                self.raise_now(failed, index, x, is_batch=True)
            return jnp.asarray(True), False

        return guard

    def report(self, failed: Any, index: Any, is_several: Any) -> Any:
        """On the host, after a failure: record it for the calls that wait for it, or raise it."""
        error = self.error(failed, index, is_batch=True)
        count = _record(self.name, error)
        if count == 0 and is_several:
            _print(error)
        elif (count == 0 or count > _MANY) and not is_several:
            _raise_into_jax(error)
        return np.asarray(False)

    def announce(self, failed: Any, index: Any) -> Any:
        """On the host, before the debugger opens: print the message."""
        _print(self.error(failed, index, is_batch=True))
        return np.asarray(failed)


def _print(error: CheckError) -> None:
    print(f"CheckError: {error}", *error.__notes__, sep="\n", file=sys.stderr)


def _stop(pred: Any, x: PyTree) -> Any:
    """Open a debugger, which shows `x` and `pred`: the locals of this frame."""
    return jax.debug.breakpoint(num_frames=int(_setting("_BREAKPOINT_FRAMES", "1")), token=pred)


def _setting(end: str, default: str) -> str:
    return os.environ.get(f"PYTREEMOD_ON_ERROR{end}", os.environ.get(f"EQX_ON_ERROR{end}", default))


@ft.cache
def _is_several() -> Any:
    """Return the primitive that says whether a program runs on several devices.

    This is decided when the program is lowered. Without a primitive, checks would have to know it
    while they are traced, and each program would be traced again for other devices. It has an
    operand, because `jax.ensure_compile_time_eval` would evaluate it at once without one.
    """
    # Here, because JAX loads Pallas with `jax.extend.core`.
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    def lower(context: Any, operand: Any) -> Any:
        axes = getattr(context.module_context, "axis_context", None)
        count = getattr(axes, "num_devices", getattr(getattr(axes, "mesh", None), "size", 1))
        return cast("Any", mlir).lower_fun(_always(np.bool_(count != 1)), False)(context, operand)

    primitive: Any = Primitive("is_several")
    primitive.def_impl(_always(np.bool_(False)))
    primitive.def_abstract_eval(_always(jax.typeof(np.bool_(False))))
    mlir.register_lowering(primitive, lower)
    return primitive.bind


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_: value  # pyright: ignore[reportUnknownLambdaType]


# ---- the caller that waits


class _Call:
    """A call that waits for its results: the checks in it, and their failures."""

    def __init__(self, checks: Collection[str]):
        self.checks, self.thread = frozenset(checks), threading.get_ident()
        self.failures: list[CheckError] = []


_running: list[_Call] = []
_turns = threading.Condition()
# What was raised into JAX, by a mark in its traceback: JAX raises an error of its own.
_raised: dict[str, CheckError] = {}
_numbers = itertools.count()


def call_checked(checks: Collection[str], call: Callable[[], _T]) -> _T:
    """Call; where there are checks, wait for the results, and raise the one that failed.

    Calls of several threads that have a check in common take turns, so a failure belongs to one.

    Args:
        checks: the checks in the program, by name.
        call: makes the call.

    Raises:
        CheckError: if a check failed.
    """
    if not checks:
        return call()
    mine = _Call(checks)
    with _turns:
        # A thread of JAX's runs a callback, perhaps of a call that would wait for it in turn.
        if not threading.current_thread().name.startswith("Dummy"):
            _turns.wait_for(lambda: not any(_bars(other, mine) for other in _running))
        _running.append(mine)
    try:
        result = untyped_jax.block_until_ready(call())
    except Exception:
        # It may follow from the failure: a loop was ended, or the user quit the debugger.
        if not mine.failures:
            raise
        result = None
    finally:
        with _turns:
            _running.remove(mine)
            _turns.notify_all()
    if mine.failures:
        raise mine.failures[0]
    return cast("_T", result)


def _bars(other: _Call, mine: _Call) -> bool:
    return other.thread != mine.thread and not other.checks.isdisjoint(mine.checks)


def _record(check: str, error: CheckError) -> int:
    """Record a failure for the calls that wait for it; return how many one has by now."""
    with _turns:
        calls = [call for call in _running if check in call.checks]
        for call in calls:
            call.failures.append(error)
    return max((len(call.failures) for call in calls), default=0)


def _raise_into_jax(error: CheckError) -> NoReturn:
    """Raise in a callback, so that JAX's error about it can be recognized.

    JAX's error has our message, which others may share, and the names of functions in a traceback.
    So it is raised in a function with a unique name.
    """
    mark = f"failure_{os.getpid()}_{next(_numbers)}_of_error_if"
    _raised[mark] = error
    for old in [*_raised][:-32]:
        _raised.pop(old, None)
    # JAX passes the message on, without notes.
    whole = CheckError("\n".join([str(error), *error.__notes__]))

    def fail() -> NoReturn:
        raise whole

    fail.__code__ = fail.__code__.replace(co_name=mark)
    fail()


def as_check_error(error: Exception) -> Exception:
    """Return the failed check that an error of JAX is about; `error` itself if it is about none."""
    text = "" if not _raised or isinstance(error, CheckError) else str(error)
    mark = next((mark for mark in [*_raised] if mark in text), "")
    found = _raised.pop(mark, None)
    if found is None:
        return error
    # JAX's error would be printed above it.
    found.__suppress_context__ = True
    return found.with_traceback(None)


def checks_in(jaxpr: Any) -> frozenset[str]:
    """Return the names of the checks in a program, also in functions that were traced before."""
    names: set[str] = set()
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if type(value) in (tuple, list):
            for item in value:
                visit(item)
        # A jaxpr that is called twice is one object: nested calls would take exponential time.
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


def _user_line() -> str:
    """Return the user's line that called this package; empty if there is none."""
    frame: Any = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  (public in effect)
    ours = (os.path.dirname(os.path.dirname(__file__)), "<generated for ")
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"
