"""The time to compile and run a scan over many layers of one kind.

    python -m benchmarks.stack [--quick] [--json]

A layer is a residual block: normalization, an affine map, relu, another affine map. In all
libraries the Modules have the arrays and call the same functions of arrays. pytreemod stacks layers
with `nn.Stack`; Equinox with `filter_vmap` over the class, `partition` and `jax.lax.scan`; NNX with
`nnx.vmap` over the class and `nnx.scan`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.libraries import OURS, installed
from benchmarks.measuring import PROCESS, WALL, Burst, clocked, compare, race, tidied
from benchmarks.tables import SAME, Benchmark, Row, cell, ratio_row, with_unit

BY_HAND = "by hand"
EPS = 1e-5
GROWTH = 1.2
"""The limit for compiling a hundred layers, against two."""

Parameters = dict[str, jax.Array]


# --- computations --------------------------------------------------------------------------------


def residual(p: Parameters, x: jax.Array) -> jax.Array:
    """One block."""
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    h = centered * lax.rsqrt(var + EPS) * p["scale"]
    h = jax.nn.relu(h @ p["into"] + p["bias"])
    return x + h @ p["out"]


def parameters(key: jax.Array, width: int) -> Parameters:
    """The arrays of one block."""
    one, two = jax.random.split(key)
    return {
        "scale": jnp.ones(width),
        "into": jax.random.normal(one, (width, width)) / width,
        "bias": jnp.zeros(width),
        "out": jax.random.normal(two, (width, width)) / width,
    }


def mean_square(y: jax.Array) -> jax.Array:
    """A scalar to differentiate."""
    return jnp.mean(y**2)


# --- contenders ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A model, how to apply it, and the library's jit and grad."""

    model: Any
    apply: Callable[[Any, jax.Array], jax.Array]
    jit: Callable[..., Any] = jax.jit
    grad: Callable[..., Any] = jax.grad

    def program(self, what: str) -> Callable[..., Any]:
        """The function to compile; it is new each time, because JAX caches programs."""
        if what == "forward":
            return lambda model, x: self.apply(model, x)
        return self.grad(lambda model, x: mean_square(self.apply(model, x)))


def layer_keys(depth: int) -> jax.Array:
    """A key for each layer."""
    return jax.random.split(jax.random.key(0), depth)


def loop_by_hand(depth: int, width: int) -> Contender:
    """A list of dicts, and a loop."""

    def apply(model: list[Parameters], x: jax.Array) -> jax.Array:
        for layer in model:
            x = residual(layer, x)
        return x

    return Contender([parameters(key, width) for key in layer_keys(depth)], apply)


def scan_by_hand(depth: int, width: int) -> Contender:
    """A dict of stacked arrays, and a scan."""

    def apply(model: Parameters, x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, layer: (residual(layer, x), None), x, model)[0]

    return Contender(jax.vmap(lambda key: parameters(key, width))(layer_keys(depth)), apply)


def block_class(library: Any, width: int) -> Any:
    """The class in Equinox or pytreemod."""

    class Block(library.Module):
        parameters: Parameters

        def __init__(self, *, key: jax.Array):
            self.parameters = parameters(key, width)

        def __call__(self, x: jax.Array) -> jax.Array:
            return residual(self.parameters, x)

    return Block


def in_pytreemod(pm: Any, depth: int, width: int, **options: Any) -> Contender:
    """With `nn.Stack`."""
    model = pm.nn.Stack(block_class(pm, width), depth, key=jax.random.key(0), **options)
    return Contender(model, lambda model, x: model(x), pm.filter_jit, pm.filter_grad)


def in_equinox(eqx: Any, depth: int, width: int) -> Contender:
    """As its documentation does."""
    block = block_class(eqx, width)
    model = eqx.filter_vmap(lambda key: block(key=key))(layer_keys(depth))

    def apply(model: Any, x: jax.Array) -> jax.Array:
        arrays, rest = eqx.partition(model, eqx.is_array)
        return lax.scan(lambda x, layer: (eqx.combine(layer, rest)(x), None), x, arrays)[0]

    return Contender(model, apply, eqx.filter_jit, eqx.filter_grad)


