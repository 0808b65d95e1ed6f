"""The time and memory to save and load 1 GB of arrays in 400 leaves.

    python -m benchmarks.files [--quick] [--json]

Times are wall time, because threads and the disk take part. Memory is the peak of a separate
process, minus its memory before the work and minus the loaded arrays.

Files are written to a temporary folder (set `TMPDIR` to choose it). pytreemod always waits for the
disk, so the others write through a wrapper that waits, too (`fsync`). Each file is removed, and the
buffers of the system are written, before the clock starts. Files that are loaded are in the
system's memory. With `safetensors`, a file is loaded by `load_file` and one `device_put`.

The folder has the layers of a transformer, 256 MB in all, in eight files and an index.
"""

import gc
import json
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

SAFETENSORS, EQUINOX = "safetensors", "Equinox"
LEAVES, TOTAL = 400, 10**9
SHARDS, DEPTH = 8, 16
LAYER = "layers.7"
ROOT = Path(__file__).parents[1]

Arrays = dict[str, Any]


def model(total: int) -> Arrays:
    """Weights of mixed sizes, and a bias for each."""
    rng = np.random.default_rng(0)
    weights = np.exp(1.5 * rng.normal(size=LEAVES // 2))
    sizes = np.maximum(weights / weights.sum() * total / 4, 1).astype(int)
    arrays = {f"layers.{i}.weight": rng.random(size, np.float32) for i, size in enumerate(sizes)}
    arrays |= {f"layers.{i}.bias": rng.random(64, np.float32) for i in range(len(sizes))}
    return jax.block_until_ready(jax.tree.map(jnp.asarray, arrays))


def transformer(total: int) -> Arrays:
    """Layers of four square matrices and two vectors, as in large models."""
    rng = np.random.default_rng(0)
    width = round((total / 4 / 4 / DEPTH) ** 0.5)
    forms = {"norm": (width,), "bias": (width,), **dict.fromkeys("qkvo", (width, width))}
    return {
        f"layers.{i}.{name}": jnp.asarray(rng.random(shape, np.float32))
        for i in range(DEPTH)
        for name, shape in forms.items()
    }


def save_safetensors(path: Path, arrays: Arrays) -> None:
    host = {name: np.asarray(array) for name, array in arrays.items()}
    synchronized(partial(safetensors.numpy.save_file, host, path), path)


def save_equinox(path: Path, arrays: Arrays) -> None:
    write = installed(EQUINOX)[EQUINOX].tree_serialise_leaves
    synchronized(partial(write, path, arrays), path)


def synchronized(write: Callable[[], Any], path: Path) -> None:
    """Write, then wait for the disk."""
    write()
    with path.open("rb") as file:
        os.fsync(file.fileno())


def save_shards(folder: Path, arrays: Arrays) -> None:
    """Write files and an index, as transformers does."""
    folder.mkdir()
    names, files = list(arrays), {}
    for number in range(SHARDS):
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        chosen = names[number * len(names) // SHARDS : (number + 1) * len(names) // SHARDS]
        save_safetensors(folder / file, {name: arrays[name] for name in chosen})
        files |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def load_safetensors(path: Path, like: Arrays) -> Arrays:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    loaded = [safetensors.numpy.load_file(file) for file in files]
    return jax.device_put({name: array for each in loaded for name, array in each.items()})


def load_equinox(path: Path, like: Arrays) -> Arrays:
    return installed(EQUINOX)[EQUINOX].tree_deserialise_leaves(path, like)


SAVES: dict[str, Callable[[Path, Arrays], None]] = {
    SAFETENSORS: save_safetensors,
    EQUINOX: save_equinox,
    OURS: pm.save,
}
LOADS: dict[str, Callable[[Path, Arrays], Any]] = {
    SAFETENSORS: load_safetensors,
    EQUINOX: load_equinox,
    OURS: pm.load,
}


def contenders(folder: Path, calls: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
    """The calls of each installed library. (Equinox appends this suffix to each name.)"""
    return {
        name: partial(call, folder / f"{name}.eqx", arrays)
        for name, call in calls.items()
        if name != EQUINOX or installed(EQUINOX)
    }


def in_turn(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    prepare: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """Seconds of each round; each round starts with another contender."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            prepare(name)
            with no_garbage_collection():
                began = perf_counter()
                made = jax.block_until_ready(calls[name]())
                times[name].append(perf_counter() - began)
            del made
    return times


def judged(label: str, times: Mapping[str, Sequence[float]], limit: float = 1.1) -> Row:
    """A row with the median ratio to the faster of the two others in each round."""
    others = [times[name] for name in times if name != OURS]
    ratio = median(ours / min(theirs) for ours, *theirs in zip(times[OURS], *others, strict=True))
    note = f"{ratio:.2f} times the faster of the others, round by round"
    met = ratio <= limit * SAME
    return replace(ratio_row(label, times), target=f"≤ {limit:g}", met=met, note=note)


def timed_rows(folder: Path, arrays: Arrays, rounds: int) -> Iterator[Row]:
    """Save to a new file, and load it."""

    def fresh(name: str) -> None:
        (folder / f"{name}.eqx").unlink(missing_ok=True)
        os.sync()

    saves = contenders(folder, SAVES, arrays)
    yield judged("saving, until it is on the disk", in_turn(saves, rounds, fresh))
    loads = contenders(folder, LOADS, arrays)
    yield judged("loading into JAX arrays", in_turn(loads, rounds))


def small_leaves_row(folder: Path, count: int, other: str, limit: float, rounds: int) -> Row:
    """Load many arrays of a few numbers, where the time is the library's."""
    arrays = {str(i): jnp.full(16, i, jnp.float32) for i in range(count)}
    for save in contenders(folder, SAVES, arrays).values():
        save()
    loads = contenders(folder, LOADS, arrays)
    times = in_turn({name: loads[name] for name in (other, OURS)}, rounds)
    return ratio_row(f"loading {count} leaves, against {other}", times, limit=limit)


def memory_now(field: str) -> int:
    """Bytes of this process: `VmRSS` is the current memory, `VmHWM` the peak."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def print_peak(what: str, name: str, folder: Path, total: int) -> None:
    """Print the peak memory of one contender beyond the arrays; runs in a separate process."""
    arrays = model(total)
    # Structs take no memory.
    like = jax.eval_shape(lambda: jax.tree.map(jnp.zeros_like, arrays))
    work = contenders(folder, SAVES if what == "saving" else LOADS, arrays)[name]
    if what == "loading":
        work = contenders(folder, LOADS, like)[name]
        arrays.clear()
    gc.collect()
    before = memory_now("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    made = jax.block_until_ready(work())
    print(memory_now("VmHWM") - before - (what == "loading") * total)
    del made


def peak(what: str, name: str, folder: Path, total: int) -> int:
    """The peak memory of one contender, measured in a separate process."""
    code = "import sys; from pathlib import Path; from benchmarks.files import print_peak; "
    code += f"print_peak({what!r}, {name!r}, Path({str(folder)!r}), {total})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return max(int(done.stdout), 0)


def memory_rows(folder: Path, arrays: Arrays, total: int) -> Iterator[Row]:
    """Memory beyond the arrays: at most the largest one."""
    largest = max(array.nbytes for array in arrays.values())
    for what in ("saving", "loading"):
        names = contenders(folder, SAVES, arrays)
        peaks = {name: peak(what, name, folder, total) for name in names}
        yield Row(
            f"memory of {what}, beyond the arrays",
            megabytes(peaks[SAFETENSORS]),
            {name: megabytes(number) for name, number in peaks.items() if name != SAFETENSORS},
            {name: {"bytes": number} for name, number in peaks.items()},
            target=f"≤ {largest / MB:.1f} MB",
            met=peaks[OURS] <= largest,
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


def header_size(path: Path) -> int:
    """The bytes before the arrays: a number of eight bytes, and that many bytes."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def part_row(folder: Path, arrays: Arrays) -> Row:
    """The bytes read to load one layer of a folder; all headers, and the index, are read.

    Python reads a buffer of 8 KiB at a time.
    """
    chosen = pm.select.at(lambda tree: [tree[name] for name in tree if name.startswith(LAYER)])
    read = bytes_read(lambda: pm.load(folder, arrays, only=chosen))
    size = sum(array.nbytes for name, array in arrays.items() if name.startswith(LAYER))
    headers = sum(header_size(path) for path in folder.glob("*.safetensors"))
    headers += sum(path.stat().st_size for path in folder.glob("*.json"))
    limit = size + headers + 8192 * SHARDS
    return Row(
        f"bytes read of a folder for one layer of {size / MB:.2f} MB",
        "-",
        {OURS: f"{read / MB:.2f} MB"},
        {OURS: {"bytes": read, "layer": size, "headers": headers}},
        target=f"≤ {limit / MB:.2f} MB",
        met=read <= limit,
    )


def rows(quick: bool) -> Iterator[Row]:
    """Times, then memory, then small leaves, then a folder."""
    total, rounds = (20 * 10**6, 3) if quick else (TOTAL, 7)
    has_counts = Path("/proc/self/clear_refs").exists()
    arrays = model(total)
    with tempfile.TemporaryDirectory() as name:
        yield from timed_rows(Path(name), arrays, rounds)
        if has_counts:
            yield from memory_rows(Path(name), arrays, total)
    with tempfile.TemporaryDirectory() as name:
        for count in (4, 402) if installed(EQUINOX) else ():
            yield small_leaves_row(Path(name), count, EQUINOX, 1.2, 3 * rounds)
        many = 1000 if quick else 10_000
        yield small_leaves_row(Path(name), many, SAFETENSORS, 2.0, rounds)
    arrays = transformer(total // 4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "folder"
        save_shards(folder, arrays)
        calls = {key: partial(LOADS[key], folder, arrays) for key in (SAFETENSORS, OURS)}
        times = in_turn(calls, rounds)
        yield ratio_row(f"loading a folder of {SHARDS} files", times, limit=1.1)
        if has_counts:
            yield part_row(folder, arrays)


BENCHMARK = Benchmark("Files: 1 GB of arrays in 400 leaves", SAFETENSORS, rows, (EQUINOX, OURS))

if __name__ == "__main__":
    BENCHMARK.main()
