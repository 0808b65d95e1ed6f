"""The cost of an optimizer that sees the layers of a Stack and the members of an Ensemble.

    python -m benchmarks.layered_rules [--quick] [--json]

The baseline of an elementwise rule is the same optimizer with `stacked="as one"`, which sees the
stacked arrays; both compile to the same program. Muon needs the matrix of each layer. Its baselines
are written by hand: optax's Muon under `jax.vmap`, and its formulas on stacked matrices.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import pytreemod as pm
from benchmarks.libraries import OURS
from benchmarks.measuring import CALLER, PROCESS, WALL, Burst, clocked, repeating, tidied
from benchmarks.programs import Program, comparison, require_same_numbers
from benchmarks.tables import Benchmark, Row, raced
from pytreemod import nn

AS_ONE, PER_LAYER, STACK = "as one", "per layer", "a Stack"
BASELINE = "without"
RULES = {"adamw": optax.adamw(1e-3), "sgd with momentum": optax.sgd(1e-2, momentum=0.9)}
LEARNING_RATE, BETA = 1e-2, 0.95
GROWTH = 1.1
"""How much longer the program of many layers may take to compile than that of two."""

Matrices = dict[str, jax.Array]


# --- models ---------------------------------------------------------------------------------------


class Block(pm.Module):
    """Two matrices; it is never called."""

    square: jax.Array
    wide: jax.Array

    def __init__(self, width: int, *, key: jax.Array):
        shapes = ((width, width), (width, 4 * width))
        keys = jax.random.split(key)
        self.square, self.wide = map(jax.random.normal, keys, shapes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Not used."""
        return x


def make_blocks(depth: int, width: int) -> nn.Stack:
    """Blocks as a Stack."""
    return nn.Stack(lambda key: Block(width, key=key), depth, key=jax.random.key(0))


def linears(depth: int) -> list[nn.Linear]:
    """Layers in a list."""
    return [nn.Linear(8, 8, key=key) for key in jax.random.split(jax.random.key(0), depth)]


def holders(depth: int) -> dict[str, Any]:
    """The same layers in a list, a Stack, an Ensemble, and an Ensemble of Stacks."""
    layers = linears(depth)
    members = [nn.Stack.from_layers(linears(depth)) for _ in range(2)]
    return {
        "a list": layers,
        STACK: nn.Stack.from_layers(layers),
        "an Ensemble": nn.Ensemble.from_members(layers),
        "an Ensemble of Stacks": nn.Ensemble.from_members(members),
    }


# --- steps ----------------------------------------------------------------------------------------


def step(model: Any, opt: pm.Optimizer, grads: Any) -> Any:
    """The step that is measured, compiled or not."""
    return opt.update(model, grads)


def start(rule: Any, model: Any, stacked: str = PER_LAYER) -> tuple[Any, pm.Optimizer, Any]:
    """The arguments of a step."""
    opt = pm.Optimizer(rule, stacked=stacked).init(model)
    return model, opt, jax.tree.map(jnp.sin, model)


def orthogonal(x: jax.Array) -> jax.Array:
    """Newton-Schulz with optax's coefficients, on stacked matrices."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)

    def improve(_: int, x: jax.Array) -> jax.Array:
        gram = x @ x.mT
        return a * x + (b * gram + c * gram @ gram) @ x

    return jax.lax.fori_loop(0, 5, improve, x)


@jax.jit
def muon_by_hand(
    model: Matrices, momentum: Matrices, count: jax.Array, grads: Matrices
) -> tuple[Matrices, Matrices, jax.Array]:
    """A step on a dict of stacked matrices."""
    count = count + 1

    def direction(m: jax.Array, g: jax.Array) -> jax.Array:
        ahead = BETA * m / (1 - BETA ** (count + 1)) + (1 - BETA) * g / (1 - BETA**count)
        height, width = m.shape[-2:]
        return orthogonal(ahead) * max(1, width / height) ** 0.5

    momentum = jax.tree.map(lambda m, g: BETA * m + (1 - BETA) * g, momentum, grads)
    found = jax.tree.map(direction, momentum, grads)
    return jax.tree.map(lambda x, u: x - LEARNING_RATE * u, model, found), momentum, count


Call = tuple[Any, Any]


def started(rule: Any, model: Any, stacked: str = PER_LAYER) -> Call:
    """A compiled step and its arguments."""
    return jax.jit(step), start(rule, model, stacked)


def running(call: Call) -> Burst:
    """Call the compiled function, in wall time."""
    fn, args = call
    return clocked(WALL, lambda: fn(*args))


def batched_muon() -> Any:
    """optax's Muon for stacked matrices: the layer axes are batch axes."""
    numbers = optax.contrib.MuonDimensionNumbers(-2, -1)
    axes = partial(jax.tree.map, lambda _: numbers)
    return optax.contrib.muon(LEARNING_RATE, muon_weight_dimension_numbers=axes)


def mapped_by_hand(rule: Any, model: Matrices, grads: Matrices) -> Call:
    """optax's Muon under `jax.vmap`, with one count for all layers."""
    state = rule.init(jax.tree.map(lambda x: x[0], model))
    axes = jax.tree.map(lambda x: 0 if x.ndim == 2 else None, state)
    state = jax.vmap(rule.init, out_axes=axes)(model)
    update = jax.vmap(rule.update, in_axes=(0, axes, 0), out_axes=(0, axes))

    @jax.jit
    def work(model: Matrices, state: Any, grads: Matrices) -> Any:
        updates, state = update(grads, state, model)
        return optax.apply_updates(model, updates), state

    return work, (model, state, grads)


