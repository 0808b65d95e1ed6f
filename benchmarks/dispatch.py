"""What it costs to call a compiled function on a model, and to take a model apart and rebuild it.

    python -m benchmarks.dispatch            # the whole table, a few minutes
    python -m benchmarks.dispatch --quick    # small models and few rounds, to see that it runs
    python -m benchmarks.dispatch --json     # every number, for a program to read

Measures JAX on a flat list of arrays, Equinox, Flax NNX and pytreemod in one process, in turns.
Nothing that is measured computes anything to speak of: the arrays are tiny, so that what is left
is the way from Python to the compiled program and back.
"""

import argparse
import importlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax

from benchmarks.measuring import Burst, Result, compare, no_garbage_collection, race

WIDTH = 4
LONG_SIZE = 256
JAX = "jax.jit"

Step = Callable[..., Any]


# --- bursts: the loops that are timed ------------------------------------------------------------


Read = Callable[[Any], jax.Array]


def waiting_for(array: jax.Array) -> float:
    """Seconds until `array` is there; it stands for all that its computation returned.

    To wait for each array would add the same to every contender, and bring all ratios near one.
    """
    began = perf_counter()
    array.block_until_ready()
    return perf_counter() - began


def feeding(step: Step, model: Any, last: Read) -> Burst:
    """`model = step(model)`, over and over."""

    def burst(number: int) -> float:
        nonlocal model
        began = perf_counter()
        for _ in range(number):
            model = step(model)
        seconds = perf_counter() - began
        # Not timed: whether it is cheap to look into the model is another row's question.
        array = last(model)
        return seconds + waiting_for(array)

    return burst


def feeding_and_reading(step: Step, model: Any, last: Read) -> Burst:
    """The same, and one array of each model is looked at."""

    def burst(number: int) -> float:
        nonlocal model
        began = perf_counter()
        for _ in range(number):
            model = step(model)
            array = last(model)
        return perf_counter() - began + waiting_for(array)

    return burst


def changing(step: Step, model: Any, last: Read) -> Burst:
    """`step(model)`, which changes the model in place and returns nothing."""

    def burst(number: int) -> float:
        began = perf_counter()
        for _ in range(number):
            step(model)
        seconds = perf_counter() - began
        array = last(model)
        return seconds + waiting_for(array)

    return burst


def changing_and_reading(step: Step, model: Any, last: Read) -> Burst:
    """The same, and one array of the model is looked at each time."""

    def burst(number: int) -> float:
        began = perf_counter()
        for _ in range(number):
            step(model)
            array = last(model)
        return perf_counter() - began + waiting_for(array)

    return burst


def training(step: Step, model: Any, opt_state: Any, *batch: jax.Array) -> Burst:
    """`model, opt_state, loss = step(model, opt_state, x, y)`, over and over."""

    def burst(number: int) -> float:
        nonlocal model, opt_state
        began = perf_counter()
        for _ in range(number):
            model, opt_state, loss = step(model, opt_state, *batch)
        return perf_counter() - began + waiting_for(loss)

    return burst


def calling(function: Step, *args: Any) -> Burst:
    """The same arguments every time; an array comes out."""

    def burst(number: int) -> float:
        began = perf_counter()
        for _ in range(number):
            out = function(*args)
        return perf_counter() - began + waiting_for(out)

    return burst


def rebuilding(tree: Any) -> Burst:
    """Flatten and unflatten."""
    flatten, unflatten = jtu.tree_flatten, jtu.tree_unflatten

    def burst(number: int) -> float:
        began = perf_counter()
        for _ in range(number):
            leaves, structure = flatten(tree)
            unflatten(structure, leaves)
        return perf_counter() - began

    return burst


# --- what is computed: the same for everybody ----------------------------------------------------


def negate(tree: Any) -> Any:
    """An update that may be repeated for ever without growing, vanishing or converging."""
    return jtu.tree_map(jnp.negative, tree)


