"""The time to make an instance of a Module.

    python -m benchmarks.construction [--quick] [--json]

The baseline is a frozen dataclass with the same five fields: two arrays, an integer, a number and a
flag. In a Module the last three are configuration. Other rows have two arrays and a function, such
as an activation, which is declared static or not. The last rows have one array and a static value,
against a static integer; and layers with such values, against Equinox's.
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
from benchmarks.measuring import UNROLLED, Burst, unrolled
from benchmarks.tables import Benchmark, Row, raced

LIMIT = 3.0
FUNCTION_LIMIT = 4.0
STATIC_LIMIT = 2.0
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
    "LayerNorm": lambda nn, key: nn.LayerNorm(2),
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
        bursts = {
            name: unrolled("make(nn, key)", make=make, nn=library.nn, key=key)
            for name, library in libraries.items()
        }
        yield raced(f"{layer}, against Equinox's", bursts, rounds=rounds, share=1 / UNROLLED)


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


STYLES = (
    Style("5 fields, generated __init__", Plain, with_written_init),
    Style("5 fields, own __init__", Plain, with_own_init),
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
        yield raced(style.label, bursts, rounds=rounds, share=1 / UNROLLED, limit=LIMIT)
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


def copiers(libraries: dict[str, Any], values: tuple[Any, ...]) -> dict[str, tuple[Any, Any]]:
    """For each library, the function that replaces a field, and an instance."""
    found = {DATACLASS: (dataclasses.replace, Plain(*values))}
    for name, library in libraries.items():
        cls = with_written_init(library)
        found[name] = getattr(cls, "replace", dataclasses.replace), cls(*values)
    return found


BENCHMARK = Benchmark("Constructing a Module, against a frozen dataclass", DATACLASS, rows)

if __name__ == "__main__":
    BENCHMARK.main()
