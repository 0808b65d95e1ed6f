"""The time to make an instance of a Module, to read its fields and to call its methods.

    python -m benchmarks.construction [--quick] [--json]

The baseline is a frozen dataclass with the same five fields: two arrays, an integer, a number and a
flag. In a Module the last three are configuration. Other rows have two arrays and a function, such
as an activation, which is declared static or not. The last rows have one array and a static value,
against a static integer; layers, against Equinox's; and reads and calls, against those of a frozen
dataclass.
"""

import dataclasses
import enum
import functools as ft
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.libraries import FILTERING, OURS, installed
from benchmarks.measuring import UNROLLED, Burst, repeating, unrolled
from benchmarks.tables import Benchmark, Row, raced

LIMIT = 3.0
FUNCTION_LIMIT = OWN_LIMIT = 4.0
STATIC_LIMIT = 2.0
LAYER_LIMIT = 1.0
DATACLASS = "dataclass"


@dataclass(frozen=True)
class Plain:
    """The baseline."""

    weight: jax.Array
    bias: jax.Array
    size: int
    rate: float
    flag: bool


def with_written_init(library: Any) -> type:
    """A Module with a generated `__init__`."""

    class Written(library.Module):
        weight: jax.Array
        bias: jax.Array
        size: int = library.field(static=True)
        rate: float = library.field(static=True)
        flag: bool = library.field(static=True)

    return Written


def with_own_init(library: Any) -> type:
    """A Module that has its own `__init__`."""

    class Own(library.Module):
        weight: jax.Array
        bias: jax.Array
        size: int = library.field(static=True)
        rate: float = library.field(static=True)
        flag: bool = library.field(static=True)

        def __init__(self, weight: jax.Array, bias: jax.Array, size: int, rate: float, flag: bool):
            self.weight = weight
            self.bias = bias
            self.size = size
            self.rate = rate
            self.flag = flag

    return Own


def all_data(library: Any) -> type:
    """A Module with five fields of data."""

    class Data(library.Module):
        weight: jax.Array
        bias: jax.Array
        size: int
        rate: float
        flag: bool

    return Data


PLAIN_ACTIVATED = dataclasses.make_dataclass(
    "PlainActivated", ["weight", "bias", "activation"], frozen=True
)
"""The baseline with a function in a field."""


def with_function(is_static: bool, own: bool) -> Callable[[Any], type]:
    """A maker of Modules with a function in a field."""

    def make(library: Any) -> type:
        class Activated(library.Module):
            weight: jax.Array
            bias: jax.Array
            activation: Any = library.field(static=True) if is_static else library.field()

        class OwnActivated(Activated):
            def __init__(self, weight: jax.Array, bias: jax.Array, activation: Any):
                self.weight = weight
                self.bias = bias
                self.activation = activation

        return OwnActivated if own else Activated

    return make


def with_check(library: Any) -> type:
    """A Module with a `__check_init__`."""

    class Checked(with_written_init(library)):
        def __check_init__(self):
            if self.size < 0:
                raise ValueError("size is negative")

    return Checked


@dataclass(frozen=True)
class PlainChecked(Plain):
    """The baseline with a check."""

    def __post_init__(self):
        if self.size < 0:
            raise ValueError("size is negative")


class Color(enum.Enum):
    """A static value."""

    RED = 1


STATIC_VALUES: dict[str, Any] = {
    "tuple": (1, 2),
    "tuple of tuples": ((1, 2), (3, 4)),
    "dtype": np.dtype("float32"),
    "enum": Color.RED,
    "frozenset": frozenset({1, 2}),
    "partial": ft.partial(jnp.sum, axis=0),
    "zero": 0.0,
}
"""Configuration that is recognized by its value, because its type is not enough."""


def with_static(library: Any) -> type:
    """A Module with an array and a static value."""

    class Static(library.Module):
        weight: jax.Array
        value: Any = library.field(static=True)

    return Static


LAYERS: dict[str, Callable[[Any, Any], Any]] = {
    "AvgPool2d": lambda nn, key: nn.AvgPool2d(2),
    "Conv2d": lambda nn, key: nn.Conv2d(1, 1, 1, key=key),
    "Dropout": lambda nn, key: nn.Dropout(0.5),
    "Embedding": lambda nn, key: nn.Embedding(2, 2, key=key),
    "GRUCell": lambda nn, key: nn.GRUCell(2, 2, key=key),
    "LayerNorm": lambda nn, key: nn.LayerNorm(2),
    "Linear": lambda nn, key: nn.Linear(2, 2, key=key),
    "MLP": lambda nn, key: nn.MLP(2, 2, 2, 1, key=key),
    "MultiheadAttention": lambda nn, key: nn.MultiheadAttention(1, 2, key=key),
}


def static_rows(rounds: int, libraries: dict[str, Any]) -> Iterator[Row]:
    """Static values, against a static integer in pytreemod; layers, against Equinox's."""
    weight = jnp.zeros(2)
    for kind, value in STATIC_VALUES.items():
        made = {f"{OURS} ": (with_static(libraries[OURS]), 3)}
        made |= {name: (with_static(library), value) for name, library in libraries.items()}
        bursts = {
            name: unrolled("cls(weight, value)", cls=cls, weight=weight, value=given)
            for name, (cls, given) in made.items()
        }
        label = f"static {kind}, against a static integer"
        yield raced(label, bursts, rounds=rounds, share=1 / UNROLLED, limit=STATIC_LIMIT)
    key = jax.random.key(0)
    for layer, make in LAYERS.items():
        # Not unrolled: a hundred of the slower layers take too long for a burst.
        bursts = {
            name: repeating(ft.partial(make, library.nn, key))
            for name, library in libraries.items()
        }
        yield raced(f"{layer}, against Equinox's", bursts, rounds=rounds, limit=LAYER_LIMIT)