def run(layers: Sequence[Callable[[jax.Array], jax.Array]], x: jax.Array) -> jax.Array:
    """One layer after the other."""
    for layer in layers:
        x = jnp.tanh(layer(x))
    return x


def squared_error(y: jax.Array, target: jax.Array) -> jax.Array:
    """A scalar."""
    return jnp.mean((y - target) ** 2)


def multiply(x: jax.Array, bias: jax.Array, times: jax.Array) -> jax.Array:
    """As long as you wish: `times` multiplications of a matrix with itself."""
    return jax.lax.fori_loop(0, times, lambda _, a: jnp.tanh(a @ a + bias), x)


def vector() -> jax.Array:
    return jnp.linspace(-1.0, 1.0, WIDTH)


def matrix() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (LONG_SIZE, LONG_SIZE))


# --- who computes it ----------------------------------------------------------------------------


class Contender(Protocol):
    """One library's way to do each of the things that are measured."""

    name: str

    def update(self, depth: int) -> Burst: ...
    def update_and_read(self, depth: int) -> Burst: ...
    def forward(self, depth: int) -> Burst: ...
    def train(self, depth: int) -> Burst: ...
    def round_trip(self, depth: int) -> Burst: ...
    def long_call(self, times: jax.Array) -> Callable[[], jax.Array]: ...


class PlainJax:
    """`jax.jit` on a flat list of the arrays: the least that a call on so many arrays costs."""

    name = JAX

    def arrays(self, depth: int) -> list[jax.Array]:
        """Weight, bias, weight, bias, ..."""
        shapes = [(WIDTH, WIDTH), (WIDTH,)] * depth
        keys = jax.random.split(jax.random.key(0), len(shapes))
        return [0.3 * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]

    @staticmethod
    def forward_pass(arrays: list[jax.Array], x: jax.Array) -> jax.Array:
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        return run([partial(lambda w, b, x: w @ x + b, w, b) for w, b in pairs], x)

    @staticmethod
    def last(arrays: list[jax.Array]) -> jax.Array:
        return arrays[-1]

    def update(self, depth: int) -> Burst:
        return feeding(jax.jit(negate), self.arrays(depth), self.last)

    def update_and_read(self, depth: int) -> Burst:
        return feeding_and_reading(jax.jit(negate), self.arrays(depth), self.last)

    def forward(self, depth: int) -> Burst:
        return calling(jax.jit(self.forward_pass), self.arrays(depth), vector())

    def train(self, depth: int) -> Burst:
        optimizer = optax.adam(1e-3)
        arrays = self.arrays(depth)
        opt_leaves, opt_structure = jtu.tree_flatten(optimizer.init(arrays))

        def loss_fn(arrays: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
            return squared_error(self.forward_pass(arrays, x), y)

        @jax.jit
        def step(
            arrays: list[jax.Array], opt_leaves: list[jax.Array], x: jax.Array, y: jax.Array
        ) -> tuple[Any, ...]:
            loss, grads = jax.value_and_grad(loss_fn)(arrays, x, y)
            opt_state = jtu.tree_unflatten(opt_structure, opt_leaves)
            updates, opt_state = optimizer.update(grads, opt_state, arrays)
            return optax.apply_updates(arrays, updates), jtu.tree_leaves(opt_state), loss

        return training(step, arrays, opt_leaves, vector(), vector())

    def round_trip(self, depth: int) -> Burst:
        arrays = self.arrays(depth)
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        return rebuilding({"layers": [{"weight": w, "bias": b} for w, b in pairs]})

    def long_call(self, times: jax.Array) -> Callable[[], jax.Array]:
        function = jax.jit(lambda arrays, x, times: multiply(x, arrays[1][0], times))
        return partial(function, self.arrays(3), matrix(), times)


class FilterLibrary:
    """Equinox, and pytreemod under the same names."""

    def __init__(self, name: str, library: Any):
        self.name = name
        self.library = library

        class Network(library.Module):
            layers: list[Any]

            def __init__(self, depth: int):
                keys = jax.random.split(jax.random.key(0), depth)
                self.layers = [library.nn.Linear(WIDTH, WIDTH, key=key) for key in keys]

            def __call__(self, x: jax.Array) -> jax.Array:
                return run(self.layers, x)

        self.network = Network

    @staticmethod
    def last(model: Any) -> jax.Array:
        return model.layers[-1].bias

    def update(self, depth: int) -> Burst:
        return feeding(self.library.filter_jit(negate), self.network(depth), self.last)

    def update_and_read(self, depth: int) -> Burst:
        step = self.library.filter_jit(negate)
        return feeding_and_reading(step, self.network(depth), self.last)

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

    def round_trip(self, depth: int) -> Burst:
        return rebuilding(self.network(depth))

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

        class Network(nnx.Module):
            def __init__(self, depth: int):
                rngs = nnx.Rngs(0)
                self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(depth)])

            def __call__(self, x: jax.Array) -> jax.Array:
                return run(self.layers, x)

        self.network = Network

    @staticmethod
    def last(model: Any) -> jax.Array:
        return model.layers[-1].bias[...]

    def negate_in_place(self, model: Any) -> None:
        self.nnx.update(model, negate(self.nnx.state(model)))

    def update(self, depth: int) -> Burst:
        return changing(self.nnx.jit(self.negate_in_place), self.network(depth), self.last)

    def update_and_read(self, depth: int) -> Burst:
        step = self.nnx.jit(self.negate_in_place)
        return changing_and_reading(step, self.network(depth), self.last)

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

    def round_trip(self, depth: int) -> Burst:
        return rebuilding(self.network(depth))

    def long_call(self, times: jax.Array) -> Callable[[], jax.Array]:
        function = self.nnx.jit(lambda model, x, times: multiply(x, model.layers[0].bias[0], times))
        return partial(function, self.network(3), matrix(), times)


