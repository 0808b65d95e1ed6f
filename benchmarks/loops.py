"""A checkpointed loop, its gradient, and this under `vmap`, against Equinox's internal loop.

    python -m benchmarks.loops [--quick] [--json]

Each stores as many values: ours counts those beside the first. Memory is that of temporaries, which
XLA reports of the compiled program.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.libraries import FILTERING, OURS, installed
from benchmarks.measuring import PROCESS, WALL, Burst, clocked, race, tidied
from benchmarks.tables import Benchmark, Row, ratio_row

EQUINOX = "Equinox"
WIDTH, MEMBERS, ROUNDS = 100, 8, 9
STORED = {100: 14, 10_000: 141}
"""The values that are stored, by the number of steps."""

Loop = Callable[..., Any]


def loops() -> dict[str, Loop]:
    """The loop of each library: from condition, step, first value and the number to store."""
    found: dict[str, Loop] = {}
    libraries = installed(*FILTERING)
    if EQUINOX in libraries:
        from equinox.internal import while_loop

        found[EQUINOX] = lambda cond, step, init, stored: while_loop(
            cond, step, init, kind="checkpointed", checkpoints=stored
        )
    ours = libraries[OURS].filter_while_loop
    found[OURS] = lambda cond, step, init, stored: ours(
        cond, step, init, kind="checkpointed", checkpoints=stored - 1
    )
    return found


def program(loop: Loop, what: str, steps: int) -> tuple[Callable[..., Any], jax.Array]:
    """The function to compile, which is new each time, and its argument."""

    def run(x: jax.Array) -> jax.Array:
        step = lambda v: (v[0] + 1, jnp.sin(v[1]) * 1.01)  # noqa: E731
        first = jnp.int32(0), x
        return loop(lambda v: v[0] < steps, step, first, STORED[steps])[1].sum()

    x = jnp.ones(WIDTH)
    if what == "forward":
        return run, x
    if what == "gradient":
        return jax.grad(run), x
    return jax.vmap(jax.grad(run)), jnp.broadcast_to(x, (MEMBERS, WIDTH))


def compiled(loop: Loop, what: str, steps: int) -> Any:
    fn, x = program(loop, what, steps)
    return jax.jit(fn).lower(x).compile()


def compiling(loop: Loop, what: str, steps: int) -> Burst:
    """Trace and compile."""

    def compile_() -> None:
        compiled(loop, what, steps)

    return tidied(clocked(PROCESS, compile_))


def running(loop: Loop, what: str, steps: int) -> Burst:
    """Call the compiled function."""
    made, (_, x) = compiled(loop, what, steps), program(loop, what, steps)
    return clocked(WALL, lambda: made(x))


def memory(contenders: dict[str, Loop], what: str, steps: int) -> Row:
    """The bytes of temporaries."""
    used = {
        name: compiled(loop, what, steps).memory_analysis().temp_size_in_bytes
        for name, loop in contenders.items()
    }
    ratio = used[OURS] / next(iter(used.values()))
    return Row(
        f"{what}, {steps} steps: memory",
        f"{next(iter(used.values())) / 1e3:.1f} kB",
        {OURS: f"{ratio:.2f}"},
        {name: {"bytes": size} for name, size in used.items()},
        "≤ 1",
        ratio <= 1,
    )


def rows(quick: bool) -> Iterator[Row]:
    """Time, memory and compile time of each program."""
    contenders, rounds = loops(), 2 if quick else ROUNDS
    for steps in (100,) if quick else STORED:
        for what in ("forward", "gradient", "vmapped gradient"):
            for label, kind in (("time", running), ("compile time", compiling)):
                bursts = {name: kind(loop, what, steps) for name, loop in contenders.items()}
                times = race(bursts, rounds=rounds)
                yield ratio_row(f"{what}, {steps} steps: {label}", times, limit=1.0)
            yield memory(contenders, what, steps)


BENCHMARK = Benchmark("A checkpointed loop, against Equinox's", EQUINOX, rows, (OURS,))

if __name__ == "__main__":
    BENCHMARK.main()
