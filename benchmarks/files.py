"""The time and memory to save and load 1 GB of arrays in 400 leaves.

    python -m benchmarks.files [--quick] [--json]

Times are wall time, because threads and the disk take part. Memory is the peak of a separate
process, minus its memory before the work and minus the loaded arrays.

Files are written to a temporary folder (set `TMPDIR` to choose it). Each file is removed before it
is written again, except in the row that overwrites it. The system writes its buffers to the disk
before the clock starts. Files that are loaded are in the system's memory. In the row "until it is
on the disk", all contenders wait for the disk.

Two rows load many small leaves.

The folder has 96 arrays, 256 MB in all, in eight files and an index. Its baseline calls `load_file`
of safetensors for each file, which returns NumPy arrays. The column `load_file` converts them to
JAX arrays.
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
    """The file of a contender. (Equinox appends this suffix to each name.)"""
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
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def load_load_file(path: Path, like: Arrays) -> Arrays:
    loaded = safetensors.numpy.load_file(path)
    return {name: jnp.asarray(array) for name, array in loaded.items()}


def load_at_once(path: Path, like: Arrays) -> Arrays:
    return jax.device_put(safetensors.numpy.load_file(path))


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
"""The contender whose file is loaded, for those that do not save."""


def transformer(total: int) -> Arrays:
    """Layers of four square matrices and two vectors, as in large models."""
    rng = np.random.default_rng(0)
    width = round((total / 4 / 4 / DEPTH) ** 0.5)

    def layer() -> Arrays:
        matrices = {name: rng.random((width, width), np.float32) for name in "qkvo"}
        return {**matrices, "norm": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)}

    made = {"layers": [layer() for _ in range(DEPTH)]}
    return jax.block_until_ready(jax.tree.map(jnp.asarray, made))


def folder_of(folder: Path) -> Path:
    """The folder of the sharded model."""
    return folder / "sharded"


def of_installed(contenders: Mapping[str, Any]) -> dict[str, Any]:
    """The contenders without Equinox, if it is not installed."""
    return {k: v for k, v in contenders.items() if k != EQUINOX or installed(EQUINOX)}


def synchronized(save: Callable[[Path, Arrays], None], path: Path, arrays: Arrays) -> None:
    """Save, then wait for the disk."""
    save(path, arrays)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def in_turn(
    contenders: Mapping[str, Callable[[], Any]],
    prepare: Callable[[str], None],
    rounds: int,
) -> dict[str, list[float]]:
    """Seconds of each round; each round starts with another contender."""
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
    """Add the verdict: the median ratio to the faster of the two others in each round."""
    others = [times[name] for name in (SAFETENSORS, EQUINOX) if name in times]
    ratio = median(ours / min(theirs) for ours, *theirs in zip(times[OURS], *others, strict=True))
    note = f"{ratio:.2f} times the faster of safetensors and Equinox, round by round"
    return replace(row, target=f"≤ {limit:g}", met=ratio <= limit * SAME, note=note)


def timed_saves(folder: Path, arrays: Arrays, rounds: int) -> Iterator[Row]:
    """Save to a new file, over an old one, and until it is on the disk."""
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
    """Load all leaves into JAX arrays."""
    loads = {
        name: partial(load, file_of(folder, WRITER.get(name, name)), arrays)
        for name, load in of_installed(LOADS).items()
    }
    times = in_turn(loads, lambda name: None, rounds)
    yield judged(ratio_row("loading into JAX arrays", times), times, 1.1)


def small_leaves_row(folder: Path, count: int, other: Load, limit: float, rounds: int) -> Row:
    """Load many arrays of a few numbers, where the time is the library's, against another way."""
    arrays = {str(i): jnp.full(16, i, jnp.float32) for i in range(count)}
    writer = EQUINOX if other is load_equinox else SAFETENSORS
    for name in (writer, OURS):
        SAVES[name](file_of(folder, name), arrays)
    loads = {
        writer: partial(other, file_of(folder, writer), arrays),
        OURS: partial(load_tree, file_of(folder, OURS), arrays),
    }
    against = "Equinox" if writer == EQUINOX else "one device_put"
    times = in_turn(loads, lambda name: None, rounds)
    return ratio_row(f"loading {count} leaves, against {against}", times, limit=limit)


