"""The time to trace a network of 100 blocks, which is the part of compiling in Python.

    python -m benchmarks.tracing [--quick] [--json]

Each block is residual: LayerNorm, Linear, GELU, Linear. In the rows "own layers", the Modules of
all libraries call the same functions of arrays. Every trace has the same equations, so the times
differ only by the library's share. The rows "nn layers" use each library's `Linear` and
`LayerNorm`, and the equations differ, too.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.libraries import installed
from benchmarks.measuring import Burst, repeating
from benchmarks.tables import Benchmark, Row, raced

WIDTH = 4
LIMIT = 1.0
DICTS = "dicts"
EPS = 1e-5

Parameters = dict[str, jax.Array]


# --- computations --------------------------------------------------------------------------------


def normalize(weight: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    """LayerNorm over the last axis."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    centered = x - mean
    var = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    return centered * lax.rsqrt(var + EPS) * weight + bias


def affine(weight: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    """An affine map, with the outputs as the first axis of the matrix."""
    return weight @ x + bias


def mean_square(y: jax.Array) -> jax.Array:
    """A scalar to differentiate."""
    return jnp.mean(y**2)


def block_arrays() -> dict[str, Parameters]:
    """The arrays of one block."""
    ones, zeros = jnp.ones(WIDTH), jnp.zeros(WIDTH)
    matrix = 0.1 * jnp.eye(WIDTH)
    return {
        "norm": {"weight": ones, "bias": zeros},
        "first": {"weight": matrix, "bias": zeros},
        "second": {"weight": matrix, "bias": zeros},
    }


# --- plain JAX ----------------------------------------------------------------------------------


def apply_dicts(network: dict[str, Any], x: jax.Array) -> jax.Array:
    """The network without any library."""
    for block in network["blocks"]:
        norm, first, second = block["norm"], block["first"], block["second"]
        h = normalize(norm["weight"], norm["bias"], x)
        h = jax.nn.gelu(affine(first["weight"], first["bias"], h))
        x = x + affine(second["weight"], second["bias"], h)
    return x


# --- the libraries ------------------------------------------------------------------------------


def own_layers(library: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Classes of Equinox or pytreemod that call the functions above."""

    class Norm(library.Module):
        weight: jax.Array
        bias: jax.Array

        def __call__(self, x: jax.Array) -> jax.Array:
            return normalize(self.weight, self.bias, x)

    class Affine(library.Module):
        weight: jax.Array
        bias: jax.Array

        def __call__(self, x: jax.Array) -> jax.Array:
            return affine(self.weight, self.bias, x)

    arrays = block_arrays()
    return (lambda: Norm(**arrays["norm"])), (lambda: Affine(**arrays["first"]))


def own_nnx_layers(nnx: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The same for NNX."""

    class Norm(nnx.Module):
        def __init__(self, weight: jax.Array, bias: jax.Array):
            self.weight = nnx.Param(weight)
            self.bias = nnx.Param(bias)

        def __call__(self, x: jax.Array) -> jax.Array:
            return normalize(self.weight[...], self.bias[...], x)

    class Affine(nnx.Module):
        def __init__(self, weight: jax.Array, bias: jax.Array):
            self.weight = nnx.Param(weight)
            self.bias = nnx.Param(bias)

        def __call__(self, x: jax.Array) -> jax.Array:
            return affine(self.weight[...], self.bias[...], x)

    arrays = block_arrays()
    return (lambda: Norm(**arrays["norm"])), (lambda: Affine(**arrays["first"]))


def nn_layers(name: str, library: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The library's own layers."""
    if name == "NNX":
        rngs = library.Rngs(0)
        return (
            lambda: library.LayerNorm(WIDTH, rngs=rngs),
            lambda: library.Linear(WIDTH, WIDTH, rngs=rngs),
        )
    key = jax.random.key(0)
    return lambda: library.nn.LayerNorm(WIDTH), lambda: library.nn.Linear(WIDTH, WIDTH, key=key)


def filtering_network(library: Any, depth: int, norm: Any, linear: Any) -> Any:
    """The network in Equinox or pytreemod."""

    class Block(library.Module):
        norm: Any
        first: Any
        second: Any

        def __init__(self):
            self.norm, self.first, self.second = norm(), linear(), linear()

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.second(jax.nn.gelu(self.first(self.norm(x))))

    class Network(library.Module):
        blocks: list[Any]

        def __init__(self):
            self.blocks = [Block() for _ in range(depth)]

        def __call__(self, x: jax.Array) -> jax.Array:
            for block in self.blocks:
                x = block(x)
            return x

    return Network()


def nnx_network(nnx: Any, depth: int, norm: Any, linear: Any) -> Any:
    """The network in NNX."""

    class Block(nnx.Module):
        def __init__(self):
            self.norm, self.first, self.second = norm(), linear(), linear()

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.second(jax.nn.gelu(self.first(self.norm(x))))

    class Network(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([Block() for _ in range(depth)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for block in self.blocks:
                x = block(x)
            return x

    return Network()


def networks(libraries: dict[str, Any], depth: int, *, own: bool) -> dict[str, Any]:
    """The network in every library."""
    made: dict[str, Any] = {}
    for name, library in libraries.items():
        if own:
            parts = own_nnx_layers(library) if name == "NNX" else own_layers(library)
        else:
            parts = nn_layers(name, library)
        make = nnx_network if name == "NNX" else filtering_network
        made[name] = make(library, depth, *parts)
    return made


# --- tracing ------------------------------------------------------------------------------------

Trace = Callable[[Callable[..., Any], Any, jax.Array], Any]


def plain_trace(function: Callable[..., Any], model: Any, x: jax.Array) -> Any:
    """Trace with JAX. The function is new each time, because JAX caches traces."""
    return jax.jit(lambda model, x: function(model, x)).trace(model, x)


def applying(name: str, library: Any) -> tuple[Trace, Callable[..., Any]]:
    """Trace a call of the model: with plain JAX, if it accepts such models."""
    if name == DICTS:
        return plain_trace, apply_dicts
    trace = nnx_trace(library) if name == "NNX" else plain_trace
    return trace, lambda model, x: model(x)


def differentiating(name: str, library: Any) -> tuple[Trace, Callable[..., Any]]:
    """Trace the gradient with the library's transforms."""
    if name == DICTS:
        return plain_trace, jax.grad(lambda model, x: mean_square(apply_dicts(model, x)))

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return mean_square(model(x))

    if name == "NNX":
        return nnx_trace(library), library.grad(loss)
    return filter_trace(library), library.filter_grad(loss)


def nnx_trace(nnx: Any) -> Trace:
    """Trace with NNX."""
    return lambda function, model, x: nnx.jit(lambda m, x: function(m, x)).trace(model, x)


def filter_trace(library: Any) -> Trace:
    """Trace with a filtered transform, which Equinox and pytreemod have."""
    return lambda function, model, x: library.filter_make_jaxpr(lambda m, x: function(m, x))(
        model, x
    )


def tracing(trace: Trace, function: Callable[..., Any], model: Any) -> Burst:
    """Repeat the trace."""
    x = jnp.ones(WIDTH)
    return repeating(lambda: trace(function, model, x))


KINDS = {"forward": applying, "gradient": differentiating}


def rows(quick: bool) -> Iterator[Row]:
    """Forward and gradient, with our own layers and with each library's."""
    depth, rounds = (3, 3) if quick else (100, 12)
    libraries = {DICTS: None, **installed()}
    dicts = {"blocks": [block_arrays() for _ in range(depth)]}
    for own in (True, False):
        models = {DICTS: dicts, **networks(installed(), depth, own=own)}
        for what, kind in KINDS.items():
            bursts = {
                name: tracing(*kind(name, lib), models[name]) for name, lib in libraries.items()
            }
            label = f"{what}, {'own' if own else 'nn'} layers, {depth} blocks"
            yield raced(label, bursts, rounds=rounds, limit=LIMIT)


BENCHMARK = Benchmark("Tracing a network, against hand-written JAX on dicts", DICTS, rows)

if __name__ == "__main__":
    BENCHMARK.main()
