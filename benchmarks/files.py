"""How long saving and loading take, and how much memory, on 1 GB of arrays in 400 leaves.

    python -m benchmarks.files [--quick] [--json]

Times are those on the clock on the wall, for threads and the disk take part; memory is the most
that a process of its own had beyond what it had before, and beyond the arrays that it loaded.
Files are written to a temporary folder, and each is removed before it is written again, except
where the row says so. What the system has not yet written to the disk it writes before the clock
starts. Files that are loaded are in the system's memory. (`TMPDIR` says where the folder is.)

To be on the disk, and not only in the system's memory, costs what the disk takes: in that row
everybody waits for it.

A folder has 96 arrays of 256 MB in eight files and an index. There the baseline is `load_file` of
safetensors for each of the files, which makes arrays of NumPy; the column of that name has them as
arrays of JAX.
"""

import ctypes
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
SHARDS, SHARD, DEPTH = 8, 32 * 2**20, 16
PART, LAYER = "layers[7].", "layers.7"
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


def load_tree(path: Path, like: Arrays, verify: bool = True, only: str = "**") -> Arrays:
    return pm.load(path, like, verify=verify, only=only)


def save_safetensors(path: Path, arrays: Arrays) -> None:
    host = {name: np.asarray(array) for name, array in arrays.items()}
    safetensors.numpy.save_file(host, path)


def load_safe_open(path: Path, like: Arrays) -> Arrays:
    with safetensors.safe_open(path, "jax") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)


def load_load_file(path: Path, like: Arrays) -> Arrays:
    loaded = safetensors.numpy.load_file(path)
    return {name: jnp.asarray(array) for name, array in loaded.items()}


def load_shards(path: Path, like: Arrays) -> Arrays:
    loaded: Arrays = {}
    for shard in sorted(path.glob("*.safetensors")):
        loaded |= safetensors.numpy.load_file(shard)
    return loaded


def load_shards_into_jax(path: Path, like: Arrays) -> Arrays:
    return {name: jnp.asarray(array) for name, array in load_shards(path, like).items()}


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
FOLDER_LOADS: dict[str, Load] = {
    SAFETENSORS: load_shards,
    LOAD_FILE: load_shards_into_jax,
    UNCHECKED: partial(load_tree, verify=False),
    OURS: load_tree,
}
WRITER = {LOAD_FILE: SAFETENSORS, UNCHECKED: OURS}
"""Whose file is loaded, if not one's own."""


def transformer(total: int) -> Arrays:
    """Layers of four square matrices and two vectors, as large models have them."""
    rng = np.random.default_rng(0)
    width = round((total / 4 / 4 / DEPTH) ** 0.5)

    def layer() -> Arrays:
        matrices = {name: rng.random((width, width), np.float32) for name in "qkvo"}
        return {**matrices, "norm": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)}

    made = {"layers": [layer() for _ in range(DEPTH)]}
    return jax.block_until_ready(jax.tree.map(jnp.asarray, made))


def folder_of(folder: Path) -> Path:
    """Where the files of the sharded model are."""
    return folder / "sharded"


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


def give_memory_back() -> None:
    """Have the system clear all memory that is asked for next, as for a program that loads once.

    What one contender has freed the next one would get without that: it takes half of the time.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def timed_folder_loads(folder: Path, arrays: Arrays, rounds: int) -> Iterator[Row]:
    """Of arrays in several files."""
    path = folder_of(folder)
    loads = {name: partial(load, path, arrays) for name, load in FOLDER_LOADS.items()}
    times = in_turn(loads, lambda name: give_memory_back(), rounds)
    row = ratio_row(f"loading a folder of {SHARDS} files", times)
    ratio = median(ours / theirs for ours, theirs in zip(times[UNCHECKED], times[SAFETENSORS]))
    note = f"{ratio:.2f} times safetensors' load_file without checksums, round by round"
    yield replace(row, target="≤ 1.3", met=ratio <= 1.3 * SAME, note=note)


def memory_now(field: str) -> int:
    """Bytes, of this process: `VmRSS` is what it has, `VmHWM` the most that it had."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def print_peak(what: str, name: str, folder: Path, total: int) -> None:
    """In a process of its own: the memory that one takes beyond the arrays, in bytes."""
    is_folder = what == "load-folder"
    arrays = transformer(total) if is_folder else model(total)
    loads = what != "save"
    load = FOLDER_LOADS[name] if is_folder else LOADS[name]
    path = folder_of(folder) if is_folder else file_of(folder, WRITER.get(name, name))
    work = partial(load, path, arrays)
    if not loads:
        work = partial(SAVES[name], file_of(folder, f"{name}-again"), arrays)
    if loads and name in (EQUINOX, UNCHECKED, OURS):
        # What it is to look like needs no memory.
        like: Any = jax.eval_shape(lambda: jax.tree.map(jnp.zeros_like, arrays))
        work = partial(load, path, like)
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


def folder_memory_row(folder: Path, arrays: Arrays) -> Row:
    """Of a whole folder, beyond the arrays themselves."""
    sizes = [array.nbytes for array in jax.tree.leaves(arrays)]
    measured = (SAFETENSORS, LOAD_FILE, UNCHECKED, OURS)
    peaks = {name: peak("load-folder", name, folder, sum(sizes)) for name in measured}
    return Row(
        "memory of loading the folder, beyond the arrays",
        megabytes(peaks[SAFETENSORS]),
        {name: megabytes(number) for name, number in peaks.items() if name != SAFETENSORS},
        {name: {"bytes": number} for name, number in peaks.items()},
        target=f"≤ {max(sizes) / MB:.1f} MB",
        met=peaks[OURS] <= max(sizes),
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


def part_row(path: Path, arrays: Arrays) -> Row:
    """One layer of a file, or of a folder, of which all headers are read."""
    is_folder = path.is_dir()
    load = partial(load_tree, only=LAYER) if is_folder else partial(load_ours, only=PART)
    part = [array for name, array in arrays.items() if name.startswith(PART)]
    if is_folder:
        part = arrays["layers"][7].values()
    size = sum(array.nbytes for array in part)
    read = bytes_read(lambda: load(path, arrays))
    header, count = 0, 0
    for each in path.glob("*.safetensors") if is_folder else [path]:
        with Container.open(each) as file:
            header, count = header + min(x.start for x in file.entries.values()), count + 1
    header += sum(each.stat().st_size for each in path.glob("*.json"))
    return Row(
        f"bytes read{' of a folder' * is_folder} for one layer of {size / MB:.2f} MB",
        "-",
        {OURS: f"{read / MB:.2f} MB"},
        {OURS: {"bytes": read, "layer": size, "header": header}},
        target=f"≤ {(size + header) / MB:.2f} MB",
        # How long the header is was read before.
        met=read <= size + header + 100 * count,
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
            yield part_row(file_of(folder, OURS), arrays)
    size = total // 10 if quick else SHARDS * SHARD
    arrays = transformer(size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pm.save(folder_of(folder), arrays, shard_bytes=1.01 * size / SHARDS)
        yield from timed_folder_loads(folder, arrays, rounds)
        if Path("/proc/self/clear_refs").exists():
            yield folder_memory_row(folder, arrays)
            yield part_row(folder_of(folder), arrays)


BENCHMARK = Benchmark(
    "Files: 1 GB of arrays in 400 leaves",
    SAFETENSORS,
    rows,
    (LOAD_FILE, EQUINOX, UNCHECKED, OURS),
)

if __name__ == "__main__":
    BENCHMARK.main()
