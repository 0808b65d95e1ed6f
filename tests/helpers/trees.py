"""A catalogue of example trees, filter specs, and Module classes of every style.

Everything here is defined at the top level of the file, so that instances can be pickled, and is
tiny, so that every law can be tried on everything.
"""

import abc
import dataclasses
import enum
import functools as ft
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import pytreemod as pm
from tests.helpers import string_annotations

T = TypeVar("T")
Pair = namedtuple("Pair", ["first", "second"])


ONE = np.float32(1)


def ramp(*shape: int, start: Any = ONE) -> jax.Array:
    """Different numbers, starting at `start`: `ramp(2) == [1, 2]`."""
    return jnp.asarray(np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + start)


def double(x: Any) -> Any:
    """A function to put into fields."""
    return x + x


def new(*bases: type, fields: Any = (), **body: Any) -> Any:
    """A Module class with these annotations, and this in its body."""
    body = {"__annotations__": dict(fields), "__module__": __name__, **body}
    return type(pm.Module)("Made", bases or (pm.Module,), body)


class Color(enum.Enum):
    """A value that is not an array, a string or a function."""

    RED = 1
    BLUE = 2


# ---- classes without their own __init__


class Affine(pm.Module):
    """Two arrays and a call: the class that most tests need."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.weight @ x + self.bias

    def scaled(self, x: jax.Array, *, by: float = 1.0) -> jax.Array:
        """A method with an argument by keyword."""
        return by * self(x)


def affine(rows: int = 2, columns: int = 3, start: Any = ONE) -> Affine:
    """An `Affine`."""
    return Affine(ramp(rows, columns, start=start), ramp(rows, start=-start))


class Empty(pm.Module):
    """No fields."""


class Defaults(pm.Module):
    """Class-level defaults of every kind: a number, a string, a function, None, a Module."""

    weight: jax.Array
    scale: float = 2.0
    name: str = "default"
    act: Callable[[Any], Any] = double
    bias: jax.Array | None = None
    inner: Empty = Empty()


class Factories(pm.Module):
    """Defaults that are made for each instance."""

    parts: list[Any] = pm.field(default_factory=list)
    table: dict[str, Any] = pm.field(default_factory=lambda: {"a": np.ones(2, np.float32)})


class Converted(pm.Module):
    """Converters, one of them for a default."""

    weight: jax.Array = pm.field(converter=jnp.asarray)
    sizes: tuple[int, ...] = pm.field(converter=tuple, static=True, default=(1, 2))


class Static(pm.Module):
    """Declared configuration beside data."""

    weight: jax.Array
    size: Any = pm.field(static=True)
    mode: Any = pm.field(static=True, default="train")


class KeywordsOnly(pm.Module, kw_only=True):
    """Fields that can be passed by keyword only, whatever their order."""

    scale: float = 1.0
    weight: jax.Array


class Boxed(pm.Module, Generic[T]):
    """A generic class."""

    content: T


class NamedBox(Boxed[jax.Array]):
    """A subclass of a generic class at one type."""

    name: str = "box"


class Buffered(pm.Module):
    """Roles: a parameter, a buffer, and a custom role."""

    weight: jax.Array
    mean: jax.Array = pm.buffer()
    low_rank: jax.Array = pm.field(role="lora")
    inner: Any = pm.field(role="lora", default=None)


class Prepared(pm.Module):
    """`__post_init__`, an `InitVar` and a field that `__init__` does not take."""

    scale: dataclasses.InitVar[float]
    weight: jax.Array
    scaled: jax.Array = pm.field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.scaled = scale * self.weight


class Checked(pm.Module):
    """`__check_init__`."""

    low: float
    high: float

    def __check_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")


# ---- classes with a custom __init__


class OwnInit(pm.Module):
    """The style of most layers."""

    weight: jax.Array
    bias: jax.Array | None
    size: int = pm.field(static=True)

    def __init__(self, size: int, *, use_bias: bool = True) -> None:
        self.size = size
        self.weight = ramp(size)
        self.bias = jnp.zeros(size) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.weight * x
        return y if self.bias is None else y + self.bias


class DefaultsUnderOwnInit(pm.Module):
    """Class-level defaults that a custom `__init__` does not set."""

    weight: jax.Array
    scale: float = 2.0
    act: Callable[[Any], Any] = double

    def __init__(self, size: int) -> None:
        self.weight = ramp(size)


class Parent(OwnInit):
    """Inherits a custom `__init__` and adds a default."""

    temperature: float = 0.5


class Child(Parent):
    """A custom `__init__` that overrides one, a converter, and a method that calls `super()`."""

    name: str
    offset: jax.Array = pm.field(converter=jnp.asarray)

    def __init__(self, name: str, size: int) -> None:
        super().__init__(size, use_bias=False)
        self.name = name
        self.offset = np.float32(0.25)

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) + self.offset


# ---- abstract classes


class AbstractLayer(pm.Module):
    """An interface: two abstract attributes and an abstract method."""

    weight: pm.AbstractVar[jax.Array]
    label: pm.AbstractClassVar[str]

    @abc.abstractmethod
    def __call__(self, x: jax.Array) -> jax.Array: ...


class ConcreteLayer(AbstractLayer):
    """Provides the attribute as a field."""

    weight: jax.Array
    label: ClassVar[str] = "concrete"

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.weight * x


class PropertyLayer(AbstractLayer):
    """Provides the attribute as a property."""

    root: jax.Array
    label = "property"

    @property
    def weight(self) -> jax.Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Computed from a field."""
        return self.root**2

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.weight * x


