"""A bootstrap particle filter: a batch of Modules is one Module, resampled by indexing."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class Particle(eqx.Module):
    position: jax.Array
    velocity: jax.Array

    def __getitem__(self, index):
        return jax.tree.map(lambda leaf: leaf[index], self)


class Step(NamedTuple):
    mean: jax.Array
    effective: jax.Array


class Tracker(eqx.Module):
    noise: float
    observation_noise: float
    dt: float = eqx.field(default=0.1, static=True)

    def move(self, particle, key):
        velocity = particle.velocity + self.noise * jr.normal(key, particle.velocity.shape)
        return Particle(particle.position + self.dt * velocity, velocity)

    def weigh(self, particle, seen):
        return -0.5 * jnp.sum((particle.position - seen) ** 2) / self.observation_noise**2

    @eqx.filter_jit
    def run(self, particles, observations, key):
        n = particles.position.shape[0]

        def body(particles, inputs):
            seen, key = inputs
            move_key, resample_key = jr.split(key)
            particles = jax.vmap(self.move)(particles, jr.split(move_key, n))
            weights = jax.nn.softmax(jax.vmap(self.weigh, in_axes=(0, None))(particles, seen))
            index = jr.choice(resample_key, n, (n,), p=weights)
            mean = jnp.sum(weights[:, None] * particles.position, axis=0)
            return particles[index], Step(mean, 1 / jnp.sum(weights**2))

        keys = jr.split(key, observations.shape[0])
        return jax.lax.scan(body, particles, (observations, keys))


def main():
    particles = Particle(jr.normal(jr.key(0), (8, 2)), jnp.zeros((8, 2)))
    observations = jnp.linspace(0.0, 1.0, 6).reshape(3, 2)
    tracker = Tracker(noise=0.1, observation_noise=0.5)
    final, steps = tracker.run(particles, observations, jr.key(1))
    return final, final[0], steps, tracker
