"""The time to change, divide and compare a model of 300 arrays.

    python -m benchmarks.surgery [--quick] [--json]

The baseline is Equinox, because JAX has no such functions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.libraries import FILTERING, installed
from benchmarks.measuring import Burst, repeating
from benchmarks.tables import Benchmark, Row, raced

WIDTH = 4
BASELINE = FILTERING[0]


def network(library: Any, depth: int) -> Any:
    """`depth` blocks of a `Linear` and a `Dropout`: two arrays each."""

    class Block(library.Module):
        linear: Any
        dropout: Any

        def __init__(self, key: jax.Array):
            self.linear = library.nn.Linear(WIDTH, WIDTH, key=key)
            self.dropout = library.nn.Dropout(0.5)

    class Network(library.Module):
        blocks: list[Any]

        def __init__(self, depth: int):
            keys = jax.random.split(jax.random.key(0), depth)
            self.blocks = [Block(key) for key in keys]

    return Network(depth)


def replacing_one(library: Any, model: Any) -> Burst:
    new, middle = model.blocks[0].linear.weight, len(model.blocks) // 2
    return repeating(lambda: library.tree_at(lambda m: m.blocks[middle].linear.weight, model, new))


def replacing_all_biases(library: Any, model: Any) -> Burst:
    new = [block.linear.bias for block in model.blocks]
    return repeating(
        lambda: library.tree_at(lambda m: [b.linear.bias for b in m.blocks], model, new)
    )


def changing_all_arrays(library: Any, model: Any) -> Burst:
    """With `replace_fn`: one pass over the model for all arrays."""
    return repeating(
        lambda: library.tree_at(
            lambda m: [x for b in m.blocks for x in (b.linear.weight, b.linear.bias)],
            model,
            replace_fn=lambda old: old,
        )
    )


def partitioning(library: Any, model: Any) -> Burst:
    return repeating(lambda: library.partition(model, library.is_array))


def combining(library: Any, model: Any) -> Burst:
    arrays, rest = library.partition(model, library.is_array)
    return repeating(lambda: library.combine(arrays, rest))


def filtering(library: Any, model: Any) -> Burst:
    return repeating(lambda: library.filter(model, library.is_inexact_array))


def comparing(library: Any, model: Any) -> Burst:
    """Against a model with the same numbers in other arrays."""
    other = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, model)
    return repeating(lambda: bool(library.tree_equal(model, other)))


def switching(library: Any, model: Any) -> Burst:
    return repeating(lambda: library.nn.inference_mode(model))


@dataclass(frozen=True)
class Operation:
    """One operation."""

    label: str
    burst_of: Callable[[Any, Any], Burst]
    limit: float


OPERATIONS = (
    Operation("tree_at, one array", replacing_one, 0.1),
    Operation("tree_at, every bias", replacing_all_biases, 1.0),
    Operation("tree_at, replace_fn", changing_all_arrays, 0.5),
    Operation("partition", partitioning, 0.2),
    Operation("combine", combining, 1.0),
    Operation("filter", filtering, 1.0),
    Operation("tree_equal", comparing, 1.0),
    Operation("inference_mode", switching, 1.0),
)


def rows(quick: bool) -> Iterator[Row]:
    """Each operation."""
    depth, rounds = (15, 4) if quick else (150, 60)
    libraries = installed(*FILTERING)
    if BASELINE not in libraries:
        yield Row(f"{BASELINE} is not installed", "-", {}, {})
        return
    models = {name: network(library, depth) for name, library in libraries.items()}
    for operation in OPERATIONS:
        bursts = {name: operation.burst_of(lib, models[name]) for name, lib in libraries.items()}
        label = f"{operation.label}, {2 * depth} arrays"
        yield raced(label, bursts, rounds=rounds, limit=operation.limit)


BENCHMARK = Benchmark("Surgery on a model, against Equinox", BASELINE, rows)

if __name__ == "__main__":
    BENCHMARK.main()
