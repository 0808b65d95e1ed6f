"""The time of `import` in a process that has already imported JAX.

    python -m benchmarks.importing [--quick] [--json]

Each import runs in a new process. The first column is the time of `import jax`; the others are the
time that each library adds. The limit is a median time of pytreemod, not a ratio, so it depends on
the machine.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.libraries import MODULES, OURS, installed
from benchmarks.measuring import Spread
from benchmarks.tables import SAME, Benchmark, Row, with_unit

JAX = "import jax"
PART = "jaxtyping"
LIMIT = 0.04
MILLISECOND = 1e-3
LAYERS = "pytreemod.nn"
PROGRAM = """
import json, sys, time
began = time.perf_counter()
import jax
between = time.perf_counter()
import {module}
ended = time.perf_counter()
print(json.dumps([between - began, ended - between]))
"""


def seconds_to_import(module: str) -> tuple[float, float]:
    """Seconds to import JAX, then the module, in a new process."""
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    # By default, Python stores compiled byte code.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    jax_seconds, seconds = json.loads(done.stdout)
    return jax_seconds, seconds


def in_milliseconds(spread: Spread) -> str:
    """Median, quartiles, best."""
    values = (spread.median, spread.lower_quartile, spread.upper_quartile, spread.best)
    median, lower, upper, best = (f"{value / MILLISECOND:.0f}" for value in values)
    return f"{median} ({lower}-{upper}) {best:>4} ms"


def row_of(module: str, text: str, times: int) -> Row:
    """The import of another module, without a limit."""
    spread = Spread.of([seconds_to_import(module)[1] for _ in range(times)])
    numbers = {OURS: {"seconds": spread.as_dict()}}
    return Row(text, "", {OURS: in_milliseconds(spread)}, numbers)


def rows(quick: bool) -> Iterator[Row]:
    """All libraries in turns; then parts of pytreemod."""
    names = list(installed())
    jax_seconds: list[float] = []
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in [] if quick else names:
        seconds_to_import(MODULES[name])  # writes byte code and fills the disk cache
    for _ in range(2 if quick else 15):
        for name in names:
            first, then = seconds_to_import(MODULES[name])
            jax_seconds.append(first)
            seconds[name].append(then)
    spreads = {name: Spread.of(values) for name, values in seconds.items()}
    of_jax = Spread.of(jax_seconds)
    numbers: dict[str, Any] = {name: {"seconds": s.as_dict()} for name, s in spreads.items()}
    yield Row(
        "import, after import jax",
        with_unit(of_jax.median),
        {name: in_milliseconds(spread) for name, spread in spreads.items()},
        {JAX: {"seconds": of_jax.as_dict()}, **numbers},
        target=f"≤ {LIMIT / MILLISECOND:.0f} ms",
        met=spreads[OURS].median <= LIMIT * SAME,
    )
    times = 2 if quick else 15
    yield row_of(PART, f"of which {PART}", times)
    yield row_of(LAYERS, "the same, with pytreemod.nn", times)


BENCHMARK = Benchmark("Importing, after JAX was imported", JAX, rows)

if __name__ == "__main__":
    BENCHMARK.main()