# ---- fields with values that are not arrays


class Holder(pm.Module):
    """One field for anything."""

    content: Any


class AutoConfiguration(pm.Module):
    """Fields that are configuration because of their values."""

    weight: jax.Array
    function: Any = double
    builtin: Any = max
    ufunc: Any = np.exp
    jitted: Any = None
    partial: Any = None
    cls: Any = Affine
    name: Any = "name"


JITTED = jax.jit(double)
TRIPLE = ft.partial(jnp.multiply, 3.0)


class Containers(pm.Module):
    """Containers of containers."""

    items: list[Any]
    table: dict[str, Any]
    pair: tuple[Any, ...]
    nothing: None = None


class Wrapping(pm.Module):
    """A Module with the name of the function that it wraps."""

    fn: Any

    @property
    def __wrapped__(self) -> Any:
        return self.fn

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)


# ---- classes with custom attribute access


class OwnGetattr(pm.Module):
    """A `__getattr__` for missing attributes."""

    weight: jax.Array
    scale: float = 2.0

    def __getattr__(self, name: str) -> Any:
        if name == "magic":
            return 42
        raise AttributeError(f"no {name} here")


class OwnGetattribute(pm.Module):
    """A `__getattribute__`, which sees every access."""

    weight: jax.Array

    def __getattribute__(self, name: str) -> Any:
        return 42 if name == "magic" else super().__getattribute__(name)


class WithProperty(pm.Module):
    """Properties, one of them broken."""

    weight: jax.Array

    @property
    def doubled(self) -> jax.Array:
        """Computed."""
        return self.weight + self.weight

    @property
    def broken(self) -> Any:
        """Raises an AttributeError."""
        return self.missing_thing  # pyright: ignore[reportAttributeAccessIssue]


class Bounded(pm.Module):
    """A field that takes positive numbers alone."""

    weight: jax.Array = pm.field(constraint=pm.constraints.positive)
    inner: Any


def by_hand() -> Affine:
    """An instance that was made without calling the class."""
    made = object.__new__(Affine)
    object.__setattr__(made, "weight", ramp(2, 3))
    object.__setattr__(made, "bias", ramp(2))
    return made


