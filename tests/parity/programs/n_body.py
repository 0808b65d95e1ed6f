"""Gravity: bodies as a struct of arrays, with len, iteration and indexing; energy by properties."""

import equinox as eqx
import jax
import jax.numpy as jnp


class Bodies(eqx.Module):
    position: jax.Array
    velocity: jax.Array
    mass: jax.Array

    def __len__(self):
        return self.mass.shape[0]

    def __getitem__(self, i):
        return jax.tree.map(lambda leaf: leaf[i], self)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    @property
    def kinetic(self):
        return 0.5 * jnp.sum(self.mass * jnp.sum(self.velocity**2, axis=-1))


class Gravity(eqx.Module):
    G: float = 1.0
    softening: float = 1e-2

    def potential(self, bodies):
        offsets = bodies.position[:, None] - bodies.position[None]
        distance = jnp.sqrt(jnp.sum(offsets**2, -1) + self.softening**2)
        pairs = -self.G * bodies.mass[:, None] * bodies.mass[None] / distance
        return jnp.sum(jnp.triu(pairs, 1))

    def acceleration(self, bodies):
        force = jax.grad(self.potential)(bodies).position
        return -force / bodies.mass[:, None]


@eqx.filter_jit
def verlet(force, bodies, dt, n):
    def body(bodies, _):
        velocity = bodies.velocity + 0.5 * dt * force.acceleration(bodies)
        bodies = eqx.tree_at(lambda b: b.position, bodies, bodies.position + dt * velocity)
        velocity = velocity + 0.5 * dt * force.acceleration(bodies)
        bodies = eqx.tree_at(lambda b: b.velocity, bodies, velocity)
        return bodies, bodies.kinetic + force.potential(bodies)

    return jax.lax.scan(body, bodies, None, length=n)


def main():
    bodies = Bodies(
        jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]]),
        jnp.array([[0.0, 0.0], [0.0, 1.0], [-0.7, 0.0]]),
        jnp.array([1.0, 1e-2, 1e-2]),
    )
    final, energies = verlet(Gravity(), bodies, 0.01, 5)
    sun, *planets = bodies
    return final, energies, sun, len(planets), len(bodies), planets[1].mass
