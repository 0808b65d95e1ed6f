"""The memory of a donated training step on a model of 100 MB.

    python -m benchmarks.memory [--quick] [--json]

There are two measurements. XLA reports the peak memory of the compiled program: arguments, results
and temporaries, minus the results that reuse the memory of arguments. JAX lists the live arrays
between two steps of a loop, and after the model was dropped. The baseline is `jax.jit` on flat
lists, with `donate_argnums`.

Memory has no noise: if the numbers differ, something holds on to arrays. Live arrays are the model,
the two moments of Adam, its counter, the batch, and the loss.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax

from benchmarks.libraries import FILTERING, OURS, installed
from benchmarks.tables import Benchmark, Row

JAX = "jax.jit"
MB = 1e6
LAYERS, WIDTH, BATCH = 25, 1000, 8
SLACK = 64
"""A few bytes, because a program with other arguments may order its scalars differently."""

Step = Callable[[Any, Any, jax.Array, jax.Array], tuple[Any, Any, jax.Array]]


@dataclass(frozen=True)
class Setting:
    """The model and the training step of one library."""

    step: Step
    make: Callable[[], tuple[Any, Any]]
    """Makes the model and the optimizer's state."""
    compiled: Callable[[Any, Any, jax.Array, jax.Array], Any]


def squared_error(layers: list[tuple[jax.Array, jax.Array]], x: jax.Array, y: jax.Array) -> Any:
    """The mean squared error of the network's output."""
    for weight, bias in layers:
        x = jnp.tanh(x @ weight.T + bias)
    return jnp.mean((x - y) ** 2)


def flat(width: int) -> Setting:
    """`jax.jit` on flat lists."""
    optimizer = optax.adam(1e-3)

    def make() -> tuple[Any, Any]:
        arrays = [jnp.zeros(s) for _ in range(LAYERS) for s in ((width, width), (width,))]
        return arrays, jtu.tree_leaves(optimizer.init(arrays))

    structure = jtu.tree_structure(optimizer.init([jnp.zeros(())] * (2 * LAYERS)))

    def loss(arrays: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        return squared_error(list(zip(arrays[::2], arrays[1::2], strict=True)), x, y)

    def step(arrays: Any, leaves: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(arrays, x, y)
        opt_state = jtu.tree_unflatten(structure, leaves)
        updates, opt_state = optimizer.update(grads, opt_state, arrays)
        return optax.apply_updates(arrays, updates), jtu.tree_leaves(opt_state), value

    jitted = jax.jit(step, donate_argnums=(0, 1))
    return Setting(jitted, make, lambda *args: jitted.lower(*args).compile())


def filtered(name: str, library: Any, width: int) -> Setting:
    """Equinox or pytreemod."""
    optimizer = optax.adam(1e-3)

    class Affine(library.Module):
        weight: jax.Array
        bias: jax.Array

    class Network(library.Module):
        layers: list[Affine]

    def make() -> tuple[Any, Any]:
        layers = [Affine(jnp.zeros((width, width)), jnp.zeros(width)) for _ in range(LAYERS)]
        model = Network(layers)
        return model, optimizer.init(library.filter(model, library.is_inexact_array))

    def loss(model: Network, x: jax.Array, y: jax.Array) -> jax.Array:
        return squared_error([(layer.weight, layer.bias) for layer in model.layers], x, y)

    def work(x: jax.Array, y: jax.Array, model: Any, opt_state: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = library.filter_value_and_grad(loss)(model, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        return library.apply_updates(model, updates), opt_state, value

    if name == OURS:
        jitted = library.filter_jit(work, donate=("model", "opt_state"))
    else:
        # Equinox donates all arguments, or all but the first, so the batch is the first.
        jitted = library.filter_jit(
            lambda batch, *rest: work(*batch, *rest), donate="all-except-first"
        )

    def arguments(model: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, ...]:
        return (x, y, model, opt_state) if name == OURS else ((x, y), model, opt_state)

    def compiled(*args: Any) -> Any:
        made = jitted.lower(*arguments(*args)).compile()
        return getattr(made, "compiled", made)

    return Setting(lambda *args: jitted(*arguments(*args)), make, compiled)


def live_bytes() -> int:
    """The bytes of all arrays that are not deleted or donated."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


@dataclass(frozen=True)
class Usage:
    """The measurements, in bytes."""

    peak: int
    temporary: int
    """The share of the peak that is neither argument nor result."""
    live: int
    """Between two steps of the loop."""
    left: int
    """After the model was dropped."""


def usage(setting: Setting, width: int, steps: int) -> Usage:
    """Compile, then run a few steps."""
    before = live_bytes()
    batch = jnp.ones((BATCH, width)), jnp.zeros((BATCH, width))
    model, opt_state = setting.make()
    stats = setting.compiled(model, opt_state, *batch).memory_analysis()
    peak = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )
    live = 0
    for _ in range(steps):
        model, opt_state, loss = setting.step(model, opt_state, *batch)
        loss.block_until_ready()
        live = max(live, live_bytes() - before)
    del model, opt_state, loss, batch
    return Usage(peak, stats.temp_size_in_bytes, live, live_bytes() - before)


def megabytes(number: int) -> str:
    return f"{number / MB:.1f} MB"


LABELS = {
    "peak": "peak of the compiled step",
    "temporary": "of which temporaries",
    "live": "live arrays between two steps",
    "left": "live arrays after the model was dropped",
}


def rows(quick: bool) -> Iterator[Row]:
    """A row for each measurement."""
    width = 100 if quick else WIDTH
    settings = {JAX: flat(width)}
    for name, library in installed(*FILTERING).items():
        settings[name] = filtered(name, library, width)
    used = {name: usage(setting, width, 2 if quick else 4) for name, setting in settings.items()}
    for field, label in LABELS.items():
        values = {name: getattr(usage, field) for name, usage in used.items()}
        yield Row(
            label,
            megabytes(values[JAX]),
            {name: megabytes(value) for name, value in values.items() if name != JAX},
            {name: {"bytes": value} for name, value in values.items()},
            target="equal",
            met=abs(values[OURS] - values[JAX]) <= SLACK,
        )


BENCHMARK = Benchmark("Memory of a donated training step, against flat jax.jit", JAX, rows)

if __name__ == "__main__":
    BENCHMARK.main()
