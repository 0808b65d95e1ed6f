"""The time to flatten and unflatten a model, for each module in it.

    python -m benchmarks.flattening [--quick] [--json]

Each call of a plain JAX transform, and of `jax.tree.map`, does this. The baseline is nested dicts
of the same shape, which JAX flattens and rebuilds in C++. All Modules are rebuilt by Python code.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax.tree_util as jtu

from benchmarks.libraries import FILTERING, installed
from benchmarks.measuring import CALLER, Burst
from benchmarks.networks import nested_dicts, network_class, network_with_defaults
from benchmarks.tables import Benchmark, Row, raced


def flattening(tree: Any) -> Burst:
    """Flatten."""
    flatten = jtu.tree_flatten

    def burst(number: int) -> float:
        began = CALLER()
        for _ in range(number):
            flatten(tree)
        return CALLER() - began

    return burst


def unflattening(tree: Any) -> Burst:
    """Unflatten."""
    leaves, structure = jtu.tree_flatten(tree)
    unflatten = jtu.tree_unflatten

    def burst(number: int) -> float:
        began = CALLER()
        for _ in range(number):
            unflatten(structure, leaves)
        return CALLER() - began

    return burst


def rebuilding(tree: Any) -> Burst:
    """Flatten and unflatten."""
    flatten, unflatten = jtu.tree_flatten, jtu.tree_unflatten

    def burst(number: int) -> float:
        began = CALLER()
        for _ in range(number):
            leaves, structure = flatten(tree)
            unflatten(structure, leaves)
        return CALLER() - began

    return burst


HALVES: dict[str, Callable[[Any], Burst]] = {"flatten": flattening, "unflatten": unflattening}
LIMIT = 1.6


def rows(quick: bool) -> Iterator[Row]:
    """Both directions for three sizes, and with defaults; then each direction for the largest."""
    depths, rounds = ((3, 21), 4) if quick else ((3, 21, 201), 60)
    makers = {"dicts": nested_dicts}
    makers |= {name: network_class(name, library) for name, library in installed().items()}

    def row(what: str, burst_of: Callable[[Any], Burst], depth: int, limit: float | None) -> Row:
        modules = depth + 1
        bursts = {name: burst_of(make(depth)) for name, make in makers.items()}
        label = f"{what}, per module, {modules} modules"
        return raced(label, bursts, rounds=rounds, share=1 / modules, limit=limit)

    for depth in depths:
        yield row("flatten and unflatten", rebuilding, depth, LIMIT)
    depth = depths[1]
    models = {"dicts": nested_dicts(depth)}
    models |= {n: network_with_defaults(m, depth) for n, m in installed(*FILTERING).items()}
    yield raced(
        f"the same with three defaults each, {depth + 1} modules",
        {name: rebuilding(model) for name, model in models.items()},
        rounds=rounds,
        share=1 / (depth + 1),
        limit=LIMIT,
    )
    for what, burst_of in HALVES.items():
        yield row(what, burst_of, depths[-1], None)


BENCHMARK = Benchmark("Flattening and unflattening, against nested dicts", "dicts", rows)

if __name__ == "__main__":
    BENCHMARK.main()
