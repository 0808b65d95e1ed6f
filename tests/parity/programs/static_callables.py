"""Functions in fields: static or not, lambdas, methods of others, defaults, swapped by tree_at."""

import operator
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp


def square(x):
    return x**2


class Reduce(eqx.Module):
    pointwise: Callable = square
    reduce: Callable = eqx.field(static=True, default=jnp.sum)
    post: Callable | None = None

    def __call__(self, x):
        y = self.reduce(self.pointwise(x))
        return y if self.post is None else self.post(y)


class Scale(eqx.Module):
    by: jax.Array

    def __call__(self, x):
        return self.by * x

    def halved(self, x):
        return 0.5 * self.by * x


def traced():
    seen = []

    @eqx.filter_jit
    def run(f, x):
        seen.append(1)
        return f(x)

    return run, seen


def main():
    run, seen = traced()
    x = jnp.arange(3.0)
    scale = Scale(jnp.array(2.0))
    reducers = [
        Reduce(),
        Reduce(),
        Reduce(scale),
        Reduce(Scale(jnp.array(3.0))),
        Reduce(scale.halved, post=jnp.sqrt),
        Reduce(operator.neg, jnp.max),
        Reduce(eqx.Partial(jnp.add, x)),
        Reduce(post=eqx.filter_jit(square)),
    ]
    values = [run(reducer, x) for reducer in reducers]
    swapped = eqx.tree_at(lambda r: r.pointwise, reducers[0], jnp.abs)
    grads = eqx.filter_grad(lambda r: run(r, x))(reducers[2])
    partial = eqx.Partial(lambda a, b, *, c: a * b + c, scale.by, c=jnp.array(1.0))
    return (
        values,
        len(seen),
        run(swapped, -x),
        grads.pointwise,
        partial(jnp.array(4.0)),
        run(partial, x),
    )
