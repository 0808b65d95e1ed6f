"""Checks that no call waits for: the program returns their failures as numbers.

Under `filter_jit(checks="later")` a check has no callback. It records an integer (`record_later`):
0, or the number of the message for a failure. Every filtered transform returns these numbers, like
the values of `sow`. They become one of the program's results (`compilation.later_calls`). Each
function has a queue of such results (`Pending`). Its next call looks at those that have arrived,
and raises the failures. The others are for a later call.

If a function is deleted, `raise_errors` still reports its queue, or else the exit of the program.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pytreemod.errors import CaptureError, CheckError, explain
from pytreemod.transform.boundary.plain_transforms import plain_transform
from pytreemod.transform.boundary.sowing import CHECKS, AbstractNotedCheck, Label, note
from pytreemod.transform.host.check_texts import CheckText, print_error
from pytreemod.tree.traces import is_tracing
from pytreemod.typing import untyped_jax

_numpy: Any = np

# ---- while a program is traced


class NotedCheck(AbstractNotedCheck):
    """The meaning of the number that a check has recorded; equal for each trace of one line.

    Attributes:
        text: the messages of the check.
        steps: the axes of the number that belong to loops, counted from the last.
    """

    __slots__ = ("steps", "text")

    def __init__(self, text: CheckText, steps: tuple[int, ...] = ()):
        self.text = text
        self.steps = steps

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NotedCheck) and (self.text, self.steps) == (
            other.text,
            other.steps,
        )

    def __hash__(self) -> int:
        return hash((self.text, self.steps))

    def in_step(self, axis: int) -> NotedCheck:
        """The same for values of several steps, on one more axis: this position from the end."""
        return NotedCheck(self.text, (*self.steps, axis))

    def settle(self, value: Any) -> None:
        """Raise, if the value is known and is a failure.

        Raises:
            CheckError: if it is.
        """
        # Without a run, the value has only a type.
        if isinstance(value, jax.ShapeDtypeStruct):
            return
        codes = np.asarray(value)
        if codes.any():
            failed, index = codes != 0, _index_of(codes)
            raise self.text.error(failed, index, is_batch=True, steps=self.steps)

    def refuse(self) -> NoReturn:
        """Refuse a value that cannot be returned from here.

        Raises:
            CaptureError: always.
        """
        plain = plain_transform()
        hint = [
            "use a transform that returns them, instead of jax.jit, jax.vmap, jax.lax.scan, ...:",
            "pm.filter_jit, filter_vmap, filter_grad, filter_scan, filter_cond, filter_while_loop",
        ]
        if plain is not None:
            hint = [f"instead of {plain.name}:", plain.instead]
        inside = "a transform that returns none" if plain is None else plain.name
        raise CaptureError(
            explain(
                f'a check under filter_jit(checks="later"), {self.text.messages[0]!r}',
                "a call that can return checks",
                f"one inside {inside}",
                at=[self.text.site] if self.text.site else [],
                hint=hint,
            )
        )


def record_later(name: str, text: CheckText, failed: Any, index: Any) -> None:
    """Record whether a check failed, so that a later call of `filter_jit` raises it.

    Args:
        name: the name of the check.
        text: its messages.
        failed: whether it failed, a bool; or several, of which any is a failure.
        index: the index of the message; or several, of a shape that broadcasts against `failed`.

    Raises:
        CaptureError: if it cannot be returned from here.
    """
    # 0 is success. An index from the front is counted from 1, one from the back from -1.
    numbers: Any = np if isinstance(index, np.ndarray) else jnp
    codes: Any = numbers.where(index < 0, index, index + 1).astype(np.int32)
    if codes.ndim:
        # Each element may have its own message; the first failure's is used.
        failed, codes = jnp.broadcast_arrays(failed, codes)
        codes = codes.reshape(-1)[jnp.argmax(failed.reshape(-1))]
    if np.ndim(failed):
        failed = jnp.any(failed)
    code = jax.lax.select(failed, jnp.asarray(codes), jnp.zeros((), np.int32))
    note(Label(CHECKS, name, source=NotedCheck(text)), code)


def _index_of(code: Any) -> Any:
    return _numpy.where(code > 0, code - 1, code)


# ---- when the program has run


class Recorded(NamedTuple):
    """One check of a program.

    Attributes:
        source: the meaning of its numbers.
        shape: the shape of its numbers: the axes of maps and loops around the check.
    """

    source: NotedCheck
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The length of its part of the summary."""
        return 3 if self.shape else 1

    def error(self, numbers: Any) -> CheckError:
        """Return the error for its part of a summary."""
        code, position, count = (*map(int, numbers), 0, 1)[:3]
        failed = np.zeros(self.shape, bool)
        failed[np.unravel_index(position, self.shape) if self.shape else ()] = True
        steps = self.source.steps
        index = _index_of(code)
        return self.source.text.error(failed, index, is_batch=True, steps=steps, more=count - 1)


def summarize(codes: Sequence[Any]) -> Any:
    """Summarize the numbers of checks in a small array: all zero exactly if none has failed.

    Args:
        codes: for each check, a number, or one for each member of a batch. The summary of a batch
            is the first number that is not zero, its position, and the count of such numbers.

    Returns:
        The array, of dtype int32.
    """
    return jnp.concatenate([_summary(code) for code in codes])


