"""Decorators on methods: own wrappers, jit with options, grad, vmap, static ones, partials."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp


def logged(calls):
    def decorate(method):
        @ft.wraps(method)
        def wrapper(self, *args, **kwargs):
            calls.append(method.__name__)
            return method(self, *args, **kwargs)

        return wrapper

    return decorate


CALLS = []


class Model(eqx.Module):
    weight: jax.Array
    power: int = eqx.field(static=True, default=2)

    @logged(CALLS)
    def plain(self, x):
        return self.weight * x**self.power

    @eqx.filter_jit
    def jitted(self, x, *, flag=False):
        return self.plain(x) + flag

    @eqx.filter_vmap(in_axes=(None, 0))
    def mapped(self, x):
        return self.jitted(x)

    @eqx.filter_grad
    def gradient(self, x):
        return jnp.sum(self.weight * x)

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def loss(self, x):
        y = self.plain(x)
        return jnp.sum(y), y

    @classmethod
    @logged(CALLS)
    def make(cls, n):
        return cls(jnp.arange(1.0, n + 1))

    @staticmethod
    @eqx.filter_jit
    def double(x):
        return 2 * x

    @ft.partial(jax.jit, static_argnums=2)
    def static(self, x, n):
        return self.weight * x * n

    cube = ft.partialmethod(jitted, flag=True)

    @property
    @logged(CALLS)
    def total(self):
        return self.weight.sum()


def main():
    model = Model.make(2)
    x = jnp.ones(2)
    value, grads = model.loss(x)
    results = [
        model.jitted(x),
        model.mapped(jnp.ones((3, 2))),
        model.gradient(x),
        value,
        grads,
        Model.double(x),
        model.double(x),
        model.static(x, 3),
        model.cube(x),
        model.total,
    ]
    unbound = Model.jitted(model, x), jax.vmap(model.plain)(jnp.eye(2)), Model.plain.__name__
    return results, unbound, CALLS[:2], Model.jitted.__name__, Model.__name__
