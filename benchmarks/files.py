"""How long saving and loading take, and how much memory, on 1 GB of arrays in 400 leaves.

    python -m benchmarks.files [--quick] [--json]

Times are those on the clock on the wall, for threads and the disk take part; memory is the most
that a process of its own had beyond what it had before, and beyond the arrays that it loaded.
Files are written to a temporary folder, and each is removed before it is written again, except
where the row says so. What the system has not yet written to the disk it writes before the clock
starts. Files that are loaded are in the system's memory. (`TMPDIR` says where the folder is.)

To be on the disk, and not only in the system's memory, costs what the disk takes: in that row
everybody waits for it.
"""

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

import pytreemod as pm
from benchmarks.libraries import OURS, installed
from benchmarks.measuring import no_garbage_collection
from benchmarks.memory import MB, megabytes
from benchmarks.tables import SAME, Benchmark, Row, ratio_row
from pytreemod.io.containers import Container

SAFETENSORS, LOAD_FILE, EQUINOX, UNCHECKED = "safetensors", "load_file", "Equinox", "unchecked"
LEAVES, TOTAL = 400, 10**9
PART = "layers[7]."
ROOT = Path(__file__).parents[1]

Arrays = dict[str, Any]
Load = Callable[[Path, Arrays], Any]


def model(total: int) -> Arrays:
    """Weights of mixed sizes, and a bias for each."""
    rng = np.random.default_rng(0)
    weights = np.exp(1.5 * rng.normal(size=LEAVES // 2))
    sizes = np.maximum(weights / weights.sum() * total / 4, 1).astype(int)
    arrays: Arrays = {}
    for i, size in enumerate(sizes):
        arrays[f"layers[{i}].weight"] = jnp.asarray(rng.random(size, np.float32))
        arrays[f"layers[{i}].bias"] = jnp.asarray(rng.random(64, np.float32))
    return jax.block_until_ready(arrays)


def file_of(folder: Path, name: str) -> Path:
    """Where a contender saves. (Equinox gives each name this ending.)"""
    return folder / f"{name}.eqx"


def save_ours(path: Path, arrays: Arrays, durable: bool = False) -> None:
    pm.save(path, arrays, durable=durable)


def load_ours(path: Path, like: Arrays, verify: bool = True, only: str = "") -> Arrays:
    chosen = pm.select.at(lambda tree: [tree[name] for name in tree if name.startswith(only)])
    return pm.load(path, like, verify=verify, only=chosen if only else True)


def save_safetensors(path: Path, arrays: Arrays) -> None:
    host = {name: np.asarray(array) for name, array in arrays.items()}
    safetensors.numpy.save_file(host, path)


def load_safe_open(path: Path, like: Arrays) -> Arrays:
    with safetensors.safe_open(path, "jax") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)


def load_load_file(path: Path, like: Arrays) -> Arrays:
    loaded = safetensors.numpy.load_file(path)
    return {name: jnp.asarray(array) for name, array in loaded.items()}


def load_equinox(path: Path, like: Arrays) -> Arrays:
    return installed(EQUINOX)[EQUINOX].tree_deserialise_leaves(path, like)


def save_equinox(path: Path, arrays: Arrays) -> None:
    installed(EQUINOX)[EQUINOX].tree_serialise_leaves(path, arrays)


SAVES: dict[str, Callable[[Path, Arrays], None]] = {
    SAFETENSORS: save_safetensors,
    EQUINOX: save_equinox,
    OURS: save_ours,
}
LOADS: dict[str, Load] = {
    SAFETENSORS: load_safe_open,
    LOAD_FILE: load_load_file,
    EQUINOX: load_equinox,
    UNCHECKED: partial(load_ours, verify=False),
    OURS: load_ours,
}
WRITER = {LOAD_FILE: SAFETENSORS, UNCHECKED: OURS}
"""Whose file is loaded, if not one's own."""


def of_installed(contenders: Mapping[str, Any]) -> dict[str, Any]:
    """Without Equinox, if it is not there."""
    return {k: v for k, v in contenders.items() if k != EQUINOX or installed(EQUINOX)}


def synchronized(save: Callable[[Path, Arrays], None], path: Path, arrays: Arrays) -> None:
    """Save, and wait for the disk."""
    save(path, arrays)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def in_turn(
    contenders: Mapping[str, Callable[[], Any]],
    prepare: Callable[[str], None],
    rounds: int,
) -> dict[str, list[float]]:
    """Seconds for each round, each starting with another contender."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            prepare(name)
            with no_garbage_collection():
                began = perf_counter()
                made = jax.block_until_ready(contenders[name]())
                times[name].append(perf_counter() - began)
            del made
    return times


def judged(row: Row, times: Mapping[str, Sequence[float]], limit: float) -> Row:
    """Against the faster of the two others, by the median of all rounds."""
    others = [times[name] for name in (SAFETENSORS, EQUINOX) if name in times]
    ratio = median(ours / min(theirs) for ours, *theirs in zip(times[OURS], *others, strict=True))
    note = f"{ratio:.2f} times the faster of safetensors and Equinox, round by round"
    return replace(row, target=f"≤ {limit:g}", met=ratio <= limit * SAME, note=note)


def timed_saves(folder: Path, arrays: Arrays, rounds: int) -> Iterator[Row]:
    """To a new file, over an old one, and until the disk has it."""
    saves = of_installed(SAVES)

    def fresh(name: str) -> None:
        file_of(folder, name).unlink(missing_ok=True)
        os.sync()

    plain = {name: partial(save, file_of(folder, name), arrays) for name, save in saves.items()}
    times = in_turn(plain, fresh, rounds)
    yield judged(ratio_row("saving", times), times, 1.05)
    times = in_turn(plain, lambda name: os.sync(), rounds)
    yield ratio_row("saving over an old file", times)
    lasting = {
        name: partial(synchronized, save, file_of(folder, name), arrays)
        for name, save in saves.items()
    }
    lasting[OURS] = partial(save_ours, file_of(folder, OURS), arrays, durable=True)
    yield ratio_row("saving, until it is on the disk", in_turn(lasting, fresh, rounds))


def timed_loads(folder: Path, arrays: Arrays, rounds: int) -> Iterator[Row]:
    """Of everything, into JAX arrays."""
    loads = {
        name: partial(load, file_of(folder, WRITER.get(name, name)), arrays)
        for name, load in of_installed(LOADS).items()
    }
    times = in_turn(loads, lambda name: None, rounds)
    yield judged(ratio_row("loading into JAX arrays", times), times, 1.1)


def memory_now(field: str) -> int:
    """Bytes, of this process: `VmRSS` is what it has, `VmHWM` the most that it had."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def print_peak(what: str, name: str, folder: Path, total: int) -> None:
    """In a process of its own: the memory that one takes beyond the arrays, in bytes."""
    arrays = model(total)
    loads = what == "load"
    work = partial(LOADS[name], file_of(folder, WRITER.get(name, name)), arrays)
    if not loads:
        work = partial(SAVES[name], file_of(folder, f"{name}-again"), arrays)
    if loads and name in (EQUINOX, UNCHECKED, OURS):
        # What it is to look like needs no memory.
        like: Any = jax.eval_shape(lambda: {k: jnp.zeros(v.shape) for k, v in arrays.items()})
        work = partial(LOADS[name], file_of(folder, WRITER.get(name, name)), like)
    if loads:
        arrays.clear()
    gc.collect()
    before = memory_now("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most that it had is what it has now
    made = jax.block_until_ready(work())
    print(memory_now("VmHWM") - before - loads * total)
    del made


def peak(what: str, name: str, folder: Path, total: int) -> int:
    """The same, from outside."""
    code = "import sys; from pathlib import Path; from benchmarks.files import print_peak; "
    code += f"print_peak({what!r}, {name!r}, Path({str(folder)!r}), {total})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return max(int(done.stdout), 0)


def memory_rows(folder: Path, arrays: Arrays, total: int, quick: bool) -> Iterator[Row]:
    """Beyond the arrays themselves; quickly, those of the baseline and of pytreemod."""
    largest = max(array.nbytes for array in arrays.values())
    for what, contenders in (("save", SAVES), ("load", LOADS)):
        # For each a process of its own, which takes seconds to start.
        measured = (SAFETENSORS, OURS) if quick else of_installed(contenders)
        peaks = {n: peak(what, n, folder, total) for n in measured}
        yield Row(
            "memory of saving" if what == "save" else "memory of loading, beyond the arrays",
            megabytes(peaks[SAFETENSORS]),
            {name: megabytes(number) for name, number in peaks.items() if name != SAFETENSORS},
            {name: {"bytes": number} for name, number in peaks.items()},
            target=f"≤ {largest / MB:.1f} MB",
            met=peaks[OURS] <= largest,
        )


def bytes_read(work: Callable[[], Any]) -> int:
    """That this process asks the system for."""

    def so_far() -> int:
        counts = Path("/proc/self/io").read_text().split()
        return int(counts[counts.index("rchar:") + 1])

    asking = so_far()
    asking = so_far() - asking
    before = so_far()
    work()
    return so_far() - before - asking


def part_row(folder: Path, arrays: Arrays) -> Row:
    """One layer of the file."""
    part = [array for name, array in arrays.items() if name.startswith(PART)]
    size = sum(array.nbytes for array in part)
    read = bytes_read(lambda: load_ours(file_of(folder, OURS), arrays, only=PART))
    with Container.open(file_of(folder, OURS)) as file:
        header = min(entry.start for entry in file.entries.values())
    return Row(
        f"bytes read for one layer of {size / MB:.2f} MB",
        "-",
        {OURS: f"{read / MB:.2f} MB"},
        {OURS: {"bytes": read, "layer": size, "header": header}},
        target=f"≤ {(size + header) / MB:.2f} MB",
        # How long the header is was read before.
        met=read <= size + header + 100,
    )


def rows(quick: bool) -> Iterator[Row]:
    """Times, then memory, then bytes."""
    total, rounds = (20 * 10**6, 3) if quick else (TOTAL, 7)
    arrays = model(total)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield from timed_saves(folder, arrays, rounds)
        yield from timed_loads(folder, arrays, rounds)
        if Path("/proc/self/clear_refs").exists():
            yield from memory_rows(folder, arrays, total, quick)
            yield part_row(folder, arrays)


BENCHMARK = Benchmark(
    "Files: 1 GB of arrays in 400 leaves",
    SAFETENSORS,
    rows,
    (LOAD_FILE, EQUINOX, UNCHECKED, OURS),
)

if __name__ == "__main__":
    BENCHMARK.main()
