"""A Kalman filter over a named tuple: scan, named tuples inside Modules, tree_at on them."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


class Belief(NamedTuple):
    mean: jax.Array
    cov: jax.Array


class Model(eqx.Module):
    transition: jax.Array
    observation: jax.Array
    prior: Belief
    noise: dict[str, float]

    def predict(self, belief):
        a = self.transition
        cov = a @ belief.cov @ a.T + self.noise["process"] * jnp.eye(len(a))
        return belief._replace(mean=a @ belief.mean, cov=cov)

    def update(self, belief, seen):
        h = self.observation
        gain = belief.cov @ h / (h @ belief.cov @ h + self.noise["observation"])
        mean = belief.mean + gain * (seen - h @ belief.mean)
        return Belief(mean, belief.cov - jnp.outer(gain, h) @ belief.cov)

    def __call__(self, observations):
        def body(belief, seen):
            belief = self.update(self.predict(belief), seen)
            return belief, belief.mean

        return jax.lax.scan(body, self.prior, observations)


def main():
    f32 = np.float32
    prior = Belief(jnp.zeros(2), jnp.eye(2))
    model = Model(
        jnp.asarray([[1.0, 0.1], [0.0, 1.0]]),
        jnp.asarray([1.0, 0.0]),
        prior,
        {"process": 0.01, "observation": 0.1},
    )
    model = eqx.tree_at(lambda m: m.prior.mean, model, jnp.asarray([0.5, 0.0]))
    model = eqx.tree_at(lambda m: m.noise["process"], model, replace_fn=lambda q: q * 2)
    run = eqx.filter_jit(lambda model, ys: model(ys))
    return (
        model,
        run(model, np.array([0.5, 0.6, 0.8], f32)),
        str(jax.tree.structure(model)).count("*"),
    )
