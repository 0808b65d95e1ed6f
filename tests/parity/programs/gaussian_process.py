"""Gaussian process kernels that are added and multiplied; positive parameters are wrapped."""

from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


class Positive(eqx.Module):
    raw: jax.Array

    def __init__(self, value):
        self.raw = jnp.log(jnp.expm1(jnp.asarray(value, jnp.float32)))

    @property
    def value(self):
        return jax.nn.softplus(self.raw)


def resolve(tree):
    wrapped = lambda leaf: isinstance(leaf, Positive)
    return jax.tree.map(lambda leaf: leaf.value if wrapped(leaf) else leaf, tree, is_leaf=wrapped)


class Kernel(eqx.Module):
    @abstractmethod
    def __call__(self, a, b): ...

    def __add__(self, other):
        return Combined((self, other), jnp.add)

    def __mul__(self, other):
        return Combined((self, other), jnp.multiply)


class RBF(Kernel):
    length: Positive = eqx.field(converter=Positive)

    def __call__(self, a, b):
        return jnp.exp(-0.5 * jnp.sum((a - b) ** 2) / self.length**2)


class Linear(Kernel):
    scale: Positive = eqx.field(converter=Positive, default=1.0)

    def __call__(self, a, b):
        return self.scale * jnp.dot(a, b)


class Combined(Kernel):
    parts: tuple[Kernel, ...]
    combine: object = eqx.field(static=True)

    def __call__(self, a, b):
        first, *rest = [part(a, b) for part in self.parts]
        for other in rest:
            first = self.combine(first, other)
        return first


@eqx.filter_jit
@eqx.filter_value_and_grad
def negative_log_likelihood(kernel, xs, ys):
    kernel = resolve(kernel)
    gram = jax.vmap(lambda a: jax.vmap(lambda b: kernel(a, b))(xs))(xs) + 0.1 * jnp.eye(len(xs))
    factor = jnp.linalg.cholesky(gram)
    alpha = jax.scipy.linalg.solve_triangular(factor, ys, lower=True)
    return 0.5 * alpha @ alpha + jnp.sum(jnp.log(jnp.diagonal(factor)))


def main():
    xs = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
    kernel = RBF(0.7) * Linear() + RBF(2)
    return kernel, negative_log_likelihood(kernel, xs, np.sin(xs[:, 0]))
