"""Train networks of 6, 42 and 402 arrays, with a different optimizer for each third of the layers.

    python -m benchmarks.optimizers [--quick] [--json]

The networks and the data are those of `training.py`. The baseline is written by hand on flat lists:
it calls each optimizer with the list of its arrays. Equinox and NNX have no optimizer for groups,
so they use `optax.multi_transform`; a further column uses it with pytreemod. All start from the
same numbers (NNX from its own), so the losses must agree.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

import pytreemod
from benchmarks.libraries import MODULES, OURS, installed
from benchmarks.measuring import PROCESS, WALL, race
from benchmarks.tables import Benchmark, Row, ratio_row
from benchmarks.training import (
    JAX,
    LIMITS,
    Step,
    filtering_model,
    learned,
    loss_row,
    nnx_model,
    run,
    squared_error,
    stepping,
)

MULTI = "multi_transform"
GROUPS = 3


def optimizers() -> list[optax.GradientTransformation]:
    """One optimizer for each third."""
    return [optax.adam(3e-3), optax.adam(1e-3), optax.sgd(3e-3, momentum=0.9)]


def group_of(layer: int, depth: int) -> int:
    """The third that a layer is in."""
    return GROUPS * layer // depth


def labels(depth: int) -> Callable[[Any], Any]:
    """For `multi_transform`: the group of each array, from the index of the layer in its path."""

    def label(path: tuple[Any, ...], _: Any) -> int:
        steps = [getattr(key, "idx", getattr(key, "key", None)) for key in path]
        return group_of(next(step for step in steps if isinstance(step, int)), depth)

    return lambda tree: jtu.tree_map_with_path(label, tree)


def multi_transform(depth: int) -> optax.GradientTransformation:
    """optax's optimizer for groups."""
    return optax.multi_transform(dict(enumerate(optimizers())), labels(depth))


def model_loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The loss of a network that takes one example."""
    return squared_error(jax.vmap(model)(x), y)


# --- contenders: each returns a step, which updates its own model ---------------------------------


def flat(depth: int) -> Step:
    """`jax.jit` on flat lists, by hand."""
    rules = optimizers()
    arrays = [jnp.copy(leaf) for leaf in jtu.tree_leaves(filtering_model(pytreemod, depth))]
    groups = [
        [i for i in range(len(arrays)) if group_of(i // 2, depth) == group]
        for group in range(GROUPS)
    ]
    states = [
        rule.init([arrays[i] for i in group]) for rule, group in zip(rules, groups, strict=True)
    ]
    leaves, structure = jtu.tree_flatten(states)

    def loss_fn(arrays: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        layers = [partial(lambda w, b, x: w @ x + b, w, b) for w, b in pairs]
        return squared_error(jax.vmap(partial(run, layers))(x), y)

    @partial(jax.jit, donate_argnums=(0, 1))
    def work(arrays: Any, leaves: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(arrays, x, y)
        states, news = jtu.tree_unflatten(structure, leaves), []
        made = list(arrays)
        for rule, group, state in zip(rules, groups, states, strict=True):
            mine = [arrays[i] for i in group]
            updates, new = rule.update([grads[i] for i in group], state, mine)
            news.append(new)
            for i, array in zip(group, optax.apply_updates(mine, updates), strict=True):
                made[i] = array
        return made, jtu.tree_leaves(news), loss

    def step(x: np.ndarray, y: np.ndarray) -> jax.Array:
        nonlocal arrays, leaves
        arrays, leaves, loss = work(arrays, leaves, x, y)
        return loss

    return step


def filtering(library: Any, depth: int) -> Step:
    """Equinox or pytreemod, with `multi_transform`."""
    rule, model = multi_transform(depth), filtering_model(library, depth)
    opt_state = rule.init(library.filter(model, library.is_inexact_array))
    # The batch is first, because Equinox donates all arguments, or all but the first.
    donate = ("model", "opt_state") if library is pytreemod else "all-except-first"

    @library.filter_jit(donate=donate)
    def work(batch: Any, model: Any, opt_state: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = library.filter_value_and_grad(model_loss)(model, *batch)
        updates, opt_state = rule.update(grads, opt_state, model)
        return library.apply_updates(model, updates), opt_state, loss

    def step(x: np.ndarray, y: np.ndarray) -> jax.Array:
        nonlocal model, opt_state
        model, opt_state, loss = work((x, y), model, opt_state)
        return loss

    return step


def ours(depth: int) -> Step:
    """pytreemod, as its users write it."""
    first, second, third = optimizers()
    model = filtering_model(pytreemod, depth)
    ends = [next(i for i in range(depth) if group_of(i, depth) == group) for group in (1, 2)]
    rules = pytreemod.by(
        {
            pytreemod.select.at(lambda m: m.layers[: ends[0]]): first,
            pytreemod.select.at(lambda m: m.layers[ends[0] : ends[1]]): second,
            ...: third,
        }
    )
    opt = pytreemod.Optimizer(rules).init(model)

    @pytreemod.filter_jit(donate=("model", "opt"))
    def work(model: Any, opt: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = pytreemod.filter_value_and_grad(model_loss)(model, x, y)
        model, opt = opt.update(model, grads=grads)
        return model, opt, loss

    def step(x: np.ndarray, y: np.ndarray) -> jax.Array:
        nonlocal model, opt
        model, opt, loss = work(model, opt, x, y)
        return loss

    return step


def nnx_step(nnx: Any, depth: int) -> Step:
    """NNX, with `multi_transform` in its optimizer."""
    model = nnx_model(nnx, depth)
    optimizer = nnx.Optimizer(model, multi_transform(depth), wrt=nnx.Param)

    def loss_fn(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return squared_error(model(x), y)

    @partial(nnx.jit, donate_argnums=(0, 1))
    def work(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
        optimizer.update(model, grads)
        return loss

    return lambda x, y: work(model, optimizer, x, y)


def makers() -> dict[str, Callable[[int], Step]]:
    """The function that makes a step, by contender."""
    found: dict[str, Callable[[int], Step]] = {JAX: flat, MULTI: partial(filtering, pytreemod)}
    for name, library in installed("Equinox", "NNX").items():
        found[name] = partial(nnx_step if name == "NNX" else filtering, library)
    return {**found, OURS: ours}


# --- the table ----------------------------------------------------------------------------------


def rows(quick: bool) -> Iterator[Row]:
    """For each size, the losses and the time of a step."""
    depths, rounds, learning = ((3,), 4, 20) if quick else ((3, 21, 201), 40, 200)
    for depth in depths:
        size = f"{2 * depth} arrays"
        steps = {name: make(depth) for name, make in makers().items()}
        yield loss_row(
            f"loss in {learning} steps, {size}",
            {name: learned(step, learning) for name, step in steps.items()},
        )
        times = {
            clock: race({n: stepping(step, clock) for n, step in steps.items()}, rounds=rounds)
            for clock in (PROCESS, WALL)
        }
        yield ratio_row(f"one step, CPU, {size}", times[PROCESS], limit=LIMITS[depth])
        yield ratio_row(f"one step, wall, {size}", times[WALL])
        beside = {name: times[PROCESS][name] for name in (MULTI, OURS)}
        yield ratio_row(f"CPU, against {MULTI}, {size}", beside, limit=1)


BENCHMARK = Benchmark(
    "Training with an optimizer for each of three groups, against the same by hand on flat lists",
    JAX,
    rows,
    heads=[MULTI, *(name for name in MODULES)],
)

if __name__ == "__main__":
    BENCHMARK.main()
