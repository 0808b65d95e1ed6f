"""Timing several ways to do one thing, so that what disturbs the machine hits all of them alike.

The unit of work is a *burst*: a function that does the thing `n` times in a row, and says how many
seconds that took. A *race* runs one short burst of each contender after the other, round after
round. A neighbor that slows the processor for a second then slows a few rounds of everybody, and
because contenders are compared within a round, the median of the ratios hardly moves.

Most seconds here are the processor's, not the clock's: those in which a neighbor had the processor
would drown all others on a machine that is busy.
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
"""Seconds in which the processor worked for the thread that calls: what Python spends on something.
That a neighbor took the processor away does not count; nor does waiting for a device."""
PROCESS = process_time
"""Seconds in which it worked for this process: what XLA's threads spend counts as well."""
WALL = perf_counter
"""Seconds on the clock on the wall."""

BURST_SECONDS = 3e-3
LONGEST_BURST_SECONDS = 50e-3
GOOD_MANY = 20
UNROLLED = 100


@dataclass(frozen=True)
class Spread:
    """What a list of measurements comes to."""

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
    """For one call."""
    ratio: Spread
    """Against the baseline: quartiles over the rounds; `best` is best time over best time."""

    def as_dict(self) -> dict[str, dict[str, float]]:
        """For JSON."""
        return asdict(self)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect now, and then not again inside the block: a collection is nobody's own cost."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def repeating(function: Callable[[], Any]) -> Burst:
    """`function()`, over and over: for what takes many microseconds."""

    def burst(number: int) -> float:
        began = CALLER()
        for _ in range(number):
            function()
        return CALLER() - began

    return burst


def clocked(clock: Callable[[], float], function: Callable[[], Any]) -> Burst:
    """`function()`, over and over, waiting for what comes out: for what takes milliseconds."""

    def burst(number: int) -> float:
        began = clock()
        for _ in range(number):
            jax.block_until_ready(function())
        return clock() - began

    return burst


def tidied(burst: Burst) -> Burst:
    """The same, after a garbage collection each time: for what traces programs and drops them.

    Nothing else frees those, and the memory for further ones would be new: that takes as long as a
    third of the tracing.
    """

    def collecting(number: int) -> float:
        gc.collect()
        return burst(number)

    return collecting


def unrolled(statement: str, **names: Any) -> Burst:
    """A statement of Python, over and over: for what takes nanoseconds.

    It is written out `UNROLLED` times, for to go round a loop takes longer than to read a field.
    The names are local variables, as they would be in a user's function. Multiply by
    `1 / UNROLLED` to get the time of one.
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
    """How many calls make a burst. Warms up and compiles on the way.

    A few milliseconds' worth: short against the time slice of a scheduler. But also a good many,
    so that the first call, whose argument was looked at after the last burst, weighs little;
    except where so many would take too long.

    A garbage collection meanwhile (a tenth of a second) would make one call look long, and the
    bursts a single call each: the first one.
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
    """Seconds for one call, once for each round, of every contender.

    Each round starts with another contender, so that none always runs in the same one's wake.
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
    """Every contender against `baseline`, round by round."""
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