def _summary(code: Any) -> Any:
    if code.ndim == 0:
        return code[None]
    if code.size == 0:
        return jnp.zeros(3, jnp.int32)
    sharding: Any = jax.typeof(code).sharding
    if any(sharding.spec):
        # On an explicit mesh each device must have all of it.
        code = untyped_jax.sharding.reshard(code, NamedSharding(sharding.mesh, PartitionSpec()))
    code = code.reshape(-1)
    failed = code != 0
    position = jnp.argmax(failed)
    parts = code[position], position, jnp.sum(failed)
    return jnp.stack([part.astype(jnp.int32) for part in parts])


class Checks(tuple[Recorded, ...]):
    """The checks of a program, in the order of their summaries."""

    zeros: bytes

    def __new__(cls, recorded: Iterable[Recorded]) -> Checks:
        """Return the checks with these records."""
        made = super().__new__(cls, recorded)
        # The bytes of a summary without failures.
        made.zeros = np.zeros(sum(each.size for each in made), np.int32).tobytes()
        return made

    def parts(self, summary: Any) -> Iterable[tuple[Recorded, Any]]:
        """Yield each check with its part of a summary."""
        at = 0
        for each in self:
            yield each, summary[at : at + each.size]
            at += each.size


class _Failure(NamedTuple):
    """A check that has failed."""

    function: int
    call: int
    name: str
    recorded: Recorded
    numbers: Any


class _Local(threading.local):
    number = 0


_lock = threading.Lock()
_serials = itertools.count()
# The queues of functions that exist, and of functions that are deleted.
_pending: weakref.WeakSet[Pending] = weakref.WeakSet()
_orphans: list[Pending] = []


class Pending:
    """The summaries of a function's calls that were not read yet."""

    __slots__ = ("__weakref__", "_failed", "_local", "_numbers", "name", "queue", "serial")

    def __init__(self, name: str):
        self.name = name
        # With the number of the call, and its checks.
        self.queue: deque[tuple[int, Any, Checks]] = deque()
        self._numbers = itertools.count(1)
        self._local = _Local()
        self._failed: list[_Failure] = []
        with _lock:
            self.serial = next(_serials)
            _pending.add(self)
            if self.serial == 0:
                atexit.register(_print_at_exit)

    def __del__(self) -> None:
        if self.queue or self._failed:
            _orphans.append(self)

    def begin(self) -> None:
        """Before a call: count it, and raise the failures of earlier calls.

        Raises:
            CheckError: if a check has failed.
        """
        self._local.number = next(self._numbers)
        # `take`, for the usual case: a call that has finished, without failures.
        queue = self.queue
        while queue:
            try:
                entry = queue.popleft()
            # Another thread has emptied the queue.
            except IndexError:
                break
            _, summary, checks = entry
            is_there = summary.is_ready()
            try:
                # Without NumPy, which takes three times as long to compare with zero.
                if is_there and memoryview(summary).tobytes() == checks.zeros:
                    continue
            # Not in host memory, or not computed because of an error.
            except (BufferError, TypeError, RuntimeError, ValueError):
                pass
            queue.appendleft(entry)
            if is_there:
                self._raise_finished()
            break
        if self._failed:
            self._raise_finished()

    def _raise_finished(self) -> None:
        failed = self.take(wait=False)
        if failed and is_tracing():
            # An error would end an unrelated trace.
            self._failed += failed
        elif failed:
            raise _error_of(failed)

    def add(self, summary: Any, checks: Checks) -> None:
        """After a call: add its summary."""
        self.queue.append((self._local.number, summary, checks))

    def take(self, *, wait: bool) -> list[_Failure]:
        """Remove the failures from the queue, and return them.

        Args:
            wait: whether to wait for the calls that have not finished.
        """
        found, self._failed = self._failed, []
        queue = self.queue
        # Without those that other threads add meanwhile.
        for _ in range(len(queue)):
            try:
                entry = queue.popleft()
            except IndexError:
                break
            number, summary, checks = entry
            # They finish in the order of the calls.
            if not (wait or summary.is_ready()):
                queue.appendleft(entry)
                break
            numbers = _failures_in(summary)
            if numbers is not None:
                parts = checks.parts(numbers)
                found += [
                    _Failure(self.serial, number, self.name, recorded, part)
                    for recorded, part in parts
                    if part[0]
                ]
        return found


def _failures_in(summary: Any) -> Any:
    """Return a summary as numbers; None without failures."""
    try:
        whole = summary if summary.is_fully_addressable else summary.addressable_data(0)
        numbers = np.asarray(whole)
    except RuntimeError:
        # The program itself has failed; reading its results raises that error.
        return None
    return numbers if numbers.any() else None


def _error_of(failed: Sequence[_Failure]) -> CheckError:
    """Return the error for the first failure; the others are counted."""
    first = min(failed, key=lambda one: (one.function, one.call))
    error = first.recorded.error(first.numbers)
    more = len(failed) - 1
    others = f", and {more} more failure{'s' * (more > 1)}" if more else ""
    error.add_note(f"in call {first.call} of {first.name}{others}")
    return error


def _take_all() -> list[_Failure]:
    with _lock:
        pending = [*_orphans, *_pending]
        _orphans.clear()
    return [failure for one in pending for failure in one.take(wait=True)]


def raise_pending() -> None:
    """Wait for all calls of functions under `filter_jit(checks="later")`; raise the failures.

    Raises:
        CheckError: if a check has failed.
    """
    failed = _take_all()
    if failed:
        raise _error_of(failed)


def _print_at_exit() -> None:
    failed = _take_all()
    if failed:
        error = _error_of(failed)
        error.add_note("printed at exit, because no later call raised it")
        print_error(error)
