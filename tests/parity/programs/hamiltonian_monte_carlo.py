"""Hamiltonian Monte Carlo on the parameters of a net: partition, leapfrog, accept by tree_map."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu


class Target(eqx.Module):
    net: eqx.nn.Linear
    temperature: float = 1.0

    def potential(self, x, y):
        return jnp.sum((self.net(x) - y) ** 2) / self.temperature


class Info(eqx.Module):
    accepted: jax.Array
    energy: jax.Array


def axpy(scale, xs, ys):
    return jtu.tree_map(lambda x, y: y + scale * x, xs, ys)


@eqx.filter_jit
def hmc_step(target, key, x, y, step_size=0.05, num_steps=4):
    params, static = eqx.partition(target, eqx.is_inexact_array)
    potential = lambda params: eqx.combine(params, static).potential(x, y)
    momentum_key, accept_key = jr.split(key)
    leaves, treedef = jtu.tree_flatten(params)
    keys = jr.split(momentum_key, len(leaves))
    momentum = treedef.unflatten([jr.normal(k, p.shape) for k, p in zip(keys, leaves)])
    kinetic = lambda m: 0.5 * sum(jnp.sum(leaf**2) for leaf in jtu.tree_leaves(m))
    start = potential(params) + kinetic(momentum)

    def leapfrog(_, carry):
        params, momentum = carry
        momentum = axpy(-step_size / 2, jax.grad(potential)(params), momentum)
        params = axpy(step_size, momentum, params)
        return params, axpy(-step_size / 2, jax.grad(potential)(params), momentum)

    new, momentum = jax.lax.fori_loop(0, num_steps, leapfrog, (params, momentum))
    end = potential(new) + kinetic(momentum)
    accepted = jnp.log(jr.uniform(accept_key)) < start - end
    params = jtu.tree_map(lambda a, b: jnp.where(accepted, a, b), new, params)
    return eqx.combine(params, static), Info(accepted, end)


def main():
    target = Target(eqx.nn.Linear(2, 1, key=jr.PRNGKey(0)))
    infos = []
    for key in jr.split(jr.PRNGKey(1), 3):
        target, info = hmc_step(target, key, jnp.ones(2), jnp.ones(1))
        infos.append(info)
    return target, infos, isinstance(target.temperature, float)
