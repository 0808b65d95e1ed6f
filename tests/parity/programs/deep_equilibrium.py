"""A deep equilibrium layer: a fixed point forward, its adjoint equation backward."""

import equinox as eqx
import jax
import jax.numpy as jnp


def iterate(f, z, n=30):
    return jax.lax.fori_loop(0, n, lambda _, z: f(z), z)


@eqx.filter_custom_vjp
def fixed_point(args, cell, z0):
    x = args
    return iterate(lambda z: cell(z, x), z0)


@fixed_point.def_fwd
def fixed_point_fwd(perturbed, args, cell, z0):
    out = fixed_point(args, cell, z0)
    return out, (out, perturbed)


@fixed_point.def_bwd
def fixed_point_bwd(residuals, grad_out, perturbed, args, cell, z0):
    z, seen = residuals
    assert seen == perturbed
    _, vjp_z = jax.vjp(lambda z: cell(z, args), z)
    adjoint = iterate(lambda u: grad_out + vjp_z(u)[0], jnp.zeros_like(z0))
    _, vjp_x = jax.vjp(lambda x: cell(z, x), args)
    return vjp_x(adjoint)[0]


class Cell(eqx.Module):
    w: jax.Array
    u: jax.Array

    def __init__(self, size, key):
        wkey, ukey = jax.random.split(key)
        self.w = 0.3 * jax.random.normal(wkey, (size, size))
        self.u = jax.random.normal(ukey, (size, size))

    def __call__(self, z, x):
        return jnp.tanh(self.w @ z + self.u @ x)


def main():
    cell = Cell(3, jax.random.PRNGKey(1))
    run = lambda x: jnp.sum(fixed_point(x, cell, jnp.zeros(3)) ** 2)
    x = jnp.array([0.1, 0.2, 0.3])
    return run(x), jax.grad(run)(x), eqx.filter_jit(eqx.filter_grad(run))(x)
