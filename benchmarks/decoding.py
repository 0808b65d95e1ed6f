"""The time to write tokens one by one, with a cache of keys and values.

    python -m benchmarks.decoding [--quick] [--json]

In a scan, an attention layer takes one token and returns one vector at a time. All contenders store
the keys and values of earlier tokens in a cache of a fixed size. In pytreemod the cache is State;
in NNX it is in the layer (`decode=True`); Equinox has none. By hand it is two arrays and a number.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.libraries import OURS, installed
from benchmarks.measuring import WALL, Burst, clocked, compare, race
from benchmarks.programs import Program, differences, require_same_numbers
from benchmarks.tables import SAME, Benchmark, Row, cell, ratio_row, with_unit

BY_HAND = "by hand"
HEADS = 4


class Contender(NamedTuple):
    """Weights, an empty cache, and a loop over tokens."""

    weights: Any
    empty: Callable[[], Any]
    loop: Callable[[Any, Any, jax.Array], tuple[Any, jax.Array]]
    jit: Callable[..., Any] = jax.jit


def matrices(width: int) -> list[jax.Array]:
    """The matrices for queries, keys, values and the output."""
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]


# --- contenders ----------------------------------------------------------------------------------


def by_hand(width: int, slots: int) -> Contender:
    """The cache as two arrays and a number."""
    size = width // HEADS

    def empty() -> Any:
        shape = (HEADS, slots, size)
        return jnp.zeros(shape), jnp.zeros(shape), jnp.zeros((), int)

    def step(weights: Any, cache: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        keys, values, length = cache
        query, key, value = (x @ matrix.T for matrix in weights[:3])
        query = query.reshape(HEADS, 1, size) / size**0.5
        keys = lax.dynamic_update_slice_in_dim(keys, key.reshape(HEADS, 1, size), length, 1)
        values = lax.dynamic_update_slice_in_dim(values, value.reshape(HEADS, 1, size), length, 1)
        logits = jnp.einsum("hqd,hkd->hqk", query, keys)
        logits = jnp.where(jnp.arange(slots) <= length, logits, jnp.finfo(logits.dtype).min)
        found = jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(logits), values)
        # In a full cache, the key was written over another.
        found = jnp.where(length < slots, found, jnp.nan)
        return (keys, values, length + 1), found.reshape(1, width) @ weights[3].T

    def loop(weights: Any, cache: Any, xs: jax.Array) -> tuple[Any, jax.Array]:
        return lax.scan(lambda cache, x: step(weights, cache, x), cache, xs)

    return Contender(matrices(width), empty, loop)


def in_pytreemod(pm: Any, width: int, slots: int) -> Contender:
    """The cache as State, which the loop carries."""
    make = pm.make_with_state(pm.nn.MultiheadAttention)
    layer, made = make(HEADS, width, is_causal=True, cache_size=slots, key=jax.random.key(0))
    names = ("query_proj", "key_proj", "value_proj", "output_proj")
    for name, matrix in zip(names, matrices(width), strict=True):
        layer = pm.tree_at(f"{name}.weight", layer, matrix)

    def loop(layer: Any, state: Any, xs: jax.Array) -> tuple[Any, jax.Array]:
        def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            out, state = layer(x, state=state)
            return state, out

        return pm.filter_scan(step, state, xs)

    return Contender(layer, lambda: jax.tree.map(jnp.copy, made), loop, pm.filter_jit)


def in_nnx(nnx: Any, width: int, slots: int) -> Contender:
    """The cache in the layer, which is split and merged for the loop."""
    layer = nnx.MultiHeadAttention(HEADS, width, decode=True, use_bias=False, rngs=nnx.Rngs(0))
    layer.init_cache((slots, width))
    shapes = ((width, HEADS, width // HEADS),) * 3 + ((HEADS, width // HEADS, width),)
    for part, matrix, shape in zip(
        (layer.query, layer.key, layer.value, layer.out), matrices(width), shapes, strict=True
    ):
        part.kernel[...] = matrix.T.reshape(shape)
    graph, weights, made = nnx.split(layer, nnx.Param, ...)

    def loop(weights: Any, cache: Any, xs: jax.Array) -> tuple[Any, jax.Array]:
        def step(cache: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            layer = nnx.merge(graph, weights, cache)
            out = layer(x)
            return nnx.split(layer, nnx.Param, ...)[2], out

        return lax.scan(step, cache, xs)

    return Contender(weights, lambda: jax.tree.map(jnp.copy, made), loop)


MAKERS = {"NNX": in_nnx, OURS: in_pytreemod}


def contenders(width: int, slots: int) -> dict[str, Contender]:
    """All contenders that have a cache."""
    found = {
        name: MAKERS[name](library, width, slots) for name, library in installed(*MAKERS).items()
    }
    return {BY_HAND: by_hand(width, slots), **found}


# --- rows ----------------------------------------------------------------------------------------


def agreeing(all_of_them: Mapping[str, Contender], xs: jax.Array) -> None:
    """Check that all contenders compute the same numbers."""
    found = {name: c.jit(c.loop)(c.weights, c.empty(), xs)[1] for name, c in all_of_them.items()}
    for name, out in found.items():
        require_same_numbers(name, out, found[BY_HAND])


def counted(label: str, ours: Program, hand: Program) -> Row:
    """The operations of the compiled programs, and their differences."""
    differing = differences(ours, hand)
    return Row(
        label,
        f"{hand.operations.total()} ops",
        {OURS: f"{ours.operations.total()} ops"},
        {BY_HAND: hand.as_dict(), OURS: ours.as_dict(), "differences": differing},
        "no more",
        ours.operations.total() <= hand.operations.total(),
        ", ".join(differing),
    )


def stepping(contender: Contender, run: Callable[..., Any], cache: Any, xs: jax.Array) -> Burst:
    """Run the loop, always from the same cache."""
    return clocked(WALL, lambda: run(contender.weights, cache, xs))


def later(contender: Contender, slots: int, xs: jax.Array) -> dict[str, Any]:
    """The loop from an empty cache, and from one that is nearly full."""
    traces = 0

    def counted(weights: Any, cache: Any, xs: jax.Array) -> tuple[Any, jax.Array]:
        nonlocal traces
        traces += 1
        return contender.loop(weights, cache, xs)

    run = contender.jit(counted)
    seen = jnp.ones(((slots // len(xs) - 1), *xs.shape))
    full = contender.empty()
    for part in seen:
        full, _ = run(contender.weights, full, part)

    caches = {"empty": contender.empty(), "nearly full": full}
    bursts = {name: stepping(contender, run, cache, xs) for name, cache in caches.items()}
    return {"bursts": bursts, "traces": lambda: traces}


def rows(quick: bool) -> Iterator[Row]:
    """The program; late tokens against early ones; the time against the other contenders."""
    rounds = 3 if quick else 40
    for width, slots in ((16, 32),) if quick else ((64, 256), (256, 1024)):
        xs = jax.random.normal(jax.random.key(1), (16, 1, width))
        all_of_them = contenders(width, slots)
        agreeing(all_of_them, xs)
        label = f"width {width}, {slots} slots"
        ours, hand = all_of_them[OURS], all_of_them[BY_HAND]
        programs = [
            Program.of(c.jit(c.loop).lower(c.weights, c.empty(), xs).compile())
            for c in (ours, hand)
        ]
        yield counted(f"{label}: program of 16 steps", *programs)
        measured = later(ours, slots, xs)
        results = compare(race(measured["bursts"], rounds=rounds), "empty")
        late, traces = results["nearly full"], measured["traces"]()
        yield Row(
            f"{label}: 16 tokens late, against early",
            with_unit(results["empty"].seconds.median),
            {OURS: cell(late)},
            {**{name: result.as_dict() for name, result in results.items()}, "traces": traces},
            "≤ 1.1, once",
            late.ratio.median <= 1.1 * SAME and traces == 1,
            f"{traces} trace" + "s" * (traces != 1),
        )
        bursts = {
            name: stepping(c, c.jit(c.loop), c.empty(), xs) for name, c in all_of_them.items()
        }
        yield ratio_row(f"{label}: 16 tokens, wall", race(bursts, rounds=rounds), limit=1.1)


BENCHMARK = Benchmark("Writing with a KV cache, against plain JAX", BY_HAND, rows)

if __name__ == "__main__":
    BENCHMARK.main()