def in_nnx(nnx: Any, depth: int, width: int) -> Contender:
    """As its documentation does."""

    class Block(nnx.Module):
        def __init__(self, rngs: Any):
            made = parameters(rngs.params(), width)
            self.parameters = nnx.Dict({name: nnx.Param(value) for name, value in made.items()})

        def __call__(self, x: jax.Array) -> jax.Array:
            return residual({name: param[...] for name, param in self.parameters.items()}, x)

    @nnx.split_rngs(splits=depth)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: Any) -> Any:
        return Block(rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def step(x: jax.Array, layer: Any) -> jax.Array:
        return layer(x)

    return Contender(make(nnx.Rngs(0)), lambda model, x: step(x, model), nnx.jit, nnx.grad)


MAKERS = {"pytreemod": in_pytreemod, "Equinox": in_equinox, "NNX": in_nnx}


def scanning(depth: int, width: int) -> dict[str, Contender]:
    """The scan by hand, then those of the libraries."""
    libraries = {name: MAKERS[name](library, depth, width) for name, library in installed().items()}
    return {BY_HAND: scan_by_hand(depth, width), **libraries}


# --- rows ----------------------------------------------------------------------------------------


def compiling(contender: Contender, what: str, x: jax.Array) -> Burst:
    """Trace and compile."""

    def compile_() -> None:
        contender.jit(contender.program(what)).lower(contender.model, x).compile()

    return tidied(clocked(PROCESS, compile_))


def tracing(contender: Contender, what: str, x: jax.Array) -> Burst:
    """Trace and lower to StableHLO, without compiling."""

    def lower() -> None:
        contender.jit(contender.program(what)).lower(contender.model, x)

    return tidied(clocked(PROCESS, lower))


def stepping(contender: Contender, what: str, x: jax.Array) -> Burst:
    """Call the compiled function."""
    step = contender.jit(contender.program(what))
    return clocked(WALL, lambda: step(contender.model, x))


def growth(depth: int, width: int, what: str, rounds: int) -> Row:
    """How much longer `depth` layers take to compile than 2, for each contender."""
    x = jnp.ones((2, width))
    few, many = scanning(2, width), scanning(depth, width)
    results: dict[str, Any] = {}
    for name in few:
        bursts = {"2": compiling(few[name], what, x), "many": compiling(many[name], what, x)}
        results[name] = compare(race(bursts, rounds=rounds), "2")
    ours = results[OURS]["many"].ratio
    return Row(
        f"compiling {what}, {depth} layers, against 2",
        with_unit(results[BY_HAND]["2"].seconds.median),
        {name: cell(found["many"]) for name, found in results.items() if name != BY_HAND},
        {name: found["many"].as_dict() for name, found in results.items()},
        f"≤ {GROWTH:g}",
        # The best times, because compiling is slow and there are few rounds.
        ours.best <= GROWTH * SAME,
    )


def against(
    baseline: Contender,
    contenders: Mapping[str, Contender],
    kind: Callable[[Contender, str, jax.Array], Burst],
    what: str,
    x: jax.Array,
) -> dict[str, Burst]:
    """Bursts of all contenders, the baseline first."""
    others = {name: kind(c, what, x) for name, c in contenders.items() if name != BY_HAND}
    return {BY_HAND: kind(baseline, what, x), **others}


def rows(quick: bool) -> Iterator[Row]:
    """Compiling at two depths; tracing against a scan by hand; running against a loop."""
    depth, rounds = (5, 2) if quick else (100, 8)
    kinds = ("forward",) if quick else ("forward", "gradient")
    for what in kinds:
        yield growth(depth, 16, what, 2 if quick else 5)
    many = scanning(depth, 16)
    for what in kinds:
        bursts = against(many[BY_HAND], many, tracing, what, jnp.ones((2, 16)))
        label = f"tracing {what}, {depth} layers, against a scan"
        yield ratio_row(label, race(bursts, rounds=3 * rounds), limit=1.1)
    for width, batch in ((16, 2),) if quick else ((16, 8), (64, 64), (256, 256), (256, 8)):
        layers, x = 16, jnp.ones((batch, width))
        loop, others = loop_by_hand(layers, width), scanning(layers, width)
        for what in kinds:
            bursts = against(loop, others, stepping, what, x)
            label = f"{what}, wall, {batch} x {width}, against a loop"
            yield ratio_row(label, race(bursts, rounds=5 * rounds), limit=1.0)
    if not quick:
        yield from heaviest(16, 256, 256, 5 * rounds)


def heaviest(depth: int, width: int, batch: int, rounds: int) -> Iterator[Row]:
    """The gradient of the largest model: against a scan, and with `unroll=True`."""
    x, stack = jnp.ones((batch, width)), MAKERS[OURS]
    for label, baseline, options in (
        ("against a scan", scan_by_hand, {}),
        ("unroll=True, against a loop", loop_by_hand, {"unroll": True}),
    ):
        ours = stack(installed()[OURS], depth, width, **options)
        bursts = against(baseline(depth, width), {OURS: ours}, stepping, "gradient", x)
        label = f"gradient, {batch} x {width}, {label}"
        yield ratio_row(label, race(bursts, rounds=rounds), limit=1.0)


BENCHMARK = Benchmark("A stack of layers, against plain JAX on dicts", BY_HAND, rows)

if __name__ == "__main__":
    BENCHMARK.main()
