"""Behaviour from mixins: plain ones, Module ones, abstract properties, cooperative super(), MRO."""

import abc
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp


class Named:
    """A plain mixin."""

    def describe(self):
        return f"{type(self).__name__}({', '.join(self.parts())})"

    def parts(self):
        return []

    @classmethod
    def kind(cls):
        return cls.__name__.lower()


class Countable(eqx.Module):
    @property
    def n_params(self):
        return sum(x.size for x in jax.tree.leaves(eqx.filter(self, eqx.is_array)))


class Shaped(abc.ABC):
    @property
    @abc.abstractmethod
    def n_in(self): ...

    @staticmethod
    def scale(x):
        return 2 * x


class Layer(Named, Countable, Shaped):
    weight: jax.Array

    def parts(self):
        return ["weight", *super().parts()]

    @property
    def n_in(self):
        return self.weight.shape[-1]

    def __call__(self, x):
        return self.scale(self.weight @ x)


class WithBias(Layer):
    bias: jax.Array
    gain: float = 1.0

    def parts(self):
        return [*super().parts(), "bias"]

    @ft.cached_property
    def expensive(self):
        return self.weight.sum()

    def __call__(self, x):
        return self.gain * super().__call__(x) + self.bias


def main():
    layer = WithBias(jnp.ones((2, 3)), jnp.arange(2.0))
    try:
        type("Half", (Named, Shaped, eqx.Module), {})()
    except TypeError:
        abstract = True
    try:
        cached = layer.expensive
    except (AttributeError, TypeError) as error:
        cached = type(error).__name__
    bound = eqx.filter_jit(layer.__call__)(jnp.ones(3)), eqx.filter_vmap(layer)(jnp.ones((2, 3)))
    mro = [c.__name__ for c in WithBias.__mro__[:5]]
    return (
        layer.describe(),
        layer.kind(),
        layer.n_params,
        layer.n_in,
        bound,
        abstract,
        mro,
        str(cached),
        layer,
    )
