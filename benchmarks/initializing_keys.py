"""The cost of random keys: to build a model with many layers, and to call it with dropout.

    python -m benchmarks.initializing_keys [--quick] [--json]

The model is like a transformer. Each block has an attention of four dense layers, a perceptron of
two, and three dropouts. The baseline is pytreemod with plain keys: each level of the model splits
its key for the level below, as in Equinox. The column of pytreemod builds the layers with
`init_keys`, and each dropout has its own stream.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.libraries import OURS, installed
from benchmarks.measuring import PROCESS, Burst, clocked, tidied
from benchmarks.tables import Benchmark, Row, raced, short

TOWER = "plain keys"
LIMIT = 1.0
TRACING_LIMIT = 1.3
"""The limit of tracing. Python makes keys one by one and passes State from layer to layer. That
takes milliseconds once, and compiling is faster by a hundred times as much."""

WIDTH = 16
RATE = 0.1


# --- a model with plain keys ---------------------------------------------------------------------


def split(key: Any, n: int) -> Sequence[Any]:
    """A key for each of `n` parts."""
    return jax.random.split(key, n)


def split_for_call(key: Any, n: int) -> Sequence[Any]:
    """The same, in a call of the model."""
    return jax.random.split(key, n)


def keyed(library: Any, depth: int, divide: Callable[[Any, int], Sequence[Any]]) -> type:
    """The class of the model in Equinox or pytreemod; keys come from `divide`."""
    nn = library.nn

    class Attention(library.Module):
        into: list[Any]
        out: Any
        dropout: Any

        def __init__(self, *, key: Any):
            *keys, last = divide(key, 4)
            self.into = [nn.Linear(WIDTH, WIDTH, key=k) for k in keys]
            self.out = nn.Linear(WIDTH, WIDTH, key=last)
            self.dropout = nn.Dropout(RATE)

        def __call__(self, x: jax.Array, *, key: Any) -> jax.Array:
            q, k, v = (layer(x) for layer in self.into)
            return self.out(self.dropout(jax.nn.sigmoid(q * k), key=key) * v)

    class Block(library.Module):
        attention: Attention
        into: Any
        out: Any
        dropouts: list[Any]

        def __init__(self, *, key: Any):
            first, second = divide(key, 2)
            self.attention = Attention(key=first)
            keys = divide(second, 2)
            self.into = nn.Linear(WIDTH, 2 * WIDTH, key=keys[0])
            self.out = nn.Linear(2 * WIDTH, WIDTH, key=keys[1])
            self.dropouts = [nn.Dropout(RATE), nn.Dropout(RATE)]

        def __call__(self, x: jax.Array, *, key: Any) -> jax.Array:
            first, second, third = split_for_call(key, 3)
            x = x + self.dropouts[0](self.attention(x, key=first), key=second)
            return x + self.dropouts[1](self.out(jax.nn.gelu(self.into(x))), key=third)

    class Model(library.Module):
        blocks: list[Block]

        def __init__(self, *, key: Any):
            self.blocks = [Block(key=k) for k in divide(key, depth)]

        def __call__(self, x: jax.Array, *, key: Any) -> jax.Array:
            for block, k in zip(self.blocks, split_for_call(key, depth), strict=True):
                x = block(x, key=k)
            return x

    return Model


# --- the same model without splits ---------------------------------------------------------------


def streaming(pm: Any, depth: int) -> type:
    """The class of the model in pytreemod: its dropouts have streams."""
    nn = pm.nn

    class Attention(nn.StatefulLayer):
        into: list[Any]
        out: Any
        dropout: Any

        def __init__(self, *, key: Any):
            keys = pm.init_keys(key)
            self.into = [nn.Linear(WIDTH, WIDTH, key=keys) for _ in range(3)]
            self.out = nn.Linear(WIDTH, WIDTH, key=keys)
            self.dropout = nn.Dropout(RATE, stream=pm.RngStream())

        def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
            q, k, v = (layer(x) for layer in self.into)
            weights, state = self.dropout(jax.nn.sigmoid(q * k), state)
            return self.out(weights * v), state

    class Block(nn.StatefulLayer):
        attention: Attention
        into: Any
        out: Any
        dropouts: list[Any]

        def __init__(self, *, key: Any):
            keys = pm.init_keys(key)
            self.attention = Attention(key=keys)
            self.into = nn.Linear(WIDTH, 2 * WIDTH, key=keys)
            self.out = nn.Linear(2 * WIDTH, WIDTH, key=keys)
            self.dropouts = [nn.Dropout(RATE, stream=pm.RngStream()) for _ in range(2)]

        def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
            seen, state = self.attention(x, state)
            seen, state = self.dropouts[0](seen, state)
            x = x + seen
            out, state = self.dropouts[1](self.out(jax.nn.gelu(self.into(x))), state)
            return x + out, state

    class Model(nn.StatefulLayer):
        blocks: list[Block]

        def __init__(self, *, key: Any):
            keys = pm.init_keys(key)
            self.blocks = [Block(key=keys) for _ in range(depth)]

        def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
            for block in self.blocks:
                x, state = block(x, state)
            return x, state

    return Model


def referring(nnx: Any, depth: int) -> type:
    """The class of the model in NNX: its layers share one source of keys, which has a counter."""

    class Attention(nnx.Module):
        def __init__(self, rngs: Any):
            self.into = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])
            self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(RATE, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            q, k, v = (layer(x) for layer in self.into)
            return self.out(self.dropout(jax.nn.sigmoid(q * k)) * v)

    class Block(nnx.Module):
        def __init__(self, rngs: Any):
            self.attention = Attention(rngs)
            self.into = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
            self.out = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
            self.dropouts = nnx.List([nnx.Dropout(RATE, rngs=rngs) for _ in range(2)])

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.dropouts[0](self.attention(x))
            return x + self.dropouts[1](self.out(jax.nn.gelu(self.into(x))))

    class Model(nnx.Module):
        def __init__(self, rngs: Any):
            self.blocks = nnx.List([Block(rngs) for _ in range(depth)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for block in self.blocks:
                x = block(x)
            return x

    return Model


# --- contenders ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """How to build the arrays of a model from a key, and how to call the model."""

    build: Callable[[jax.Array], Any]
    call: Callable[..., Any]
    arguments: tuple[Any, ...]


def by_keys(library: Any, depth: int) -> Contender:
    """Equinox, or pytreemod with plain keys."""
    model_class = keyed(library, depth, split)

    def build(key: jax.Array) -> Any:
        return library.filter(model_class(key=key), library.is_array)

    model = model_class(key=jax.random.key(0))
    arrays, rest = library.partition(model, library.is_array)

    def call(arrays: Any, key: jax.Array, x: jax.Array) -> Any:
        return library.combine(arrays, rest)(x, key=key)

    return Contender(build, call, (arrays, jax.random.key(1), jnp.ones(WIDTH)))


def by_streams(pm: Any, depth: int) -> Contender:
    """pytreemod with `init_keys` and streams."""
    model_class = streaming(pm, depth)

    def build(key: jax.Array) -> Any:
        return pm.make_with_state(model_class)(key=key)[0]

    model, state = pm.make_with_state(model_class)(key=jax.random.key(0))
    state = state.seed(jax.random.key(1))
    return Contender(
        build, lambda model, state, x: model(x, state), (model, state, jnp.ones(WIDTH))
    )


def by_references(nnx: Any, depth: int) -> Contender:
    """NNX, as its users write it."""
    model_class = referring(nnx, depth)

    def build(key: jax.Array) -> Any:
        return nnx.state(model_class(nnx.Rngs(key)))

    graph, state = nnx.split(model_class(nnx.Rngs(0)))

    def call(state: Any, x: jax.Array) -> Any:
        model = nnx.merge(graph, state)
        return model(x), nnx.state(model)

    return Contender(build, call, (state, jnp.ones(WIDTH)))


MAKERS = {OURS: by_streams, "Equinox": by_keys, "NNX": by_references}


def contenders(depth: int) -> dict[str, Contender]:
    """All contenders, the baseline first."""
    libraries = installed()
    made = {name: MAKERS[name](library, depth) for name, library in libraries.items()}
    return {TOWER: by_keys(libraries[OURS], depth), **made}


def built(contender: Contender) -> Burst:
    """Build eagerly, with all programs already compiled."""
    key = jax.random.key(0)
    return clocked(PROCESS, lambda: contender.build(key))


def traced(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Burst:
    """Trace with JAX. The function is new each time, because JAX caches traces."""
    return clocked(
        PROCESS, lambda: (jax.jit(lambda *args: function(*args)).trace(*arguments), 0)[1]
    )


def compiled(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Burst:
    """Compile a new function each time."""

    def compile_() -> None:
        jax.jit(lambda *args: function(*args)).lower(*arguments).compile()

    return tidied(clocked(PROCESS, compile_))


def counted(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Counter[str]:
    """The operations of the traced program, including nested ones."""

    def names(jaxpr: Any) -> Iterator[str]:
        for equation in jaxpr.eqns:
            yield equation.primitive.name
            for value in equation.params.values():
                for part in value if isinstance(value, tuple) else (value,):
                    inner = getattr(part, "jaxpr", part)
                    if hasattr(inner, "eqns"):
                        yield from names(inner)

    return Counter(names(jax.make_jaxpr(function)(*arguments).jaxpr))


def size_row(label: str, counts: dict[str, Counter[str]]) -> Row:
    """The number of operations, and how many of them make keys from keys."""
    sizes = {name: sum(count.values()) for name, count in counts.items()}
    splits = {name: count["random_split"] for name, count in counts.items()}
    folds = {name: count["random_fold_in"] for name, count in counts.items()}
    cells = {
        name: f"{short(size / sizes[TOWER])} ({splits[name]} + {folds[name]})"
        for name, size in sizes.items()
        if name != TOWER
    }
    return Row(
        label,
        f"{sizes[TOWER]}",
        cells,
        {n: {"size": sizes[n], "splits": splits[n], "folds": folds[n]} for n in sizes},
        "no split",
        splits[OURS] == 0,
        f"in parentheses: splits and fold_ins, {splits[TOWER]} + {folds[TOWER]} with plain keys",
    )


def rows(quick: bool) -> Iterator[Row]:
    """Building, then calling: operations, tracing, compiling."""
    depth, few, rounds = (2, 1, 2) if quick else (12, 4, 12)
    every, small = contenders(depth), contenders(few)
    blocks = f"{depth} blocks"
    key = (jax.random.key(0),)
    sizes = {name: counted(c.build, key) for name, c in every.items()}
    yield size_row(f"building, {blocks}: operations", sizes)
    bursts = {name: built(c) for name, c in every.items()}
    yield raced(f"building, {blocks}: outside of jit", bursts, rounds=rounds, limit=LIMIT)
    bursts = {name: traced(c.build, key) for name, c in every.items()}
    yield raced(f"building, {blocks}: tracing", bursts, rounds=rounds, limit=TRACING_LIMIT)
    bursts = {name: compiled(c.build, key) for name, c in small.items()}
    yield raced(f"building, {few} blocks: compiling", bursts, rounds=min(rounds, 3), limit=LIMIT)
    sizes = {name: counted(c.call, c.arguments) for name, c in every.items()}
    yield size_row(f"calling, {blocks}: operations", sizes)
    bursts = {name: traced(c.call, c.arguments) for name, c in every.items()}
    yield raced(f"calling, {blocks}: tracing", bursts, rounds=rounds, limit=TRACING_LIMIT)
    bursts = {name: compiled(c.call, c.arguments) for name, c in small.items()}
    yield raced(f"calling, {few} blocks: compiling", bursts, rounds=min(rounds, 3), limit=LIMIT)


BENCHMARK = Benchmark("Random keys of a deep model, against splitting", TOWER, rows)

if __name__ == "__main__":
    BENCHMARK.main()
