"""A critic with spectral normalisation: stateful layers in a Sequential, inference mode."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class Critic(eqx.Module):
    body: eqx.nn.Sequential
    out: eqx.nn.SpectralNorm

    def __init__(self, key):
        keys = jr.split(key, 4)
        self.body = eqx.nn.Sequential(
            [
                eqx.nn.SpectralNorm(eqx.nn.Linear(2, 3, key=keys[0]), "weight", key=keys[1]),
                eqx.nn.Lambda(ft.partial(jax.nn.leaky_relu, negative_slope=0.2)),
            ]
        )
        self.out = eqx.nn.SpectralNorm(eqx.nn.Linear(3, 1, key=keys[2]), "weight", key=keys[3])

    def __call__(self, x, state):
        x, state = self.body(x, state)
        return self.out(x, state)


@eqx.filter_jit
def score(critic, xs, state):
    return jax.vmap(critic, in_axes=(0, None), out_axes=(0, None))(xs, state)


def main():
    critic, state = eqx.nn.make_with_state(Critic)(jr.PRNGKey(0))
    xs = jnp.arange(4.0).reshape(2, 2)
    ys, state = score(critic, xs, state)
    again, state = score(critic, xs, state)
    frozen = eqx.nn.inference_mode(critic)
    out, after = score(frozen, xs, state)
    grads = eqx.filter_grad(lambda c: jnp.sum(score(c, xs, after)[0]))(frozen)
    return ys, again, out, grads.out.layer.weight, critic.body.is_stateful()
