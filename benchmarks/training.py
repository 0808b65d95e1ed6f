"""Train networks of 6, 42 and 402 arrays with Adam, as a user would write it.

    python -m benchmarks.training [--quick] [--json]

Unlike in `dispatch.py`, the network computes something: layers of width 16 on batches of 32
examples. The batches are NumPy arrays, and the model and optimizer state are donated. The baseline
is the same loop by hand on flat lists. All start from the same numbers (NNX from its own), so the
losses, which are printed, must agree.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

import pytreemod
from benchmarks.libraries import OURS, installed
from benchmarks.measuring import PROCESS, WALL, Burst
from benchmarks.tables import Benchmark, Row, raced, ratio_row

JAX = "jax.jit"
WIDTH, BATCH = 16, 32
LIMITS = {3: 1.3, 21: 1.1, 201: 1.1}

Step = Callable[[np.ndarray, np.ndarray], jax.Array]
"""Takes a batch, updates its own model, and returns the loss."""


# --- the data and the network -------------------------------------------------------------------


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Points, and a smooth function of them."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=(20, BATCH, WIDTH)).astype(np.float32)
    return list(zip(points, np.sin(points[..., ::-1]), strict=True))


def run(layers: list[Callable[[jax.Array], jax.Array]], x: jax.Array) -> jax.Array:
    """Apply residual layers, so that deep networks learn, too."""
    for layer in layers:
        x = x + jnp.tanh(layer(x)) / len(layers)
    return x


def squared_error(y: jax.Array, target: jax.Array) -> jax.Array:
    """A scalar."""
    return jnp.mean((y - target) ** 2)


def optimizer() -> optax.GradientTransformation:
    """The optimizer of all contenders."""
    return optax.adam(3e-3)


# --- contenders: each returns a step, which updates its own model ---------------------------------


def flat(depth: int) -> Step:
    """`jax.jit` on flat lists, by hand."""
    adam = optimizer()
    arrays = [jnp.copy(leaf) for leaf in jtu.tree_leaves(filtering_model(pytreemod, depth))]
    leaves, structure = jtu.tree_flatten(adam.init(arrays))

    def loss_fn(arrays: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        layers = [partial(lambda w, b, x: w @ x + b, w, b) for w, b in pairs]
        return squared_error(jax.vmap(partial(run, layers))(x), y)

    @partial(jax.jit, donate_argnums=(0, 1))
    def work(arrays: Any, leaves: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(arrays, x, y)
        updates, opt_state = adam.update(grads, jtu.tree_unflatten(structure, leaves), arrays)
        return optax.apply_updates(arrays, updates), jtu.tree_leaves(opt_state), loss

    def step(x: np.ndarray, y: np.ndarray) -> jax.Array:
        nonlocal arrays, leaves
        arrays, leaves, loss = work(arrays, leaves, x, y)
        return loss

    return step


def filtering_model(library: Any, depth: int) -> Any:
    """The model in Equinox or pytreemod; both draw the same numbers from a key."""

    class Network(library.Module):
        layers: list[Any]

        def __init__(self):
            keys = jax.random.split(jax.random.key(0), depth)
            self.layers = [library.nn.Linear(WIDTH, WIDTH, key=key) for key in keys]

        def __call__(self, x: jax.Array) -> jax.Array:
            return run(self.layers, x)

    return Network()


def filtering(library: Any, depth: int) -> Step:
    """The step in Equinox or pytreemod."""
    adam, model = optimizer(), filtering_model(library, depth)
    opt_state = adam.init(library.filter(model, library.is_inexact_array))

    def loss_fn(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return squared_error(jax.vmap(model)(x), y)

    # The batch is first, because Equinox donates all arguments, or all but the first.
    donate = ("model", "opt_state") if library is pytreemod else "all-except-first"

    @library.filter_jit(donate=donate)
    def work(batch: Any, model: Any, opt_state: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = library.filter_value_and_grad(loss_fn)(model, *batch)
        updates, opt_state = adam.update(grads, opt_state, model)
        return library.apply_updates(model, updates), opt_state, loss

    def step(x: np.ndarray, y: np.ndarray) -> jax.Array:
        nonlocal model, opt_state
        model, opt_state, loss = work((x, y), model, opt_state)
        return loss

    return step


def nnx_model(nnx: Any, depth: int) -> Any:
    """The model in NNX."""

    class Network(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(depth)])

        def __call__(self, x: jax.Array) -> jax.Array:
            return run(self.layers, x)

    return Network()


def nnx_step(nnx: Any, depth: int) -> Step:
    """The step in NNX."""
    model = nnx_model(nnx, depth)
    adam = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    def loss_fn(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return squared_error(model(x), y)

    @partial(nnx.jit, donate_argnums=(0, 1))
    def work(model: Any, adam: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
        adam.update(model, grads)
        return loss

    return lambda x, y: work(model, adam, x, y)


def makers() -> dict[str, Callable[[int], Step]]:
    """The function that makes a step, by contender."""
    found: dict[str, Callable[[int], Step]] = {JAX: flat}
    for name, library in installed().items():
        found[name] = partial(nnx_step if name == "NNX" else filtering, library)
    return found


# --- the table ----------------------------------------------------------------------------------


def stepping(step: Step, clock: Callable[[], float]) -> Burst:
    """Run training steps."""
    data = cycle(batches())

    def burst(number: int) -> float:
        began = clock()
        for _ in range(number):
            loss = step(*next(data))
        loss.block_until_ready()
        return clock() - began

    return burst


def learned(step: Step, steps: int) -> tuple[float, float]:
    """The loss of the first step, and of the last."""
    losses = [step(*batch) for batch, _ in zip(cycle(batches()), range(steps), strict=False)]
    return float(losses[0]), float(losses[-1])


def seconds_to_first_loss(make: Callable[[int], Step], depth: int) -> float:
    """Seconds of the first step, with tracing and compiling."""
    step, batch = make(depth), batches()[0]
    began = PROCESS()
    step(*batch).block_until_ready()
    return PROCESS() - began


def loss_row(label: str, losses: dict[str, tuple[float, float]]) -> Row:
    """A row with the first and the last losses."""
    texts = {name: f"{first:.4f} -> {last:.4f}" for name, (first, last) in losses.items()}
    agree = np.allclose(losses[OURS], losses[JAX], rtol=1e-3)
    return Row(
        label, "", texts, {**losses}, target="same", met=bool(agree), note=f"{JAX}: {texts[JAX]}"
    )


def rows(quick: bool) -> Iterator[Row]:
    """For each size, the losses, the time of a step, and the time until the first loss."""
    depths, rounds, first_rounds, learning = (
        ((3,), 4, 2, 20) if quick else ((3, 21, 201), 40, 3, 200)
    )
    for depth in depths:
        size = f"{2 * depth} arrays"
        steps = {name: make(depth) for name, make in makers().items()}
        losses = {name: learned(step, learning) for name, step in steps.items()}
        yield loss_row(f"loss in {learning} steps, {size}", losses)
        for clock, what, limit in ((PROCESS, "CPU", LIMITS[depth]), (WALL, "wall", None)):
            bursts = {name: stepping(step, clock) for name, step in steps.items()}
            yield raced(f"one step, {what}, {size}", bursts, rounds=rounds, limit=limit)
        first: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(first_rounds):
            for name, make in makers().items():
                first[name].append(seconds_to_first_loss(make, depth))
        yield ratio_row(f"until the first loss, {size}", first)


BENCHMARK = Benchmark("Training, against the same by hand on flat lists", JAX, rows)

if __name__ == "__main__":
    BENCHMARK.main()
