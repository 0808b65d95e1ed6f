"""Time several ways to do one thing, so that noise on the machine affects all of them alike.

The unit of work is a *burst*: a function that does the thing `n` times in a row, and returns the
seconds that it took. A *race* runs one short burst of each contender, round after round. If another
program slows the machine for a second, a few rounds become slower for all contenders. Contenders
are compared within a round, so the median of the ratios hardly changes.

Most times are CPU time. Wall time on a busy machine would mostly measure the other programs.
"""

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter, process_time, thread_time
from typing import Any

import jax

Burst = Callable[[int], float]

CALLER = thread_time
"""CPU seconds of the calling thread: the time that Python takes. Other programs do not count, nor
does waiting for a device."""
PROCESS = process_time
"""CPU seconds of this process, including XLA's threads."""
WALL = perf_counter
"""Seconds of wall time."""

BURST_SECONDS = 3e-3
LONGEST_BURST_SECONDS = 50e-3
GOOD_MANY = 20
UNROLLED = 100


@dataclass(frozen=True)
class Spread:
    """A summary of a list of measurements."""

    best: float
    lower_quartile: float
    median: float
    upper_quartile: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarize at least two values."""
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(min(values), lower, median, upper)

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Result:
    """One contender in one race."""

    seconds: Spread
    """The seconds of one call."""
    ratio: Spread
    """The ratio to the baseline: quartiles over the rounds; `best` divides the best times."""

    def as_dict(self) -> dict[str, dict[str, float]]:
        """For JSON."""
        return asdict(self)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and not again inside the block."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def repeating(function: Callable[[], Any]) -> Burst:
    """Repeat `function()`, for functions that take many microseconds."""

    def burst(number: int) -> float:
        began = CALLER()
        for _ in range(number):
            function()
        return CALLER() - began

    return burst


def clocked(clock: Callable[[], float], function: Callable[[], Any]) -> Burst:
    """Repeat `function()` and wait for its result, for functions that take milliseconds."""

    def burst(number: int) -> float:
        began = clock()
        for _ in range(number):
            jax.block_until_ready(function())
        return clock() - began

    return burst


def tidied(burst: Burst) -> Burst:
    """The same burst after a garbage collection, for functions that trace programs and drop them.

    Only a collection frees these programs. Without it, each program needs new memory from the
    system, which takes a third as long as tracing.
    """

    def collecting(number: int) -> float:
        gc.collect()
        return burst(number)

    return collecting


def unrolled(statement: str, **names: Any) -> Burst:
    """Repeat a Python statement, for statements that take nanoseconds.

    The statement is written out `UNROLLED` times, because an iteration of a loop takes longer than
    reading a field. The names are local variables, as in a user's function. Multiply by
    `1 / UNROLLED` to get the time of one statement.
    """
    body = "\n        ".join([statement] * UNROLLED)
    source = f"""
def burst(number, {", ".join(f"{name}={name}" for name in names)}):
    began = clock()
    for _ in range(number):
        {body}
    return clock() - began
"""
    scope: dict[str, Any] = {"clock": CALLER, **names}
    exec(source, scope)
    return scope["burst"]


def calls_in(burst: Burst) -> int:
    """The number of calls in a burst; finding it also warms up and compiles.

    A burst takes a few milliseconds, which is short against the time slice of a scheduler. It has
    at least `GOOD_MANY` calls, unless they take too long. The first call of a burst differs,
    because its argument was read after the last burst; with many calls it matters little.

    Garbage collection is off, because it takes a tenth of a second. A single call would seem to
    take that long, and each burst would become one call.
    """
    burst(2)
    number = 1
    with no_garbage_collection():
        while (took := min(burst(number), burst(number))) < BURST_SECONDS / 2:
            number *= 2
    fitting = number * BURST_SECONDS / took
    at_most = number * LONGEST_BURST_SECONDS / took
    return max(1, round(fitting), round(min(GOOD_MANY, at_most)))


def race(contenders: Mapping[str, Burst], *, rounds: int) -> dict[str, list[float]]:
    """The seconds of one call in each round, for every contender.

    Each round starts with another contender, so that none always runs first.
    """
    numbers = {name: calls_in(burst) for name, burst in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    with no_garbage_collection():
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(contenders[name](numbers[name]) / numbers[name])
    return times


def compare(times: Mapping[str, Sequence[float]], baseline: str) -> dict[str, Result]:
    """Compare every contender with `baseline`, round by round."""
    reference = times[baseline]
    results: dict[str, Result] = {}
    for name, values in times.items():
        per_round = Spread.of([a / b for a, b in zip(values, reference, strict=True)])
        of_best = min(values) / min(reference)
        ratio = Spread(
            of_best, per_round.lower_quartile, per_round.median, per_round.upper_quartile
        )
        results[name] = Result(Spread.of(values), ratio)
    return results
