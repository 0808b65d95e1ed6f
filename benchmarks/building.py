"""What it costs to build a transformer: eagerly, and as a compiled program.

    python -m benchmarks.building [--quick] [--json]

The same twelve blocks in each library: two norms, attention of four heads without bias, two dense
layers, and an embedding before all of them. Eagerly, each array is drawn by a call of its own, so
that Python decides how long it takes; the arrays are small. Under `jit` the building is traced,
compiled and run once, by a function that nobody has compiled before, which is what a user waits for
who makes a model in this way.

The baseline is Equinox; NNX stands beside it in the same rounds, and eagerly pytreemod is to be
slower than neither: its target is the smaller of one and NNX's ratio.
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
    """What builds it from a depth and a key, in the two libraries that share their names."""
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
    """The same in NNX, which takes its keys from a stream."""

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
    """How each library builds it, and how it compiles a function; the baseline first."""
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
    """Build it, each time after what the last one left was cleared away."""

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
    """Build it by a function that is compiled for this alone."""

    def build_by(key: jax.Array) -> Any:
        return build(depth, key)

    return jit(build_by)(jax.random.key(0))


def in_turn(bursts: dict[str, Burst], rounds: int) -> dict[str, list[float]]:
    """Seconds for one call, round by round, without the calls by which a race finds its bursts."""
    times: dict[str, list[float]] = {name: [] for name in bursts}
    names = list(bursts)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(bursts[name](1))
    return times


def compared(label: str, times: dict[str, list[float]]) -> Row:
    """A row whose promise is the faster one of the other libraries."""
    results = compare(times, next(iter(times)))
    others = [result.ratio.median for name, result in results.items() if name != OURS]
    return ratio_row(label, times, limit=round(min(others), 3))


def rows(quick: bool) -> Iterator[Row]:
    """Eagerly, and compiled."""
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
    # To be seen beside it: nearly all of it is XLA's, and each library draws in its own way.
    yield ratio_row(label, in_turn(compiling, 2 if quick else 3))


BENCHMARK = Benchmark("Building a transformer, against Equinox", EQUINOX, rows)

if __name__ == "__main__":
    BENCHMARK.main()
