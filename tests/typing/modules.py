"""Modules as users declare them: what a type checker must make of them.

These files are never run: `test_typing.py` has pyright check them.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar, assert_type

import jax
import jax.numpy as jnp

import pytreemod as pm

T = TypeVar("T")


def to_array(x: float) -> jax.Array:
    """A converter: what it takes is what the constructor takes."""
    return jnp.asarray(x)


class Linear(pm.Module):
    """Fields of every kind, and the constructor that is written for them."""

    weight: jax.Array
    scale: jax.Array = pm.field(converter=to_array)
    mean: jax.Array = pm.buffer()
    size: int = pm.field(static=True, default=3)
    bias: jax.Array | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute."""
        return self.weight @ x * self.scale - self.mean


class Options(pm.Module, kw_only=True):
    """Class options do not confuse the constructor."""

    depth: int
    names: tuple[str, ...] = pm.field(static=True, default=())
    table: dict[str, jax.Array] = pm.field(default_factory=lambda: dict[str, jax.Array]())


class Custom(pm.Module):
    """An `__init__` of its own."""

    layers: list[Linear]

    def __init__(self, depth: int, *, key: jax.Array):
        keys = jax.random.split(key, depth)
        self.layers = [Linear(k, 1.0, k) for k in keys]

    def __check_init__(self) -> None:
        """Checks see the declared types."""
        assert_type(self.layers[0].size, int)


class Box(pm.Module, Generic[T]):
    """A generic Module."""

    value: T

    def get(self) -> T:
        """The value."""
        return self.value

    def map(self, fn: Callable[[T], T]) -> "Box[T]":
        """Another box."""
        return Box(fn(self.value))


class Norm(pm.Module):
    """Abstract attributes and methods."""

    eps: pm.AbstractVar[float]

    @abstractmethod
    def normalize(self, x: jax.Array) -> jax.Array:
        """To be written."""


class RMSNorm(Norm):
    """Concrete: the field takes the abstract attribute's place."""

    eps: float
    gain: jax.Array

    def normalize(self, x: jax.Array) -> jax.Array:
        """Written."""
        return self.gain * x / (jnp.mean(x**2) + self.eps)


def construct(x: jax.Array, key: jax.Array) -> None:
    """Constructors, fields and methods have the declared types."""
    linear = Linear(x, 2.0, x, 4)
    assert_type(linear, Linear)
    assert_type(linear.weight, jax.Array)
    assert_type(linear.scale, jax.Array)
    assert_type(linear.mean, jax.Array)
    assert_type(linear.size, int)
    assert_type(linear.bias, jax.Array | None)
    assert_type(linear(x), jax.Array)
    assert_type(Linear(weight=x, scale=1.0, mean=x, bias=x), Linear)
    assert_type(Options(depth=2).table, dict[str, jax.Array])
    assert_type(Custom(3, key=key).layers, list[Linear])
    assert_type(Box(3).get(), int)
    assert_type(Box("a").map(str.upper), Box[str])
    assert_type(RMSNorm(1e-5, x).eps, float)
    assert_type(abstractly(RMSNorm(1e-5, x), x), jax.Array)


def abstractly(norm: Norm, x: jax.Array) -> jax.Array:
    """An abstract attribute can be read through the abstract class."""
    assert_type(norm.eps, float)
    return norm.normalize(x)


def change(linear: Linear, custom: Custom, x: jax.Array) -> None:
    """Changed copies are of the same class."""
    assert_type(linear.replace(weight=x), Linear)
    assert_type(pm.tree_at(lambda m: m.layers[0].weight, custom, x), Custom)


def call_methods(linear: Linear, x: jax.Array) -> None:
    """A method can be passed on as a function."""
    apply: Callable[[jax.Array], jax.Array] = linear
    get: Callable[[], int] = Box(3).get
    assert_type(apply(x), jax.Array)
    assert_type(get(), int)


def wrap(fn: Callable[[Any, Any], Any], x: jax.Array) -> None:
    """Modules that hold functions."""
    assert_type(pm.Partial(fn, x), pm.Partial[Any])
    assert_type(pm.nn.Lambda(jnp.tanh), pm.nn.Lambda)
