"""An Ising model: a static callable, an enumeration of boundaries, a checkerboard update."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class Edge(eqx.Enumeration):
    wrap = "spins wrap around"
    free = "spins end at the edge"


def metropolis(delta, beta):
    return jnp.exp(-beta * delta)


def glauber(delta, beta):
    return jax.nn.sigmoid(-beta * delta)


class Ising(eqx.Module):
    coupling: float
    rule: Callable = eqx.field(static=True, default=metropolis)
    edge: str = eqx.field(static=True, default="wrap")

    def neighbours(self, spins):
        total = sum(jnp.roll(spins, s, axis) for axis in (0, 1) for s in (-1, 1))
        if Edge[getattr(Edge, self.edge)] == Edge[Edge.free]:
            mask = jnp.zeros_like(spins).at[1:-1, 1:-1].set(1)
            total = total * mask
        return total

    @eqx.filter_jit
    def sweep(self, spins, key, beta):
        grid = jnp.indices(spins.shape).sum(0) % 2
        for parity, noise in enumerate(jr.split(key)):
            delta = 2 * self.coupling * spins * self.neighbours(spins)
            flip = jr.uniform(noise, spins.shape) < self.rule(delta, beta)
            spins = jnp.where(flip & (grid == parity), -spins, spins)
        return spins, jnp.mean(spins)


def main():
    spins = jnp.where(jr.bernoulli(jr.key(0), 0.5, (4, 4)), 1.0, -1.0)
    models = [Ising(1.0), Ising(1.0, glauber), Ising(0.5, edge="free")]
    runs = [model.sweep(spins, jr.key(1), 0.4) for model in models]
    return runs, Ising(1.0) == models[0], models[0] == models[1]
