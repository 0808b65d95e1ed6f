"""A Newton solver whose derivative is that of the root: the implicit function theorem."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp


class Newton(eqx.Module):
    rtol: float = 1e-6
    max_steps: int = eqx.field(static=True, default=20)

    def __call__(self, fn: Callable, y0: jax.Array, args: Any):
        def cond(carry):
            step, _, size = carry
            return (step < self.max_steps) & (size > self.rtol)

        def body(carry):
            step, y, _ = carry
            delta = jnp.linalg.solve(jax.jacfwd(fn)(y, args), fn(y, args))
            return step + 1, y - delta, jnp.max(jnp.abs(delta))

        return jax.lax.while_loop(cond, body, (0, y0, jnp.array(jnp.inf)))[1]


@eqx.filter_custom_jvp
def root_find(fn, solver, y0, *, args):
    return solver(fn, y0, args)


@root_find.def_jvp
def root_find_jvp(primals, tangents, *, args):
    fn, solver, y0 = primals
    t_fn, _, _ = tangents
    del args
    root = root_find(fn, solver, y0, args=None)
    arrays, rest = eqx.partition(fn, eqx.is_inexact_array)
    _, t_out = eqx.filter_jvp(lambda a: eqx.combine(a, rest)(root, None), (arrays,), (t_fn,))
    jacobian = jax.jacfwd(fn)(root, None)
    return root, -jnp.linalg.solve(jacobian, t_out)


class Circle(eqx.Module):
    radius: jax.Array
    slope: jax.Array

    def __call__(self, y, args):
        return jnp.stack([jnp.sum(y**2) - self.radius**2, y[1] - self.slope * y[0]])


def main():
    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(circle):
        return jnp.sum(root_find(circle, Newton(), jnp.array([1.0, 0.5]), args=None))

    circle = Circle(jnp.array(2.0), jnp.array(1.0))
    value, grad = loss(circle)
    jac = jax.jacrev(lambda r: root_find(Circle(r, circle.slope), Newton(), jnp.ones(2), args=None))
    return value, grad, jac(jnp.array(2.0))
