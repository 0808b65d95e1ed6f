"""The time to call a compiled function on a model whose arrays are sharded.

    python -m benchmarks.sharded_dispatch            # the whole table, a few minutes
    python -m benchmarks.sharded_dispatch --quick    # small models, few rounds: a smoke test
    python -m benchmarks.sharded_dispatch --json     # all numbers, as JSON

The calls of `benchmarks.dispatch`, in a separate process with several CPU devices. Every array is
split along its first axis, or replicated if it has none.
"""

import os
from collections.abc import Iterator
from typing import Any

from benchmarks.networks import WIDTH

# JAX reads this when it makes its devices, so it must be set before the first array.
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={WIDTH}")

import jax
import jax.tree_util as jtu
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.dispatch import CALLS, QUICK, PlainJax, Plan, call_rows, contenders
from benchmarks.tables import Benchmark, Row


def put(tree: Any) -> Any:
    """Split each array of a tree along its first axis, one part for each device."""
    # Auto, because Equinox has no rules for products on explicit meshes; a call costs the same.
    mesh = jax.make_mesh((WIDTH,), ("parts",), axis_types=(AxisType.Auto,))

    def put_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*["parts"][: leaf.ndim])))

    return jtu.tree_map(put_leaf, tree)


def rows(quick: bool) -> Iterator[Row]:
    """The whole table."""
    yield from call_rows(contenders(put=put), QUICK if quick else Plan(), CALLS[:5])


BENCHMARK = Benchmark(
    "A jitted call on sharded arrays, against jax.jit on a flat list", PlainJax.name, rows
)

if __name__ == "__main__":
    BENCHMARK.main()