class PlainCalled(Plain):
    """The baseline with methods."""

    def __call__(self, x: Any) -> Any:
        return x

    def apply(self, x: Any) -> Any:
        return x


def with_methods(name: str, library: Any) -> type:
    """A Module with the same methods."""
    base = nnx_class(library) if name == "NNX" else with_written_init(library)
    return type("Called", (base,), {n: vars(PlainCalled)[n] for n in ("__call__", "apply")})


USES = {
    "reading a field": ("model.weight", 5.0),
    "reading a configuration field": ("model.size", 5.0),
    "calling a method": ("model.apply(x)", 12.0),
    "calling the instance": ("model(x)", 12.0),
}
"""A statement about `model` and `x`, and its limit."""


def use_rows(rounds: int, values: tuple[Any, ...]) -> Iterator[Row]:
    """Reads and calls: of new instances, and of those that a jitted call has returned.

    `filter_jit` returns a model before its nodes are built; the first read, which is not measured,
    builds them.
    """
    made = {DATACLASS: PlainCalled(*values)}
    made |= {name: with_methods(name, lib)(*values) for name, lib in installed().items()}
    returned = {DATACLASS: made[DATACLASS]}
    for name, library in installed(*FILTERING).items():
        returned[name] = library.filter_jit(lambda model: model)(made[name])
        assert returned[name].size == values[2]
    for where, models in (("", made), (", after jit", returned)):
        for use, (statement, limit) in USES.items():
            bursts = {name: unrolled(statement, model=m, x=1) for name, m in models.items()}
            yield raced(use + where, bursts, rounds=rounds, share=1 / UNROLLED, limit=limit)


def nnx_class(nnx: Any) -> type:
    """NNX has no generated `__init__`, so both rows have the same class."""

    class Own(nnx.Module):
        def __init__(self, weight: jax.Array, bias: jax.Array, size: int, rate: float, flag: bool):
            self.weight = nnx.Param(weight)
            self.bias = nnx.Param(bias)
            self.size = size
            self.rate = rate
            self.flag = flag

    return Own


@dataclass(frozen=True)
class Style:
    """A way to write a class."""

    label: str
    plain: type
    module: Callable[[Any], type]
    in_nnx: bool = True
    limit: float = LIMIT


STYLES = (
    Style("5 fields, generated __init__", Plain, with_written_init),
    Style("5 fields, own __init__", Plain, with_own_init, limit=OWN_LIMIT),
    Style("5 fields, all data", Plain, all_data),
    Style("5 fields and a check", PlainChecked, with_check, in_nnx=False),
)


def making(cls: type, values: tuple[Any, ...]) -> Burst:
    """`cls(...)`."""
    weight, bias, size, rate, flag = values
    return unrolled(
        "cls(weight, bias, size, rate, flag)",
        cls=cls,
        weight=weight,
        bias=bias,
        size=size,
        rate=rate,
        flag=flag,
    )


def making_activated(cls: type, values: tuple[Any, ...]) -> Burst:
    """`cls(...)` with an activation."""
    weight, bias = values
    return unrolled("cls(weight, bias, relu)", cls=cls, weight=weight, bias=bias, relu=jax.nn.relu)


def rows(quick: bool) -> Iterator[Row]:
    """Each style of class, then a copy with one field replaced."""
    rounds = 4 if quick else 60
    libraries = installed(*FILTERING)
    nnx = installed("NNX")
    values = (jnp.ones((3, 2)), jnp.zeros(3), 3, 0.5, True)
    for style in STYLES:
        bursts = {DATACLASS: making(style.plain, values)}
        if style.in_nnx:
            bursts |= {name: making(nnx_class(lib), values) for name, lib in nnx.items()}
        bursts |= {name: making(style.module(lib), values) for name, lib in libraries.items()}
        yield raced(style.label, bursts, rounds=rounds, share=1 / UNROLLED, limit=style.limit)
    for is_static in (False, True):
        for own in (False, True):
            kind = "static function" if is_static else "function in a field"
            label = f"{kind}, {'own' if own else 'generated'} __init__"
            make = with_function(is_static, own)
            classes = {DATACLASS: PLAIN_ACTIVATED}
            classes |= {name: make(library) for name, library in libraries.items()}
            bursts = {name: making_activated(cls, values[:2]) for name, cls in classes.items()}
            yield raced(label, bursts, rounds=rounds, share=1 / UNROLLED, limit=FUNCTION_LIMIT)
    yield from static_rows(rounds, libraries)
    # Equinox's Modules have no `replace`; its users call the one of dataclasses.
    bursts = {
        name: unrolled("replace(node, bias=bias)", replace=replace, node=node, bias=values[1])
        for name, (replace, node) in copiers(libraries, values).items()
    }
    yield raced("copy with one field replaced", bursts, rounds=rounds, share=1 / UNROLLED)
    yield from use_rows(rounds, values)


def copiers(libraries: dict[str, Any], values: tuple[Any, ...]) -> dict[str, tuple[Any, Any]]:
    """For each library, the function that replaces a field, and an instance."""
    found = {DATACLASS: (dataclasses.replace, Plain(*values))}
    for name, library in libraries.items():
        cls = with_written_init(library)
        found[name] = getattr(cls, "replace", dataclasses.replace), cls(*values)
    return found


BENCHMARK = Benchmark(
    "Constructing and using a Module, against a frozen dataclass", DATACLASS, rows
)

if __name__ == "__main__":
    BENCHMARK.main()
