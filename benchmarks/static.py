"""The time of calls other than `f(model, x)`: static values, keywords, methods.

    python -m benchmarks.static [--quick] [--json]

The static value alternates between two values, for which the function is already compiled, as with
a training flag or a choice of activation. The baseline is `jax.jit` with `static_argnames` on a
flat list of the arrays, called in the same way. The baseline of a method is a function of the list.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.libraries import installed
from benchmarks.measuring import CALLER, Burst
from benchmarks.networks import apply_flat, flat_arrays, network_class, vector
from benchmarks.tables import Benchmark, Row, raced

JAX = "jax.jit"
LIMITS = {3: 1.3, 21: 1.1}
CALLS_PER_ROUND = 2

Function = Callable[..., Any]


def finish(y: jax.Array, how: Any) -> jax.Array:
    """Use the static value."""
    if callable(how):
        return how(y)
    return y * {"double": 2.0, "halve": 0.5}.get(how, how)


# --- bursts: two calls each -----------------------------------------------------------------------


def caller_seconds(began: float, out: jax.Array) -> float:
    """Seconds since `began`. Then wait, untimed, so that no burst leaves work to the next."""
    seconds = CALLER() - began
    out.block_until_ready()
    return seconds


def by_position(function: Function, model: Any, one: Any, other: Any) -> Burst:
    """Pass the static value as the third argument."""
    x = vector()

    def burst(number: int) -> float:
        began = CALLER()
        for _ in range(number):
            function(model, x, one)
            out = function(model, x, other)
        return caller_seconds(began, out)

    return burst


def by_keyword(function: Function, model: Any, one: Any, other: Any) -> Burst:
    """Pass the static value by keyword."""
    x = vector()

    def burst(number: int) -> float:
        began = CALLER()
        for _ in range(number):
            function(model, x, how=one)
            out = function(model, x, how=other)
        return caller_seconds(began, out)

    return burst


def all_by_keyword(function: Function, model: Any, one: Any, other: Any) -> Burst:
    """Pass everything by keyword, in varying order."""
    x = vector()

    def burst(number: int) -> float:
        began = CALLER()
        for _ in range(number):
            function(how=one, x=x, model=model)
            out = function(x=x, model=model, how=other)
        return caller_seconds(began, out)

    return burst


def calling(function: Function, *args: Any) -> Burst:
    """Make the same call twice."""

    def burst(number: int) -> float:
        began = CALLER()
        for _ in range(number):
            function(*args)
            out = function(*args)
        return caller_seconds(began, out)

    return burst


def calling_method(model: Any, x: jax.Array) -> Burst:
    """Read the method from the model for each call."""

    def burst(number: int) -> float:
        began = CALLER()
        for _ in range(number):
            model.apply(x)
            out = model.apply(x)
        return caller_seconds(began, out)

    return burst


# --- contenders ---------------------------------------------------------------------------------


def jitted(name: str, library: Any) -> Function:
    """A function of a model, an input and a static value."""

    def apply(model: Any, x: jax.Array, how: Any) -> jax.Array:
        return finish(apply_flat(model, x) if library is None else model(x), how)

    if library is None:
        return jax.jit(apply, static_argnames="how")
    if name == "NNX":
        return library.jit(apply, static_argnames="how")
    return library.filter_jit(apply)


def with_method(name: str, library: Any) -> type:
    """The network with a jitted method."""
    jit = library.jit if name == "NNX" else library.filter_jit

    class Network(network_class(name, library)):
        @jit
        def apply(self, x: jax.Array) -> jax.Array:
            return self(x)

    return Network


@dataclass(frozen=True)
class Kind:
    """One way to call."""

    label: str
    burst_of: Callable[[Function, Any, Any, Any], Burst]
    values: tuple[Any, Any]


KINDS = (
    Kind("string, by position", by_position, ("double", "halve")),
    Kind("number, by position", by_position, (2.0, 3.0)),
    Kind("function, by position", by_position, (jnp.sin, jnp.cos)),
    Kind("string, by keyword", by_keyword, ("double", "halve")),
    Kind("string, and everything by keyword", all_by_keyword, ("double", "halve")),
)


def rows(quick: bool) -> Iterator[Row]:
    """Each way to call, for two sizes of model."""
    depths, rounds = ((3,), 4) if quick else ((3, 21), 60)
    libraries = installed()
    classes = {name: network_class(name, library) for name, library in libraries.items()}
    for depth in depths:
        models = {JAX: flat_arrays(depth), **{name: cls(depth) for name, cls in classes.items()}}

        def row(label: str, bursts: dict[str, Burst], depth: int = depth) -> Row:
            return raced(
                f"{label}, {2 * depth} arrays",
                bursts,
                rounds=rounds,
                share=1 / CALLS_PER_ROUND,
                limit=LIMITS[depth],
            )

        for kind in KINDS:
            functions = {JAX: jitted(JAX, None)}
            functions |= {name: jitted(name, lib) for name, lib in libraries.items()}
            yield row(
                kind.label,
                {n: kind.burst_of(functions[n], models[n], *kind.values) for n in models},
            )
        plain = calling(jax.jit(apply_flat), models[JAX], vector())
        methods = {
            name: calling_method(with_method(name, lib)(depth), vector())
            for name, lib in libraries.items()
        }
        yield row("jitted method", {JAX: plain, **methods})
        callables = {
            name: calling(lib.filter_jit(models[name]), vector())
            for name, lib in libraries.items()
            if name != "NNX"
        }
        yield row("jitted model", {JAX: plain, **callables})


BENCHMARK = Benchmark("Other ways to call, against the same call of jax.jit", JAX, rows)

if __name__ == "__main__":
    BENCHMARK.main()
