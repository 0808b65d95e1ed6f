"""Molecular dynamics with a neighbour list of fixed size: overflow is checked inside jit."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp


class NeighbourList(eqx.Module):
    index: jax.Array
    reference: jax.Array
    cutoff: float = eqx.field(static=True)

    @classmethod
    def build(cls, positions, cutoff, size):
        distance = jnp.linalg.norm(positions[:, None] - positions[None] + 1e-9, axis=-1)
        near = (distance < cutoff) & ~jnp.eye(len(positions), dtype=bool)
        index = jax.vmap(lambda row: jnp.nonzero(row, size=size, fill_value=-1)[0])(near)
        index = eqx.error_if(index, jnp.any(near.sum(1) > size), "too many neighbours")
        return cls(index, positions, cutoff)

    def update(self, positions):
        return dataclasses.replace(self, reference=positions)


class LennardJones(eqx.Module):
    epsilon: jax.Array
    sigma: jax.Array

    def __call__(self, positions, neighbours: NeighbourList):
        other = positions[neighbours.index]
        r2 = jnp.sum((positions[:, None] - other) ** 2, -1)
        r6 = (self.sigma**2 / jnp.where(neighbours.index < 0, 1.0, r2)) ** 3
        energy = jnp.where(neighbours.index < 0, 0.0, 2 * self.epsilon * (r6**2 - r6))
        return jnp.sum(energy)


@eqx.filter_jit
def forces(potential, positions, size):
    neighbours = NeighbourList.build(positions, 1.5, size)
    energy, gradient = jax.value_and_grad(potential)(positions, neighbours)
    return energy, -gradient, neighbours.update(positions + 1)


def main():
    positions = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.2], [3.0, 0.0]])
    potential = LennardJones(jnp.array(1.0), jnp.array(1.0))
    try:
        jax.block_until_ready(forces(potential, positions, 1))
    except eqx.EquinoxRuntimeError as error:
        overflow = "too many neighbours" in str(error)
    return forces(potential, positions, 2), overflow