MODULES: dict[str, Callable[[], pm.Module]] = {
    "affine": affine,
    "affine with other leaves": lambda: Affine(1.5, "a string"),  # pyright: ignore
    "empty": Empty,
    "defaults kept": lambda: Defaults(ramp(2)),
    "defaults replaced": lambda: Defaults(ramp(2), 3.0, "other", abs, ramp(2), Empty()),
    "a Module where others hold a function": lambda: Defaults(ramp(2), act=affine()),
    "factories kept": Factories,
    "factories replaced": lambda: Factories([1, ramp(2)], {}),
    "converted": lambda: Converted([1.0, 2.0], [3, 4]),  # pyright: ignore
    "static": lambda: Static(ramp(2), 3, ("a", Color.RED)),
    "keywords only": lambda: KeywordsOnly(weight=ramp(2)),
    "generic": lambda: Boxed[jax.Array](ramp(2)),
    "generic subclass": lambda: NamedBox(ramp(2)),
    "buffered": lambda: Buffered(ramp(2), ramp(2), ramp(2), affine()),
    "prepared": lambda: Prepared(2.0, ramp(2)),
    "checked": lambda: Checked(1.0, 2.0),
    "own init": lambda: OwnInit(3),
    "own init with None": lambda: OwnInit(2, use_bias=False),
    "defaults under own init": lambda: DefaultsUnderOwnInit(2),
    "parent": lambda: Parent(2),
    "child": lambda: Child("a", 2),
    "concrete layer": lambda: ConcreteLayer(ramp(2)),
    "property layer": lambda: PropertyLayer(ramp(2)),
    "automatic configuration": lambda: AutoConfiguration(ramp(2), jitted=JITTED, partial=TRIPLE),
    "containers": lambda: Containers(
        [ramp(2), [1, "text"]], {"b": affine(), "a": (None, 2.0)}, (Pair(1, ramp(2)), {}), None
    ),
    "holds a partial": lambda: Holder(pm.Partial(double, ramp(2), by=[ramp(1)])),
    "holds a bound method": lambda: Holder(affine().scaled),
    "holds a filter_jit": lambda: Holder(pm.filter_jit(double)),
    "holds a filter_jit of a Module": lambda: Holder(pm.filter_jit(affine())),
    "holds a struct": lambda: Holder(jax.ShapeDtypeStruct((2,), jnp.float32)),
    "holds an enum": lambda: Holder([Color.BLUE, 1j, True, np.float32(1.0)]),
    "holds a key": lambda: Holder(jax.random.key(0)),
    "holds a NumPy array": lambda: Holder(np.arange(3)),
    "partial": lambda: pm.Partial(double, ramp(2)),
    "wraps a function": lambda: pm.module_update_wrapper(Wrapping(double)),
    "wraps a Module": lambda: Wrapping(affine()),
    "own __getattr__": lambda: OwnGetattr(ramp(2)),
    "own __getattribute__": lambda: OwnGetattribute(ramp(2)),
    "property": lambda: WithProperty(ramp(2)),
    "string annotations": lambda: string_annotations.Written(ramp(2), double),
    "string annotations, abstract": lambda: string_annotations.Provided(ramp(2)),
    "string annotations, InitVar": lambda: string_annotations.Initialized(2),
    "string annotations, nested": lambda: string_annotations.Pair(string_annotations.Pair(ramp(2))),
    "computed leaf": lambda: Affine(pm.computed(jnp.negative, ramp(2, 3)), ramp(2)),
    "constrained": lambda: Bounded(ramp(2, start=1.0), affine()),
    "tied": lambda: pm.tie(Affine(affine(), affine()), "bias.bias", to="weight.bias"),  # pyright: ignore
    "tied through": lambda: pm.tie(
        Affine(ramp(2, 3), ramp(3, 2)), "bias", to="weight", through=jnp.transpose
    ),
    "own roles and axes": lambda: pm.with_axis_names(
        pm.with_role(affine(), "bias", "buffer"), pm.by({"bias": "rows", ...: None})
    ),
    "token": lambda: pm.StateIndex(ramp(2)),
    "by hand": by_hand,
}
"""A maker for each style of class, and for each kind of value that a field may have."""

every_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())
"""Runs a test on each; `make()` gives a new instance."""


@jtu.register_pytree_with_keys_class
class Registered:
    """A node that another library has registered with JAX."""

    def __init__(self, value: Any, note: str) -> None:
        self.value = value
        self.note = note

    def tree_flatten_with_keys(self) -> Any:
        return ((jtu.GetAttrKey("value"), self.value),), self.note

    def tree_flatten(self) -> Any:
        return (self.value,), self.note

    @classmethod
    def tree_unflatten(cls, note: str, children: Any) -> "Registered":
        return cls(children[0], note)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Registered) and self.note == other.note

    __hash__ = None  # pyright: ignore[reportAssignmentType]


TREES: dict[str, Callable[[], Any]] = {
    "array": lambda: ramp(2),
    "number": lambda: 1.5,
    "string": lambda: "text",
    "None": lambda: None,
    "empty containers": lambda: [(), {}, [], None],
    "list": lambda: [1, ramp(2), "a", None],
    "dict": lambda: {"b": ramp(1), "a": {"c": 2, "d": [ramp(2), 3.0]}},
    "named tuple": lambda: Pair(ramp(2), Pair(1, 2)),
    "ordered dict": lambda: OrderedDict(b=ramp(1), a=1),
    "registered": lambda: [Registered(ramp(2), "note"), Registered(1, "other")],
    "one array twice": lambda: (lambda x: [x, (x,)])(ramp(2)),
    "Modules": lambda: {"a": affine(), "b": [OwnInit(2), Defaults(ramp(1))]},
}
"""Trees that are not Modules, or contain several."""

ALL_TREES: dict[str, Callable[[], Any]] = {**TREES, **MODULES}

every_tree = pytest.mark.parametrize("make", ALL_TREES.values(), ids=ALL_TREES.keys())
"""Runs a test on each tree and each Module."""

SPECS: dict[str, Any] = {
    "everything": True,
    "nothing": False,
    "dots": ...,
    "arrays": pm.is_array,
    "inexact arrays": pm.is_inexact_array,
    "array-likes": pm.is_array_like,
    "a predicate": lambda leaf: isinstance(leaf, (int, str)),
    "a class": Affine,
    "two types": pm.select.type(list, Defaults),
    "a role": pm.select.role("buffer"),
    "roles or arrays": pm.select.role("lora") | pm.is_array,
    "not below a tuple": ~pm.select.type(tuple) & pm.is_array,
    "by": pm.by({Affine: True, pm.is_array: False, ...: True}),
}
"""Specs that fit every tree."""