LIBRARIES: dict[str, tuple[str, Callable[[str, Any], Contender]]] = {
    "Equinox": ("equinox", FilterLibrary),
    "NNX": ("flax.nnx", Nnx),
    "pytreemod": ("pytreemod", FilterLibrary),
}


def contenders() -> Iterator[Contender]:
    """JAX, and those of the others that are installed."""
    yield PlainJax()
    for name, (module, make) in LIBRARIES.items():
        try:
            library = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        yield make(name, library)


# --- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of the table: everybody's result in one race."""

    label: str
    results: dict[str, Result]


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    depths: tuple[int, ...] = (3, 21, 201)
    rounds: int = 60
    long_seconds: float = 1.0
    long_rounds: int = 5


CALLS: dict[str, Callable[[Contender, int], Burst]] = {
    "returns the updated model": lambda one, depth: one.update(depth),
    "the same, and a field is read": lambda one, depth: one.update_and_read(depth),
    "same model, returns an output": lambda one, depth: one.forward(depth),
    "training step with Adam": lambda one, depth: one.train(depth),
}
QUICK = Plan(depths=(3, 21), rounds=8, long_seconds=0.1, long_rounds=3)


def raced(label: str, bursts: dict[str, Burst], plan: Plan, *, share: float = 1) -> Row:
    """Race, and give each the `share` of a call that the row is about."""
    times = race(bursts, rounds=plan.rounds)
    shares = {name: [share * t for t in values] for name, values in times.items()}
    return Row(label, compare(shares, JAX))


def call_rows(field: Sequence[Contender], plan: Plan) -> Iterator[Row]:
    """Row 1 and its variants, for each size of model."""
    for label, burst_of in CALLS.items():
        for depth in plan.depths:
            bursts = {one.name: burst_of(one, depth) for one in field}
            yield raced(f"{label}, {2 * depth} arrays", bursts, plan)


def seconds_until(call: Callable[[], jax.Array]) -> tuple[float, float]:
    """Until a call returns, and until its result is there."""
    began = perf_counter()
    out = call()
    returned = perf_counter()
    out.block_until_ready()
    return returned - began, perf_counter() - began