# --- rows -----------------------------------------------------------------------------------------


def program_rows(depth: int) -> Iterator[Row]:
    """The compiled programs of elementwise rules."""
    for name, rule in RULES.items():
        for holder, model in holders(depth).items():
            programs = [
                Program.of(jax.jit(step).lower(*start(rule, model, stacked)).compile())
                for stacked in (PER_LAYER, AS_ONE)
            ]
            yield comparison(f"{name}, {holder}: operations", *programs)


def muon_rows(depth: int, width: int, rounds: int) -> Iterator[Row]:
    """A step of Muon, against optax's Muon under `vmap`, and against batched matrix products."""
    rule, stack = optax.contrib.muon(LEARNING_RATE), make_blocks(depth, width)
    ours = started(rule, stack)
    batched = started(batched_muon(), stack, AS_ONE)
    model, grads = ({"square": t.layer.square, "wide": t.layer.wide} for t in (stack, ours[1][2]))
    mapped = mapped_by_hand(rule, model, grads)
    by_hand = muon_by_hand, (model, jax.tree.map(jnp.zeros_like, model), jnp.zeros((), int), grads)
    label = f"muon, {depth} x {width} x ({width} and {4 * width})"
    for fn, args in (ours, batched, mapped):
        require_same_numbers(label, fn(*args)[0], muon_by_hand(*by_hand[1])[0])
    for against, one, two, limit in (
        ("mapped by hand", mapped, ours, 1.1),
        ("batched by hand", by_hand, ours, None),
        ("as one with batch axes, batched", by_hand, batched, 1.1),
    ):
        bursts = dict(zip((BASELINE, OURS), map(running, (one, two)), strict=True))
        yield raced(f"{label}, {against}", bursts, rounds=rounds, limit=limit)


def equations(jaxpr: Any) -> int:
    """The number of equations, including nested ones."""
    inner = jax.tree.leaves([e.params for e in jaxpr.eqns], is_leaf=lambda x: hasattr(x, "jaxpr"))
    found = [getattr(value, "jaxpr", value) for value in inner]
    return len(jaxpr.eqns) + sum(equations(value) for value in found if hasattr(value, "eqns"))


def compiling(args: Any) -> Burst:
    """Trace and compile."""

    def compile_() -> None:
        # A new function each time, because JAX caches programs.
        jax.jit(lambda *a: step(*a)).lower(*args).compile()

    return tidied(clocked(PROCESS, compile_))


def depth_rows(depths: Sequence[int], width: int, rounds: int) -> Iterator[Row]:
    """Check that Muon's program does not grow with the number of layers."""
    few, *more = (start(optax.contrib.muon(LEARNING_RATE), make_blocks(n, width)) for n in depths)

    for depth, args in zip(depths[1:], more, strict=True):
        label = f"muon, {depth} layers, against {depths[0]}"
        sizes = [equations(jax.make_jaxpr(step)(*each).jaxpr) for each in (few, args)]
        yield Row(
            f"{label}: equations",
            str(sizes[0]),
            {OURS: str(sizes[1])},
            dict(zip((BASELINE, OURS), sizes, strict=True)),
            target="equal",
            met=sizes[0] == sizes[1],
        )
        bursts = {BASELINE: compiling(few), OURS: compiling(args)}
        yield raced(f"{label}: compiling", bursts, rounds=rounds, limit=GROWTH)


def eager(args: Any) -> Burst:
    """A step outside of `jit`."""
    return repeating(lambda: step(*args))


def tracing(args: Any) -> Burst:
    """The part of compiling that Python does."""
    return tidied(clocked(CALLER, lambda: jax.make_jaxpr(lambda *a: step(*a))(*args) and None))


def overhead_rows(depths: Sequence[int], rounds: int) -> Iterator[Row]:
    """The time in Python: of a step outside of `jit`, and of tracing."""
    for depth in depths:
        layers = linears(depth)
        stack = nn.Stack.from_layers(layers)
        for holder, model in ((f"a list of {2 * depth} arrays", layers), (STACK, stack)):
            for name, rule in RULES.items():
                args = [start(rule, model, how) for how in (AS_ONE, PER_LAYER)]
                for what, burst in (("eagerly", eager), ("tracing", tracing)):
                    bursts = dict(zip((BASELINE, OURS), map(burst, args), strict=True))
                    label = f"{name}, {holder}, {what}"
                    yield raced(label, bursts, rounds=rounds, limit=1.1 if model is stack else 1)


def rows(quick: bool) -> Iterator[Row]:
    """Programs, then times of Muon, then time in Python."""
    rounds = 4 if quick else 20
    yield from program_rows(2 if quick else 12)
    yield from muon_rows(2 if quick else 12, 16 if quick else 128, rounds)
    yield from depth_rows((2, 3) if quick else (2, 12, 24), 16, rounds)
    yield from overhead_rows((3,) if quick else (3, 21), rounds)


BENCHMARK = Benchmark(
    "An optimizer that sees layers, against one that does not, or Muon by hand",
    BASELINE,
    rows,
    heads=[OURS],
)

if __name__ == "__main__":
    BENCHMARK.main()
