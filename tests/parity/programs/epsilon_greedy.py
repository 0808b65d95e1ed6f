"""Bandit policies: chosen by name from a registry that __init_subclass__ fills."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class Policy(eqx.Module):
    registry: ClassVar[dict[str, type]] = {}
    values: jax.Array
    counts: jax.Array

    def __init_subclass__(cls, tag=None, **kwargs):
        super().__init_subclass__(**kwargs)
        if tag is not None:
            Policy.registry[tag] = cls

    @classmethod
    def make(cls, name, arms, **kwargs):
        return cls.registry[name](jnp.zeros(arms), jnp.zeros(arms, jnp.int32), **kwargs)

    def learn(self, arm, reward):
        counts = self.counts.at[arm].add(1)
        values = self.values.at[arm].add((reward - self.values[arm]) / counts[arm])
        return eqx.tree_at(lambda p: (p.values, p.counts), self, (values, counts))


class Greedy(Policy, tag="greedy"):
    epsilon: float = 0.1

    def act(self, key):
        explore, where = jr.split(key)
        arm = jr.randint(where, (), 0, self.values.size)
        return jnp.where(jr.bernoulli(explore, self.epsilon), arm, jnp.argmax(self.values))


class UCB(Policy, tag="ucb"):
    c: float = eqx.field(default=2.0, kw_only=True)

    def act(self, key):
        bonus = jnp.sqrt(jnp.log(1.0 + self.counts.sum()) / (self.counts + 1e-2))
        return jnp.argmax(self.values + self.c * bonus)


@eqx.filter_jit
def play(policy, means, key, n=6):
    params, static = eqx.partition(policy, eqx.is_array)

    def body(params, key):
        policy = eqx.combine(params, static)
        arm = policy.act(key)
        policy = policy.learn(arm, means[arm])
        return eqx.filter(policy, eqx.is_array), arm

    params, arms = jax.lax.scan(body, params, jr.split(key, n))
    return eqx.combine(params, static), arms


def main():
    means = jnp.array([0.1, 0.5, 0.9])
    runs = [
        play(Policy.make(name, 3, **options), means, jr.PRNGKey(2))
        for name, options in [("greedy", {"epsilon": 0.5}), ("ucb", {"c": 1.0})]
    ]
    return runs, sorted(Policy.registry)
