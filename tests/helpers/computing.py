"""Computed leaves, and classes of every style that hold one."""

from typing import ClassVar

import jax
import jax.numpy as jnp

import pytreemod as pm
from tests.helpers.trees import ramp


class Scaled(pm.Computed):
    """`array * factor`."""

    array: jax.Array
    factor: jax.Array = pm.field(role="factor")

    def value(self):
        return self.array * self.factor


class Layer(pm.Module):
    """What the classes below compute."""

    def __call__(self, x):
        return self.weight * x + self.bias


class Generated(Layer):
    """No `__init__` of its own."""

    weight: jax.Array
    bias: jax.Array


class Own(Layer):
    """An `__init__` that assigns."""

    weight: jax.Array
    bias: jax.Array
    name: str = pm.field(static=True)

    def __init__(self, weight, bias):
        self.name = "own"
        self.bias = bias
        self.weight = weight


class Defaults(Layer):
    """Fields with defaults, which are attributes of the class too."""

    bias: jax.Array
    weight: jax.Array | float = 1.0
    used: ClassVar[int] = 3


class Converting(Layer):
    """A converter that would replace the computed leaf by an array."""

    weight: jax.Array = pm.field(converter=jnp.asarray)
    bias: jax.Array = pm.field(converter=jnp.asarray)


class Counting(Layer):
    """A `__post_init__`, a `__check_init__` and a property that read the field."""

    weight: jax.Array
    bias: jax.Array
    size: int = pm.field(static=True, init=False)

    def __post_init__(self):
        self.size = 2

    def __check_init__(self):
        if self.weight.shape != (self.size,):
            raise ValueError(f"weight has the shape {self.weight.shape}")

    @property
    def doubled(self):
        """The weight, twice."""
        return 2 * self.weight

    def __call__(self, x):
        return self.doubled / 2 * x + self.bias


STYLES = {
    "generated": Generated,
    "own": Own,
    "defaults": lambda weight, bias: Defaults(bias, weight),
    "converting": Converting,
    "counting": Counting,
}


def scaled():
    """A computed leaf that reads as `[3., 6.]`."""
    return Scaled(ramp(2), jnp.asarray(3.0))
