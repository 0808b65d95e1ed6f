"""The time that a transform adds to a call outside of `jit`.

    python -m benchmarks.eager [--quick] [--json]

In a jitted function, a transform runs once, while JAX traces. Outside, in a notebook, it runs in
every call. The functions here compute almost nothing, so the time is the transform's. The baseline
is JAX's own transform on a flat list of the same arrays.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.libraries import OURS, installed
from benchmarks.measuring import CALLER, Burst, compare, race
from benchmarks.networks import flat_arrays, vector
from benchmarks.tables import SAME, Benchmark, Row, ratio_row

JAX = "plain JAX"
PEER = "Equinox"
MEMBERS = 3
LIMIT = 1.5
"""The limit where Equinox has no such transform."""

Call = Callable[[], Any]


# --- models: layers that hold a matrix and a vector --------------------------------------------


def layer_class(name: str, library: Any) -> type:
    """A layer that scales by its bias; its weight is not used."""
    if name == "NNX":

        class Layer(library.Module):
            def __init__(self, weight: jax.Array, bias: jax.Array):
                self.weight, self.bias = library.Param(weight), library.Param(bias)

            def __call__(self, x: jax.Array) -> jax.Array:
                return x * self.bias[...]

        return Layer

    class Scale(library.Module):
        weight: jax.Array
        bias: jax.Array

        def __call__(self, x: jax.Array) -> jax.Array:
            return x * self.bias

    return Scale


def network_class(name: str, library: Any) -> type:
    """A list of layers; a call uses the first."""

    class Network(library.Module):
        layers: list[Any]

        def __init__(self, layers: list[Any]):
            self.layers = library.List(layers) if name == "NNX" else layers

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layers[0](x)

    return Network


def network(name: str, library: Any, arrays: list[jax.Array]) -> Any:
    """A network with two arrays for each layer; in plain JAX, the list of arrays itself."""
    if library is None:
        return arrays
    layer = layer_class(name, library)
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return network_class(name, library)([layer(w, b) for w, b in pairs])


def stacked(name: str, library: Any, arrays: list[jax.Array]) -> Any:
    """One layer with the stacked arrays of all layers, for a scan."""
    both = jnp.stack(arrays[::2]), jnp.stack(arrays[1::2])
    return both if library is None else layer_class(name, library)(*both)


def apply(model: Any, x: jax.Array) -> jax.Array:
    """The function that is transformed."""
    return x * model[1] if type(model) is list else model(x)


def loss(model: Any, x: jax.Array) -> jax.Array:
    """A scalar."""
    return jnp.sum(apply(model, x))


def step(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
    """A step of a scan."""
    return (x * layer[1] if type(layer) is tuple else layer(x)), None


def negated(model: Any) -> Any:
    """One branch of a `cond`."""
    return jax.tree.map(jnp.negative, model)


def same(model: Any) -> Any:
    """The other branch."""
    return model


# --- transforms: for each library, a call; None if it has no such transform -----------------------


def vmap(name: str, library: Any, arrays: list[jax.Array]) -> Call:
    """Over three inputs, with one model."""
    transform = {JAX: jax.vmap, "NNX": getattr(library, "vmap", None)}.get(name)
    transform = transform or library.filter_vmap
    mapped, model = transform(apply, in_axes=(None, 0)), network(name, library, arrays)
    xs = jnp.stack([vector()] * MEMBERS)
    return lambda: mapped(model, xs)


def grad(name: str, library: Any, arrays: list[jax.Array]) -> Call:
    """With respect to the model."""
    transform = {JAX: jax.grad, "NNX": getattr(library, "grad", None)}.get(name)
    transform = transform or library.filter_grad
    gradient, model, x = transform(loss), network(name, library, arrays), vector()
    return lambda: gradient(model, x)


def jvp(name: str, library: Any, arrays: list[jax.Array]) -> Call | None:
    """In the direction of the model itself. (NNX's needs another mode.)"""
    if name == "NNX":
        return None
    model, x = network(name, library, arrays), vector()
    transform = jax.jvp if library is None else library.filter_jvp
    return lambda: transform(apply, (model, x), (model, x))


def scan(name: str, library: Any, arrays: list[jax.Array]) -> Call | None:
    """Over a stack of layers."""
    if name == PEER:
        return None
    layers, x = stacked(name, library, arrays), vector()
    if name == "NNX":
        run = library.scan(step, in_axes=(library.Carry, 0), out_axes=(library.Carry, 0))
        return lambda: run(x, layers)
    transform = lax.scan if library is None else library.filter_scan
    return lambda: transform(step, x, layers)


def cond(name: str, library: Any, arrays: list[jax.Array]) -> Call | None:
    """Two branches that return the model."""
    if name in (PEER, "NNX"):
        return None
    model = network(name, library, arrays)
    transform = lax.cond if library is None else library.filter_cond
    return lambda: transform(True, negated, same, model)


@dataclass(frozen=True)
class Kind:
    """One transform."""

    label: str
    call_of: Callable[[str, Any, list[jax.Array]], Call | None]


KINDS = (
    Kind("filter_vmap", vmap),
    Kind("filter_grad", grad),
    Kind("filter_jvp", jvp),
    Kind("filter_scan", scan),
    Kind("filter_cond", cond),
)


def bursting(call: Call) -> Burst:
    """Calls in a row, then an untimed wait for the device."""

    def burst(number: int) -> float:
        began = CALLER()
        for _ in range(number):
            out = call()
        seconds = CALLER() - began
        jax.block_until_ready(jax.tree.leaves(out))
        return seconds

    return burst


def rows(quick: bool) -> Iterator[Row]:
    """Each transform, for two sizes of model."""
    depths, rounds = ((3,), 4) if quick else ((3, 21), 40)
    libraries = {JAX: None, **installed()}
    for depth in depths:
        arrays = flat_arrays(depth)
        for kind in KINDS:
            calls = {name: kind.call_of(name, lib, arrays) for name, lib in libraries.items()}
            bursts = {name: bursting(call) for name, call in calls.items() if call is not None}
            times = race(bursts, rounds=rounds)
            label = f"{kind.label}, {len(arrays)} arrays"
            if PEER in times:
                of_peer = compare(times, PEER)[OURS].ratio.median
                row = ratio_row(label, times)
                yield replace(row, target=f"≤ {PEER}", met=of_peer <= SAME)
            else:
                yield ratio_row(label, times, limit=LIMIT)


BENCHMARK = Benchmark("A transform outside of jit, against JAX's own", JAX, rows)

if __name__ == "__main__":
    BENCHMARK.main()
