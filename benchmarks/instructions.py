"""The number of CPU instructions to call a function and to rebuild a model.

    python -m benchmarks.instructions [--quick] [--json]

Times differ from run to run by a few percent, but counts of instructions hardly differ, so they
show small regressions. Callgrind counts them in a separate process (Debian: `apt-get install
valgrind`). They include the instructions of XLA's threads. The work is the same as in `dispatch`
and `flattening`. Each count is the difference between two bursts, of n and of 2n calls, so it
leaves out everything that happens once.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import flattening
from benchmarks.dispatch import CALLS, LIMITS, Contender, Kind, contenders
from benchmarks.libraries import OURS, installed
from benchmarks.measuring import Burst
from benchmarks.networks import nested_dicts, network_class
from benchmarks.tables import SAME, Benchmark, Row, short

JAX = "jax.jit"
DEPTHS = (3, 21)
CALLS_PER_BURST = 40
CONTROL = "callgrind_control"


def rebuilding(one: Contender, depth: int) -> Burst:
    """Flatten and unflatten a model; in plain JAX, nested dicts."""
    if one.name == JAX:
        return flattening.rebuilding(nested_dicts(depth))
    return flattening.rebuilding(network_class(one.name, installed()[one.name])(depth))


REBUILDING = Kind("flatten and unflatten, against dicts", rebuilding)
KINDS = {kind.label: kind for kind in (*CALLS, REBUILDING)}

Counts = dict[str, dict[str, float]]


# --- inside valgrind ------------------------------------------------------------------------------


def control(*words: str) -> None:
    """Control the callgrind that runs this process."""
    subprocess.run([CONTROL, *words, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)


def work(label: str, depth: int, *names: str) -> None:
    """Run two bursts of each contender, and dump the counts after each."""
    bursts = {one.name: KINDS[label].burst_of(one, depth) for one in contenders(*names)}
    # Commands to callgrind are counted, too, and the first one takes longer.
    measured("warm-up", lambda number: 0.0, 0)
    for name, burst in bursts.items():
        burst(CALLS_PER_BURST)
        for number in (CALLS_PER_BURST, 2 * CALLS_PER_BURST):
            measured(name, burst, number)


def measured(name: str, burst: Burst, number: int) -> None:
    """Run a burst of `number` calls, and dump its counts."""
    control("--instr=on")
    burst(number)
    control(f"--dump={name}/{number}")
    control("--instr=off")


# --- outside valgrind -----------------------------------------------------------------------------


def counted(text: str) -> tuple[str, int, int] | None:
    """The contender, calls and instructions of a burst, from an output file of callgrind."""
    name = "|".join(names_of_all())
    trigger = re.search(rf"^desc: Trigger: .*?({name})/(\d+)", text, re.MULTILINE)
    total = re.search(r"^totals: (\d+)", text, re.MULTILINE)
    if trigger is None or total is None:
        return None
    return trigger[1], int(trigger[2]), int(total[1])


def names_of_all() -> list[str]:
    """The names of all contenders, as patterns."""
    return [re.escape(one.name) for one in contenders()]


def instructions(label: str, depth: int, *names: str) -> dict[str, float]:
    """The instructions of one call, by contender."""
    with TemporaryDirectory() as folder:
        command = [
            "valgrind",
            "--tool=callgrind",
            "--instr-atstart=no",
            f"--callgrind-out-file={folder}/out",
            sys.executable,
            "-m",
            "benchmarks.instructions",
            "--work",
            json.dumps([label, depth, *names]),
        ]
        subprocess.run(command, check=True, capture_output=True, text=True)
        found = [counted(path.read_text()) for path in Path(folder).iterdir()]
    bursts = {(name, number): total for name, number, total in filter(None, found)}
    return {
        name: (bursts[name, 2 * CALLS_PER_BURST] - bursts[name, CALLS_PER_BURST]) / CALLS_PER_BURST
        for name in {name for name, _ in bursts}
    }


def row(label: str, depth: int, *names: str) -> Row:
    """The counts as a row: of all contenders, or of those named."""
    counts = instructions(label, depth, *names)
    ratios = {name: count / counts[JAX] for name, count in counts.items() if name != JAX}
    kind = KINDS[label]
    limit = flattening.LIMIT if kind is REBUILDING else LIMITS[depth] if kind.is_limited else None
    return Row(
        f"{label}, {2 * depth} arrays",
        f"{counts[JAX] / 1000:.0f} k",
        {name: short(ratio) for name, ratio in ratios.items()},
        {name: {"instructions": count} for name, count in counts.items()},
        "" if limit is None else f"≤ {limit:g}",
        None if limit is None else ratios[OURS] <= limit * SAME,
    )


def rows(quick: bool) -> Iterator[Row]:
    """Each kind of call, for two sizes of model."""
    if shutil.which("valgrind") is None:
        yield Row("not counted", "", {}, {}, note="valgrind is not installed")
        return
    if quick:
        # Under valgrind, importing the other libraries takes most of the time.
        yield row(next(iter(KINDS)), DEPTHS[0], OURS)
        return
    for label in KINDS:
        for depth in DEPTHS:
            yield row(label, depth)


BENCHMARK = Benchmark("Instructions for a call, against JAX", JAX, rows)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--work", type=json.loads)
    options, others = parser.parse_known_args()
    if options.work:
        work(*options.work)
    else:
        BENCHMARK.main(others)
