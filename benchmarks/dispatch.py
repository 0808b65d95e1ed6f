"""The time to call a compiled function on a model.

    python -m benchmarks.dispatch            # the whole table, a few minutes
    python -m benchmarks.dispatch --quick    # small models, few rounds: a smoke test
    python -m benchmarks.dispatch --json     # all numbers, as JSON

Measures JAX on a flat list of arrays, Equinox, Flax NNX and pytreemod in one process, in turns. The
arrays are tiny, so the time is spent between Python and the compiled program, not in the program.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax

from benchmarks.libraries import OURS, installed
from benchmarks.measuring import CALLER, WALL, Burst, no_garbage_collection
from benchmarks.networks import (
    WIDTH,
    apply_flat,
    counting_network,
    flat_arrays,
    network_class,
    nnx_counting_network,
    squared_error,
    vector,
)
from benchmarks.tables import Benchmark, Row, raced, ratio_row

LONG_SIZE = 256

Step = Callable[..., Any]


# --- bursts: the loops that are timed ------------------------------------------------------------


Read = Callable[[Any], jax.Array]


def caller_seconds(began: float, array: jax.Array) -> float:
    """Seconds since `began`. Then wait, untimed, so that no burst leaves work to the next.

    It is enough to wait for one array of a computation's result.
    """
    seconds = CALLER() - began
    array.block_until_ready()
    return seconds


def feeding(step: Step, model: Any, last: Read) -> Burst:
    """Repeat `model = step(model)`."""

    def burst(number: int) -> float:
        nonlocal model
        began = CALLER()
        for _ in range(number):
            model = step(model)
        seconds = CALLER() - began
        # Not timed: other rows measure the time to read a field.
        last(model).block_until_ready()
        return seconds

    return burst


def feeding_and_reading(step: Step, model: Any, last: Read) -> Burst:
    """The same, and read one array of each model."""

    def burst(number: int) -> float:
        nonlocal model
        began = CALLER()
        for _ in range(number):
            model = step(model)
            array = last(model)
        return caller_seconds(began, array)

    return burst


def feeding_both(step: Step, model: Any, state: Any, last: Read) -> Burst:
    """Repeat `model, state = step(model, state)`."""

    def burst(number: int) -> float:
        nonlocal model, state
        began = CALLER()
        for _ in range(number):
            model, state = step(model, state)
        seconds = CALLER() - began
        last(model).block_until_ready()
        return seconds

    return burst


def changing(step: Step, model: Any, last: Read) -> Burst:
    """Repeat `step(model)`, which changes the model in place and returns nothing."""

    def burst(number: int) -> float:
        began = CALLER()
        for _ in range(number):
            step(model)
        seconds = CALLER() - began
        last(model).block_until_ready()
        return seconds

    return burst


def changing_and_reading(step: Step, model: Any, last: Read) -> Burst:
    """The same, and read one array of the model each time."""

    def burst(number: int) -> float:
        began = CALLER()
        for _ in range(number):
            step(model)
            array = last(model)
        return caller_seconds(began, array)

    return burst


def training(step: Step, model: Any, opt_state: Any, *batch: jax.Array) -> Burst:
    """Repeat `model, opt_state, loss = step(model, opt_state, x, y)`."""

    def burst(number: int) -> float:
        nonlocal model, opt_state
        began = CALLER()
        for _ in range(number):
            model, opt_state, loss = step(model, opt_state, *batch)
        return caller_seconds(began, loss)

    return burst


def calling(function: Step, *args: Any) -> Burst:
    """Call with the same arguments each time; the result is an array."""

    def burst(number: int) -> float:
        began = CALLER()
        for _ in range(number):
            out = function(*args)
        return caller_seconds(began, out)

    return burst


# --- computations: the same for all contenders ---------------------------------------------------


def negate(tree: Any) -> Any:
    """An update that never overflows, vanishes or converges, however often it is repeated."""
    return jtu.tree_map(jnp.negative, tree)


def multiply(x: jax.Array, bias: jax.Array, times: jax.Array) -> jax.Array:
    """Multiply a matrix by itself `times` times."""
    return jax.lax.fori_loop(0, times, lambda _, a: jnp.tanh(a @ a + bias), x)


def matrix() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (LONG_SIZE, LONG_SIZE))


# --- contenders ---------------------------------------------------------------------------------


def negate_both(model: Any, state: Any) -> tuple[Any, Any]:
    """A step that writes all of its State, as a layer does: the library notes the successor."""
    for layer in model.layers:
        state = state.set(layer.count, -state.get(layer.count))
    return negate(model), state


class Contender(Protocol):
    """How one library does each of the measured things."""

    name: str

    def update(self, depth: int) -> Burst: ...
    def update_donated(self, depth: int) -> Burst: ...
    def update_all_donated(self, depth: int) -> Burst: ...
    def update_and_read(self, depth: int) -> Burst: ...
    def update_both(self, depth: int) -> Burst: ...
    def forward(self, depth: int) -> Burst: ...
    def train(self, depth: int) -> Burst: ...
    def long_call(self, times: jax.Array) -> Callable[[], jax.Array]: ...


class PlainJax:
    """`jax.jit` on a flat list of the arrays: the fastest call on this many arrays."""

    name = "jax.jit"

    @staticmethod
    def last(arrays: list[jax.Array]) -> jax.Array:
        return arrays[-1]

    def update(self, depth: int) -> Burst:
        return feeding(jax.jit(negate), flat_arrays(depth), self.last)

    def update_donated(self, depth: int) -> Burst:
        return feeding(jax.jit(negate, donate_argnums=0), flat_arrays(depth), self.last)

    def update_all_donated(self, depth: int) -> Burst:
        return self.update_donated(depth)

    def update_and_read(self, depth: int) -> Burst:
        return feeding_and_reading(jax.jit(negate), flat_arrays(depth), self.last)

    def update_both(self, depth: int) -> Burst:
        step = jax.jit(lambda weights, counts: (negate(weights), negate(counts)))
        weights, counts = ([jnp.ones(WIDTH) for _ in range(depth)] for _ in range(2))
        return feeding_both(step, weights, counts, self.last)

    def forward(self, depth: int) -> Burst:
        return calling(jax.jit(apply_flat), flat_arrays(depth), vector())

    def train(self, depth: int) -> Burst:
        optimizer = optax.adam(1e-3)
        arrays = flat_arrays(depth)
        opt_leaves, opt_structure = jtu.tree_flatten(optimizer.init(arrays))

        def loss_fn(arrays: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
            return squared_error(apply_flat(arrays, x), y)

        @jax.jit
        def step(
            arrays: list[jax.Array], opt_leaves: list[jax.Array], x: jax.Array, y: jax.Array
        ) -> tuple[Any, ...]:
            loss, grads = jax.value_and_grad(loss_fn)(arrays, x, y)
            opt_state = jtu.tree_unflatten(opt_structure, opt_leaves)
            updates, opt_state = optimizer.update(grads, opt_state, arrays)
            return optax.apply_updates(arrays, updates), jtu.tree_leaves(opt_state), loss

        return training(step, arrays, opt_leaves, vector(), vector())

    def long_call(self, times: jax.Array) -> Callable[[], jax.Array]:
        function = jax.jit(lambda arrays, x, times: multiply(x, arrays[1][0], times))
        return partial(function, flat_arrays(3), matrix(), times)


class FilterLibrary:
    """Equinox, and pytreemod under the same names."""

    def __init__(self, name: str, library: Any):
        self.name = name
        self.library = library
        self.network_class = network_class(name, library)

    def network(self, depth: int) -> Any:
        return self.network_class(depth)

    @staticmethod
    def last(model: Any) -> jax.Array:
        return model.layers[-1].bias

    def update(self, depth: int) -> Burst:
        return feeding(self.library.filter_jit(negate), self.network(depth), self.last)

    def update_donated(self, depth: int) -> Burst:
        # Equinox cannot donate one argument by name.
        donate = "tree" if self.name == OURS else "all"
        step = self.library.filter_jit(negate, donate=donate)
        return feeding(step, self.network(depth), self.last)

    def update_all_donated(self, depth: int) -> Burst:
        step = self.library.filter_jit(negate, donate="all")
        return feeding(step, self.network(depth), self.last)

    def update_and_read(self, depth: int) -> Burst:
        step = self.library.filter_jit(negate)
        return feeding_and_reading(step, self.network(depth), self.last)

    def update_both(self, depth: int) -> Burst:
        step = self.library.filter_jit(negate_both)
        model, state = counting_network(self.library, depth)
        return feeding_both(step, model, state, lambda model: model.layers[-1].weight)

    def forward(self, depth: int) -> Burst:
        function = self.library.filter_jit(lambda model, x: model(x))
        return calling(function, self.network(depth), vector())

    def train(self, depth: int) -> Burst:
        library, optimizer = self.library, optax.adam(1e-3)
        model = self.network(depth)
        opt_state = optimizer.init(library.filter(model, library.is_inexact_array))

        def loss_fn(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            return squared_error(model(x), y)

        @library.filter_jit
        def step(model: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, ...]:
            loss, grads = library.filter_value_and_grad(loss_fn)(model, x, y)
            updates, opt_state = optimizer.update(grads, opt_state, model)
            return library.apply_updates(model, updates), opt_state, loss

        return training(step, model, opt_state, vector(), vector())

    def long_call(self, times: jax.Array) -> Callable[[], jax.Array]:
        function = self.library.filter_jit(
            lambda model, x, times: multiply(x, model.layers[0].bias[0], times)
        )
        return partial(function, self.network(3), matrix(), times)


class Nnx:
    """Flax NNX as its documentation writes it: `nnx.jit`, and the model changes in place."""

    def __init__(self, name: str, nnx: Any):
        self.name = name
        self.nnx = nnx
        self.network_class = network_class(name, nnx)

    def network(self, depth: int) -> Any:
        return self.network_class(depth)

    @staticmethod
    def last(model: Any) -> jax.Array:
        return model.layers[-1].bias[...]

    def negate_in_place(self, model: Any) -> None:
        self.nnx.update(model, negate(self.nnx.state(model)))

    def update(self, depth: int) -> Burst:
        return changing(self.nnx.jit(self.negate_in_place), self.network(depth), self.last)

    def update_donated(self, depth: int) -> Burst:
        step = self.nnx.jit(self.negate_in_place, donate_argnums=0)
        return changing(step, self.network(depth), self.last)

    def update_all_donated(self, depth: int) -> Burst:
        return self.update_donated(depth)

    def update_and_read(self, depth: int) -> Burst:
        step = self.nnx.jit(self.negate_in_place)
        return changing_and_reading(step, self.network(depth), self.last)

    def update_both(self, depth: int) -> Burst:
        step = self.nnx.jit(self.negate_in_place)
        model = nnx_counting_network(self.nnx, depth)
        return changing(step, model, lambda model: model.layers[-1].weight[...])

    def forward(self, depth: int) -> Burst:
        function = self.nnx.jit(lambda model, x: model(x))
        return calling(function, self.network(depth), vector())

    def train(self, depth: int) -> Burst:
        nnx = self.nnx
        model = self.network(depth)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

        def loss_fn(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            return squared_error(model(x), y)

        @nnx.jit
        def step(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
            optimizer.update(model, grads)
            return loss

        return calling(step, model, optimizer, vector(), vector())

    def long_call(self, times: jax.Array) -> Callable[[], jax.Array]:
        function = self.nnx.jit(lambda model, x, times: multiply(x, model.layers[0].bias[0], times))
        return partial(function, self.network(3), matrix(), times)


def contenders() -> list[Contender]:
    """JAX first, then the installed libraries."""
    return [
        PlainJax(),
        *(
            (Nnx if name == "NNX" else FilterLibrary)(name, lib)
            for name, lib in installed().items()
        ),
    ]


# --- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    depths: tuple[int, ...] = (3, 21, 201)
    rounds: int = 60
    long_seconds: float = 1.0
    long_rounds: int = 5


LIMITS = {3: 1.3, 21: 1.1, 201: 1.1}
"""The limit of a call that returns the tree it was given, by depth."""
LONG_LIMIT = 2.0
QUICK = Plan(depths=(3,), rounds=4, long_seconds=0.1, long_rounds=3)


@dataclass(frozen=True)
class Kind:
    """One way to call a compiled function."""

    label: str
    burst_of: Callable[[Contender, int], Burst]
    is_limited: bool = True


CALLS = (
    Kind("returns the updated model", lambda one, depth: one.update(depth)),
    Kind("the same, donated by name", lambda one, depth: one.update_donated(depth)),
    Kind('the same, donate="all"', lambda one, depth: one.update_all_donated(depth)),
    Kind("returns the updated model and State", lambda one, depth: one.update_both(depth)),
    Kind("training step with Adam", lambda one, depth: one.train(depth)),
    Kind("same model, returns an output", lambda one, depth: one.forward(depth)),
    Kind(
        "updated model, and a field is read",
        lambda one, depth: one.update_and_read(depth),
        is_limited=False,
    ),
)


def call_rows(field: Sequence[Contender], plan: Plan) -> Iterator[Row]:
    """Each kind of call, for each size of model."""
    for kind in CALLS:
        for depth in plan.depths:
            bursts = {one.name: kind.burst_of(one, depth) for one in field}
            limit = LIMITS[depth] if kind.is_limited else None
            yield raced(
                f"{kind.label}, {2 * depth} arrays", bursts, rounds=plan.rounds, limit=limit
            )


def seconds_until(call: Callable[[], jax.Array]) -> tuple[float, float]:
    """Seconds until a call returns, and until its result is ready."""
    began = WALL()
    out = call()
    returned = WALL()
    out.block_until_ready()
    return returned - began, WALL() - began


def iterations_for(seconds: float, reference: Contender) -> jax.Array:
    """How many multiplications take about `seconds` on this machine."""
    number, took = 8, 0.0
    while took < seconds / 4:
        number *= 2
        call = reference.long_call(jnp.asarray(number))
        call().block_until_ready()
        _, took = seconds_until(call)
    return jnp.asarray(round(number * seconds / took))


def long_rows(field: Sequence[Contender], plan: Plan) -> Iterator[Row]:
    """Until the call returns; and, to show how long it was, until its result is ready."""
    times = iterations_for(plan.long_seconds, field[0])
    calls = {one.name: one.long_call(times) for one in field}
    until_return: dict[str, list[float]] = {name: [] for name in calls}
    until_result: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call().block_until_ready()
    with no_garbage_collection():
        for _ in range(plan.long_rounds):
            for name, call in calls.items():
                returned, there = seconds_until(call)
                until_return[name].append(returned)
                until_result[name].append(there)
    yield ratio_row("long computation, until the call returns", until_return, limit=LONG_LIMIT)
    yield ratio_row("long computation, until its result is ready", until_result)


def rows(quick: bool) -> Iterator[Row]:
    """The whole table."""
    plan, field = QUICK if quick else Plan(), contenders()
    yield from call_rows(field, plan)
    yield from long_rows(field, plan)


BENCHMARK = Benchmark("A jitted call, against jax.jit on a flat list", PlainJax.name, rows)

if __name__ == "__main__":
    BENCHMARK.main()
