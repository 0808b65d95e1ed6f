"""Linear operators as values: abstract methods, arithmetic, dispatch on the class."""

import abc
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp


class AbstractOperator(eqx.Module):
    @abc.abstractmethod
    def mv(self, vector): ...

    @property
    @abc.abstractmethod
    def size(self) -> int: ...

    def as_matrix(self):
        return jax.vmap(self.mv, out_axes=1)(jnp.eye(self.size))

    def __add__(self, other):
        if not isinstance(other, AbstractOperator):
            return NotImplemented
        return Sum(self, other)

    def __mul__(self, scalar):
        return Scaled(self, jnp.asarray(scalar))

    __rmul__ = __mul__

    def __matmul__(self, other):
        return Product(self, other)

    def __neg__(self):
        return self * -1.0

    @property
    def T(self):
        return transpose(self)


class Matrix(AbstractOperator):
    matrix: jax.Array
    tags: frozenset = eqx.field(static=True, default=frozenset())

    def mv(self, vector):
        return self.matrix @ vector

    @property
    def size(self):
        return self.matrix.shape[0]


class Diagonal(AbstractOperator):
    diagonal: jax.Array

    def mv(self, vector):
        return self.diagonal * vector

    @property
    def size(self):
        return len(self.diagonal)


class _Pair(AbstractOperator):
    left: AbstractOperator
    right: AbstractOperator

    @property
    def size(self):
        return self.left.size


class Sum(_Pair):
    def mv(self, vector):
        return self.left.mv(vector) + self.right.mv(vector)


class Product(_Pair):
    def mv(self, vector):
        return self.left.mv(self.right.mv(vector))


class Scaled(AbstractOperator):
    operator: AbstractOperator
    scalar: jax.Array
    size = property(lambda self: self.operator.size)

    def mv(self, vector):
        return self.scalar * self.operator.mv(vector)


@ft.singledispatch
def transpose(operator):
    raise NotImplementedError(type(operator).__name__)


@transpose.register
def _(operator: Matrix):
    return Matrix(operator.matrix.T, operator.tags)


@transpose.register(Diagonal)
def _(operator):
    return operator


@transpose.register(Sum)
def _(operator):
    return type(operator)(operator.left.T, operator.right.T)


@transpose.register(Product)
def _(operator):
    return Product(operator.right.T, operator.left.T)


@transpose.register(Scaled)
def _(operator):
    return Scaled(transpose(operator.operator), operator.scalar)


@eqx.filter_jit
def conjugate_gradient(operator, b, steps):
    def body(carry, _):
        x, r, p = carry
        alpha = (r @ r) / (p @ operator.mv(p))
        x, new = x + alpha * p, r - alpha * operator.mv(p)
        return (x, new, new + (new @ new) / (r @ r) * p), jnp.linalg.norm(new)

    return jax.lax.scan(body, (jnp.zeros_like(b), b, b), None, length=steps)


def main():
    a = Matrix(jnp.array([[1.0, 2.0], [0.0, 3.0]]), frozenset({"upper"}))
    normal = a.T @ a + 0.5 * Diagonal(jnp.ones(2))
    (x, *_), residuals = conjugate_gradient(normal, jnp.array([1.0, -1.0]), 2)
    grad = eqx.filter_grad(lambda op: jnp.sum(conjugate_gradient(op, jnp.ones(2), 2)[0][0]))(normal)
    try:
        a + 1
    except TypeError:
        refused = "TypeError"
    return x, residuals, grad, normal.as_matrix(), (-a).T, refused, a.tags
