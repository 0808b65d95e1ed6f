"""A network of `Linear` layers of one width, in every library, for several benchmarks.

A network of `depth` layers has `2 * depth` arrays.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

WIDTH = 4


def run(layers: Sequence[Callable[[jax.Array], jax.Array]], x: jax.Array) -> jax.Array:
    """Apply one layer after the other."""
    for layer in layers:
        x = jnp.tanh(layer(x))
    return x


def squared_error(y: jax.Array, target: jax.Array) -> jax.Array:
    """A scalar."""
    return jnp.mean((y - target) ** 2)


def vector() -> jax.Array:
    """An input."""
    return jnp.linspace(-1.0, 1.0, WIDTH)


# --- plain JAX ----------------------------------------------------------------------------------


def flat_arrays(depth: int) -> list[jax.Array]:
    """Weight, bias, weight, bias, ..."""
    shapes = [(WIDTH, WIDTH), (WIDTH,)] * depth
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [0.3 * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def apply_flat(arrays: list[jax.Array], x: jax.Array) -> jax.Array:
    """The function that the network computes."""
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return run([partial(lambda w, b, x: w @ x + b, w, b) for w, b in pairs], x)


def nested_dicts(depth: int) -> dict[str, Any]:
    """The arrays as nested dicts, as without any library."""
    arrays = flat_arrays(depth)
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return {"layers": [{"weight": w, "bias": b} for w, b in pairs]}


# --- the libraries ------------------------------------------------------------------------------


def filtering_network(library: Any) -> type:
    """The class for Equinox, and for pytreemod under the same names."""

    class Network(library.Module):
        layers: list[Any]

        def __init__(self, depth: int):
            keys = jax.random.split(jax.random.key(0), depth)
            self.layers = [library.nn.Linear(WIDTH, WIDTH, key=key) for key in keys]

        def __call__(self, x: jax.Array) -> jax.Array:
            return run(self.layers, x)

    return Network


def network_with_defaults(library: Any, depth: int) -> Any:
    """A model for Equinox and for pytreemod; its layers use defaults of the class."""

    class Layer(library.Module):
        weight: jax.Array
        bias: jax.Array | None = None
        width: int = library.field(static=True, default=WIDTH)
        use_bias: bool = library.field(static=True, default=True)

    class Network(library.Module):
        layers: list[Any]

    arrays = flat_arrays(depth)
    return Network([Layer(w, b) for w, b in zip(arrays[::2], arrays[1::2], strict=True)])


def nnx_network(nnx: Any) -> type:
    """The class for NNX."""

    class Network(nnx.Module):
        def __init__(self, depth: int):
            rngs = nnx.Rngs(0)
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(depth)])

        def __call__(self, x: jax.Array) -> jax.Array:
            return run(self.layers, x)

    return Network


def counting_network(library: Any, depth: int) -> tuple[Any, Any]:
    """A model and its State, for Equinox and for pytreemod: one array of each for every layer."""

    class Counter(library.Module):
        weight: jax.Array
        count: Any

        def __init__(self) -> None:
            self.weight = jnp.ones(WIDTH)
            self.count = library.nn.StateIndex(jnp.ones(WIDTH))

    class Network(library.Module):
        layers: list[Counter]

        def __init__(self) -> None:
            self.layers = [Counter() for _ in range(depth)]

    return library.nn.make_with_state(Network)()


def nnx_counting_network(nnx: Any, depth: int) -> Any:
    """The same for NNX, where the model has its state."""

    class Counter(nnx.Module):
        def __init__(self) -> None:
            self.weight = nnx.Param(jnp.ones(WIDTH))
            self.count = nnx.BatchStat(jnp.ones(WIDTH))

    class Network(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([Counter() for _ in range(depth)])

    return Network()


def network_class(name: str, library: Any) -> type:
    """The class for the library of that name."""
    return nnx_network(library) if name == "NNX" else filtering_network(library)