def iterations_for(seconds: float, reference: Contender) -> jax.Array:
    """How often to multiply so that the computation takes about so long on this machine."""
    number, took = 8, 0.0
    while took < seconds / 4:
        number *= 2
        call = reference.long_call(jnp.asarray(number))
        call().block_until_ready()
        _, took = seconds_until(call)
    return jnp.asarray(round(number * seconds / took))


def long_rows(field: Sequence[Contender], plan: Plan) -> Iterator[Row]:
    """Row 2: until the call returns; and, to show that it was long, until its result is there."""
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
    yield Row("long computation, until the call returns", compare(until_return, JAX))
    yield Row("long computation, until its result is there", compare(until_result, JAX))


def round_trip_rows(field: Sequence[Contender], plan: Plan) -> Iterator[Row]:
    """Row 3: for one module; the baseline is nested dicts, of the same shape."""
    for depth in plan.depths:
        modules = depth + 1
        bursts = {one.name: one.round_trip(depth) for one in field}
        label = f"flatten and unflatten, per module, {modules} modules"
        yield raced(label, bursts, plan, share=1 / modules)


def rows(field: Sequence[Contender], plan: Plan) -> Iterator[Row]:
    """The whole table."""
    yield from call_rows(field, plan)
    yield from long_rows(field, plan)
    yield from round_trip_rows(field, plan)


# --- printing -----------------------------------------------------------------------------------


LABEL, COLUMN = 46, 25


def in_words(seconds: float) -> str:
    """With a fitting unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def short(ratio: float) -> str:
    """Two decimals where they mean something."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def cell(result: Result | None) -> str:
    """Median ratio, quartiles, ratio of the best times; a dash for who is not installed."""
    if result is None:
        return "-"
    ratio = result.ratio
    quartiles = f"({short(ratio.lower_quartile)}-{short(ratio.upper_quartile)})"
    return f"{short(ratio.median)} {quartiles} {short(ratio.best):>5}"


def line(row: Row) -> str:
    """One line of text."""
    cells = "".join(f"{cell(row.results.get(name)):>{COLUMN}}" for name in LIBRARIES)
    return f"{row.label:<{LABEL}}{in_words(row.results[JAX].seconds.median):>9}{cells}"


def heading(around: dict[str, Any]) -> str:
    """What was measured, where, and how to read it."""
    peers = "".join(
        f"{name} {around['versions'].get(name, '')}".rjust(COLUMN) for name in LIBRARIES
    )
    return "\n".join(
        [
            "Python {python}, JAX {jax}, {device}, {cores} cores".format(**around),
            "First column: median time of jax.jit on a flat list of the arrays (in the last rows:",
            "of nested dicts). Others, as ratio to it: median of rounds (quartiles), best by best.",
            "",
            f"{'':<{LABEL}}{JAX:>9}{peers}",
        ]
    )


def installed_versions() -> dict[str, str]:
    """Of each library, by the name it bears in the table."""
    found: dict[str, str] = {}
    for name, (module, _) in LIBRARIES.items():
        try:
            found[name] = version(module.partition(".")[0])
        except PackageNotFoundError:
            continue
    return found


def surroundings() -> dict[str, Any]:
    """What the numbers depend on besides the libraries."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "versions": installed_versions(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The cost of calls, in one run for all.")
    parser.add_argument("--quick", action="store_true", help="small models, few rounds")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    options = parser.parse_args(arguments)
    around, measured = surroundings(), rows(list(contenders()), QUICK if options.quick else Plan())
    if options.json:
        table = [
            {"label": row.label} | {name: r.as_dict() for name, r in row.results.items()}
            for row in measured
        ]
        print(json.dumps({"surroundings": around, "rows": table}, indent=2))
        return
    print(heading(around), flush=True)
    for row in measured:
        print(line(row), flush=True)


if __name__ == "__main__":
    main()
