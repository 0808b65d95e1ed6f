"""The cost of a check in a jitted call that waits for it, or leaves it to a later call.

    python -m benchmarks.checks [--quick] [--json]

`filter_jit` compiles each function three times: without a check, with a check, and with a check and
`checks="later"`. One function returns a model of 6, 42 or 402 tiny arrays; another multiplies
matrices for a second.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import pytreemod as pm
from benchmarks.dispatch import (
    LONG_LIMIT,
    QUICK,
    PlainJax,
    Plan,
    feeding,
    iterations_for,
    matrix,
    multiply,
    negate,
    seconds_until,
)
from benchmarks.libraries import OURS
from benchmarks.measuring import no_garbage_collection
from benchmarks.networks import network_class
from benchmarks.tables import Benchmark, Row, raced, ratio_row

WITHOUT, WAITING = "no check", "one that waits"
LIMITS = {3: 1.4, 21: 1.1, 201: 1.1}
"""The limit for a call with a later check, by depth: the call returns one array more."""


def checked(tree: Any) -> Any:
    """`negate`, with a check."""
    tree = negate(tree)
    return pm.error_if(tree, tree.layers[0].bias[0] > 1e9, "too large")


def multiply_checked(x: jax.Array, bias: jax.Array, times: jax.Array) -> jax.Array:
    """`multiply`, with a check."""
    return multiply(pm.error_if(x, x > 1e9, "too large"), bias, times)


def call_rows(plan: Plan) -> Iterator[Row]:
    """The time of a call, for each size of model."""
    network = network_class(OURS, pm)
    functions = {
        WITHOUT: pm.filter_jit(negate),
        WAITING: pm.filter_jit(checked),
        OURS: pm.filter_jit(checked, checks="later"),
    }
    for depth in plan.depths:
        bursts = {
            name: feeding(step, network(depth), lambda model: model.layers[-1].bias)
            for name, step in functions.items()
        }
        label = f"returns the updated model, {2 * depth} arrays"
        yield raced(label, bursts, rounds=plan.rounds, limit=LIMITS[depth])


def long_row(plan: Plan) -> Row:
    """How long a call on a long computation takes to return."""
    times = iterations_for(plan.long_seconds, PlainJax())
    functions: dict[str, Callable[..., jax.Array]] = {
        WITHOUT: pm.filter_jit(multiply),
        WAITING: pm.filter_jit(multiply_checked),
        OURS: pm.filter_jit(multiply_checked, checks="later"),
    }
    arguments = matrix(), jnp.zeros(()), times
    until_return: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function(*arguments).block_until_ready()
    with no_garbage_collection():
        for _ in range(plan.long_rounds):
            for name, function in functions.items():
                returned, _ = seconds_until(lambda function=function: function(*arguments))
                until_return[name].append(returned)
    label = "long computation, until the call returns"
    return ratio_row(label, until_return, limit=LONG_LIMIT)


def rows(quick: bool) -> Iterator[Row]:
    """The whole table."""
    plan = QUICK if quick else Plan()
    yield from call_rows(plan)
    yield long_row(plan)


TITLE = 'A check in a jitted call (pytreemod: checks="later"), against none'
BENCHMARK = Benchmark(TITLE, WITHOUT, rows, heads=(WAITING, OURS))

if __name__ == "__main__":
    BENCHMARK.main()
