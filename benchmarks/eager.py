"""The time that a transform adds to a call outside of `jit`; surgery on a model.

    python -m benchmarks.eager [--quick] [--json]

In a jitted function, a transform runs once, while JAX traces. Outside, in a notebook, it runs in
every call. The functions here compute almost nothing, so the time is the transform's. The baseline
is JAX's own transform on a flat list of the same arrays. JAX has no surgery, so its rows are
against Equinox; or against a quarter of the work, because the time may not grow faster than that.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.libraries import FILTERING, OURS, installed
from benchmarks.measuring import CALLER, Burst, compare, race, repeating
from benchmarks.networks import flat_arrays, vector
from benchmarks.tables import SAME, Benchmark, Row, raced, ratio_row

JAX = "plain JAX"
PEER = "Equinox"
MEMBERS = 3
LIMIT = 1.5
"""The limit where Equinox has no such transform."""
GROWTH, LINEAR = 4, 1.2
"""How many times as much work, and how much longer each part of it may take."""

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


# --- surgery ------------------------------------------------------------------------------------


def tree_at_one(library: Any, model: Any) -> Call:
    """Replace one array."""
    middle, new = len(model.layers) // 2, model.layers[0].weight
    return lambda: library.tree_at(lambda m: m.layers[middle].weight, model, new)


def tree_at_all(library: Any, model: Any) -> Call:
    """Change all arrays with `replace_fn`: one pass over the model."""

    def where(m: Any) -> list[jax.Array]:
        return [x for layer in m.layers for x in (layer.weight, layer.bias)]

    return lambda: library.tree_at(where, model, replace_fn=lambda old: old)


def partition(library: Any, model: Any) -> Call:
    """Divide into arrays and the rest."""
    return lambda: library.partition(model, library.is_array)


SURGERY = (
    ("tree_at, one array", tree_at_one, 150, 0.5),
    ("partition", partition, 150, 0.3),
    ("tree_at, replace_fn", tree_at_all, 1000, 1.5),
)
"""The name, the call, the number of layers, and the limit against Equinox."""


def surgery_rows(quick: bool, rounds: int) -> Iterator[Row]:
    """Surgery, against Equinox."""
    libraries = installed(*FILTERING)
    for name, call_of, depth, limit in SURGERY:
        arrays = flat_arrays(depth // 10 if quick else depth)
        calls = {n: call_of(lib, network(n, lib, arrays)) for n, lib in libraries.items()}
        bursts = {n: repeating(call) for n, call in calls.items()}
        label = f"{name}, {len(arrays)} arrays, against Equinox"
        yield raced(label, bursts, rounds=rounds, limit=limit if PEER in bursts else None)


def tied(pm: Any, count: int) -> Any:
    """A network whose weights are all tied to the first."""
    model = network(OURS, pm, flat_arrays(count))
    for i in range(1, count):
        model = pm.tie(model, f"layers[{i}].weight", to="layers[0].weight")
    return model


def shared(pm: Any, count: int) -> Any:
    """A network with one array for all weights."""
    arrays = flat_arrays(count)
    arrays[::2] = [arrays[0]] * count
    return network(OURS, pm, arrays)


def growth_rows(rounds: int) -> Iterator[Row]:
    """Four times as many ties or nodes take four times as long."""
    pm = installed(OURS)[OURS]

    def untie(count: int) -> Call:
        model = tied(pm, count)
        return lambda: pm.untie(model)

    def read(count: int) -> Call:
        model = tied(pm, count)
        return lambda: model.layers

    def trace(count: int) -> Call:
        model, x = shared(pm, count), vector()
        return lambda: pm.filter_eval_shape(loss, model, x)

    def at(count: int) -> Call:
        model = network(OURS, pm, flat_arrays(count))
        chosen = pm.select.at(lambda m: [layer.weight for layer in m.layers])
        return lambda: pm.filter(model, chosen)

    few = 50
    for label, call_of in (
        ("reading above n ties", read),
        ("untying n ties", untie),
        ("one array at n places", trace),
        ("select.at of n nodes", at),
    ):
        whole = repeating(call_of(GROWTH * few))
        bursts = {
            "few": repeating(call_of(few)),
            OURS: lambda number, whole=whole: whole(number) / GROWTH,
        }
        yield raced(f"{label}, per n, 200 against {few}", bursts, rounds=rounds, limit=LINEAR)


def rows(quick: bool) -> Iterator[Row]:
    """Each transform, for two sizes of model; then surgery."""
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
    yield from surgery_rows(quick, rounds)
    yield from growth_rows(rounds)


BENCHMARK = Benchmark("Outside of jit: transforms, against JAX's own; surgery", JAX, rows)

if __name__ == "__main__":
    BENCHMARK.main()
