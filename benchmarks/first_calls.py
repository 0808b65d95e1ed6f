"""The time of the first call of a compiled function on a model of many arrays.

    python -m benchmarks.first_calls [--quick] [--json]

The function returns the model unchanged, so the time depends on the number of arrays: to flatten
the model, trace, lower, compile, and build the result. Each call compiles a new function. The
baseline is `jax.jit` on a flat list of the same arrays.
"""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.libraries import installed
from benchmarks.measuring import WALL, Burst
from benchmarks.tables import Benchmark, Row, raced

FLAT = "jax.jit"
LIMIT = 1.2
NNX_LIMIT = 1000
"""The largest number of arrays for NNX, which would take minutes with more."""


def layers_of(library: Any, arrays: list[jax.Array]) -> Any:
    """A model of layers with two arrays each."""

    class Layer(library.Module):
        weight: jax.Array
        bias: jax.Array

        def __init__(self, weight: jax.Array, bias: jax.Array):
            self.weight, self.bias = weight, bias

    class Network(library.Module):
        layers: list[Any]

        def __init__(self, layers: list[Any]):
            self.layers = layers

    return Network([Layer(*pair) for pair in zip(arrays[::2], arrays[1::2], strict=True)])


def nnx_layers_of(nnx: Any, arrays: list[jax.Array]) -> Any:
    """The same model in NNX."""

    class Layer(nnx.Module):
        def __init__(self, weight: jax.Array, bias: jax.Array):
            self.weight, self.bias = nnx.Param(weight), nnx.Param(bias)

    class Network(nnx.Module):
        def __init__(self):
            pairs = zip(arrays[::2], arrays[1::2], strict=True)
            self.layers = nnx.List([Layer(*pair) for pair in pairs])

    return Network()


def calling_first(jit: Callable[..., Any], model: Any) -> Burst:
    """Compile a new function and call it, each time."""

    def burst(number: int) -> float:
        seconds = 0.0
        for _ in range(number):
            # Garbage of the last call must not be collected in the timed part.
            gc.collect()
            began = WALL()
            jit(lambda same: same)(model)
            seconds += WALL() - began
        return seconds

    return burst


def rows(quick: bool) -> Iterator[Row]:
    """A model with few arrays, then one with many."""
    for count, rounds in ((20, 3),) if quick else ((1_000, 7), (10_000, 3)):
        arrays = [jnp.full(2, float(i)) for i in range(count)]
        bursts = {FLAT: calling_first(jax.jit, arrays)}
        for name, library in installed().items():
            if name != "NNX":
                bursts[name] = calling_first(library.filter_jit, layers_of(library, arrays))
            elif count <= NNX_LIMIT:
                bursts[name] = calling_first(library.jit, nnx_layers_of(library, arrays))
        yield raced(f"first call, {count:,} arrays", bursts, rounds=rounds, limit=LIMIT)


BENCHMARK = Benchmark("The first call of a compiled function", FLAT, rows)

if __name__ == "__main__":
    BENCHMARK.main()