def give_memory_back() -> None:
    """Return freed memory to the system, as for a program that loads once.

    Otherwise, the next contender would reuse memory that the last one has freed. The system would
    not have to clear it, which takes half of the time.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def timed_folder_loads(folder: Path, arrays: Arrays, rounds: int) -> Iterator[Row]:
    """Load arrays from several files."""
    path = folder_of(folder)
    loads = {name: partial(load, path, arrays) for name, load in FOLDER_LOADS.items()}
    times = in_turn(loads, lambda name: give_memory_back(), rounds)
    row = ratio_row(f"loading a folder of {SHARDS} files", times)
    ratio = median(ours / theirs for ours, theirs in zip(times[UNCHECKED], times[SAFETENSORS]))
    note = f"{ratio:.2f} times safetensors' load_file without checksums, round by round"
    yield replace(row, target="≤ 1.3", met=ratio <= 1.3 * SAME, note=note)


def memory_now(field: str) -> int:
    """Bytes of this process: `VmRSS` is the current memory, `VmHWM` the peak."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def print_peak(what: str, name: str, folder: Path, total: int) -> None:
    """Print the peak memory of one contender beyond the arrays; runs in a separate process."""
    is_folder = what == "load-folder"
    arrays = transformer(total) if is_folder else model(total)
    loads = what != "save"
    load = FOLDER_LOADS[name] if is_folder else LOADS[name]
    path = folder_of(folder) if is_folder else file_of(folder, WRITER.get(name, name))
    work = partial(load, path, arrays)
    if not loads:
        work = partial(SAVES[name], file_of(folder, f"{name}-again"), arrays)
    if loads and name in (EQUINOX, UNCHECKED, OURS):
        # Structs take no memory.
        like: Any = jax.eval_shape(lambda: jax.tree.map(jnp.zeros_like, arrays))
        work = partial(load, path, like)
    if loads:
        arrays.clear()
    gc.collect()
    before = memory_now("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    made = jax.block_until_ready(work())
    print(memory_now("VmHWM") - before - loads * total)
    del made


def peak(what: str, name: str, folder: Path, total: int) -> int:
    """The peak memory of one contender, measured in a separate process."""
    code = "import sys; from pathlib import Path; from benchmarks.files import print_peak; "
    code += f"print_peak({what!r}, {name!r}, Path({str(folder)!r}), {total})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return max(int(done.stdout), 0)


def memory_rows(folder: Path, arrays: Arrays, total: int, quick: bool) -> Iterator[Row]:
    """Memory beyond the arrays; `quick` measures only the baseline and pytreemod."""
    largest = max(array.nbytes for array in arrays.values())
    for what, contenders in (("save", SAVES), ("load", LOADS)):
        # Each needs a separate process, which takes seconds to start.
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
    """The memory to load the folder, beyond the arrays."""
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
    """The bytes that this process reads from the system during `work`."""

    def so_far() -> int:
        counts = Path("/proc/self/io").read_text().split()
        return int(counts[counts.index("rchar:") + 1])

    asking = so_far()
    asking = so_far() - asking
    before = so_far()
    work()
    return so_far() - before - asking


def part_row(path: Path, arrays: Arrays) -> Row:
    """The bytes read to load one layer of a file or folder; all headers are read."""
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
        # The length of the header is read separately.
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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if installed(EQUINOX):
            yield small_leaves_row(folder, 402, load_equinox, 1.2, rounds)
        yield small_leaves_row(folder, 1000 if quick else 10_000, load_at_once, 2.0, rounds)
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
