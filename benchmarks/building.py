"""The time to build a transformer: eagerly, and under `jit`.

    python -m benchmarks.building [--quick] [--json]

Each library builds an embedding and the same twelve blocks. A block has two norms, attention with
four heads and no bias, and two dense layers. Eagerly, a separate call draws each array. The arrays
are small, so this measures Python. Under `jit`, a new function is traced, compiled and run once:
the time that you wait for a model that is built under `jit`.

The baseline is Equinox, and NNX takes part in the same rounds. Eagerly, pytreemod must be as fast
as both: its target is the smaller of 1 and NNX's ratio.
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax

from benchmarks.libraries import OURS, installed
from benchmarks.measuring import CALLER, WALL, Burst, compare, race
from benchmarks.tables import Benchmark, Row, ratio_row

EQUINOX = "Equinox"
DEPTH, SIZE, HEADS, WORDS = 12, 32, 4, 50


def transformer_of(library: Any) -> Callable[..., Any]:
    """The class of the transformer in Equinox or pytreemod, which have the same names."""
    nn = library.nn

    class Block(library.Module):
        first: Any
        attention: Any
        second: Any
        up: Any
        down: Any

        def __init__(self, key: jax.Array):
            one, two, three = jax.random.split(key, 3)
            self.first = nn.LayerNorm(SIZE)
            self.attention = nn.MultiheadAttention(HEADS, SIZE, key=one)
            self.second = nn.LayerNorm(SIZE)
            self.up = nn.Linear(SIZE, 4 * SIZE, key=two)
            self.down = nn.Linear(4 * SIZE, SIZE, key=three)

    class Transformer(library.Module):
        words: Any
        blocks: list[Any]

        def __init__(self, depth: int, key: jax.Array):
            first, *others = jax.random.split(key, depth + 1)
            self.words = nn.Embedding(WORDS, SIZE, key=first)
            self.blocks = [Block(other) for other in others]

    return Transformer


def nnx_transformer_of(nnx: Any) -> Callable[..., Any]:
    """The class in NNX, which takes its keys from a stream."""

    class Block(nnx.Module):
        def __init__(self, rngs: Any):
            self.first = nnx.LayerNorm(SIZE, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                HEADS, SIZE, use_bias=False, decode=False, rngs=rngs
            )
            self.second = nnx.LayerNorm(SIZE, rngs=rngs)
            self.up = nnx.Linear(SIZE, 4 * SIZE, rngs=rngs)
            self.down = nnx.Linear(4 * SIZE, SIZE, rngs=rngs)

    class Transformer(nnx.Module):
        def __init__(self, depth: int, key: jax.Array):
            rngs = nnx.Rngs(key)
            self.words = nnx.Embed(WORDS, SIZE, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(depth)])

    return Transformer


def builders() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """How each library builds the transformer and compiles a function; the baseline is first."""
    found = {
        name: (transformer_of(library), library.filter_jit)
        for name, library in installed(EQUINOX, OURS).items()
    }
    found |= {
        name: (nnx_transformer_of(library), library.jit)
        for name, library in installed("NNX").items()
    }
    return found


def building(build: Callable[[], Any], clock: Callable[[], float]) -> Burst:
    """Build the transformer, each time after a garbage collection."""

    def burst(number: int) -> float:
        seconds = 0.0
        for _ in range(number):
            gc.collect()
            began = clock()
            jax.block_until_ready(jax.tree.leaves(build()))
            seconds += clock() - began
        return seconds

    return burst


def compiled_anew(jit: Callable[..., Any], build: Callable[..., Any], depth: int) -> Any:
    """Build the transformer with a newly compiled function."""

    def build_by(key: jax.Array) -> Any:
        return build(depth, key)

    return jit(build_by)(jax.random.key(0))


def in_turn(bursts: dict[str, Burst], rounds: int) -> dict[str, list[float]]:
    """Seconds of one call in each round, without the extra calls of `race`."""
    times: dict[str, list[float]] = {name: [] for name in bursts}
    names = list(bursts)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(bursts[name](1))
    return times


def compared(label: str, times: dict[str, list[float]]) -> Row:
    """A row whose target is the faster one of the other libraries."""
    results = compare(times, next(iter(times)))
    others = [result.ratio.median for name, result in results.items() if name != OURS]
    return ratio_row(label, times, limit=round(min(others), 3))


def rows(quick: bool) -> Iterator[Row]:
    """Building eagerly, then under `jit`."""
    depth = 2 if quick else DEPTH
    key = jax.random.key(0)
    eager = {
        name: building(partial(build, depth, key), CALLER)
        for name, (build, _) in builders().items()
    }
    yield compared(f"{depth} blocks, eagerly", race(eager, rounds=3 if quick else 30))
    compiling = {
        name: building(partial(compiled_anew, jit, build, depth), WALL)
        for name, (build, jit) in builders().items()
    }
    label = f"{depth} blocks under jit, with compilation"
    # No target: XLA takes nearly all of this time, and each library draws in its own way.
    yield ratio_row(label, in_turn(compiling, 2 if quick else 3))


BENCHMARK = Benchmark("Building a transformer, against Equinox", EQUINOX, rows)

if __name__ == "__main__":
    BENCHMARK.main()
