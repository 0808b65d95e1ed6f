"""Distributions as Modules: properties, abstract fields, batches by filter_vmap."""

import abc
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class Distribution(eqx.Module):
    shape: eqx.AbstractVar[tuple[int, ...]]

    @abc.abstractmethod
    def log_prob(self, x): ...

    @abc.abstractmethod
    def sample(self, key): ...

    def sample_and_log_prob(self, key):
        x = self.sample(key)
        return x, self.log_prob(x)

    def sample_n(self, key, n):
        return eqx.filter_vmap(self.sample)(jr.split(key, n))


class Normal(Distribution):
    loc: jax.Array = eqx.field(converter=jnp.asarray)
    log_scale: jax.Array

    def __init__(self, loc, scale=1.0):
        self.loc = loc
        self.log_scale = jnp.log(jnp.broadcast_to(jnp.asarray(scale), jnp.shape(loc)))

    @property
    def shape(self):
        return self.loc.shape

    @property
    def scale(self):
        return jnp.exp(self.log_scale)

    def log_prob(self, x):
        z = (x - self.loc) / self.scale
        return jnp.sum(-0.5 * z**2 - self.log_scale - 0.5 * math.log(2 * math.pi))

    def sample(self, key):
        return self.loc + self.scale * jr.normal(key, self.shape)


class Mixture(Distribution):
    components: Normal  # stacked
    logits: jax.Array
    shape: tuple[int, ...] = ()

    def log_prob(self, x):
        each = eqx.filter_vmap(lambda d: d.log_prob(x))(self.components)
        return jax.nn.logsumexp(each + jax.nn.log_softmax(self.logits))

    def sample(self, key):
        which, noise = jr.split(key)
        index = jr.categorical(which, self.logits)
        return jax.tree.map(lambda leaf: leaf[index], self.components).sample(noise)


def main():
    components = eqx.filter_vmap(Normal)(jnp.array([-1.0, 0.0, 2.0]), jnp.array([0.5, 1.0, 0.2]))
    mixture = Mixture(components, jnp.zeros(3))
    samples = eqx.filter_jit(mixture.sample_n)(jr.key(0), 4)
    density = jax.jit(jax.vmap(mixture.log_prob))(samples)
    grads = eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m.log_prob)(samples)))(mixture)
    pair = Normal(jnp.arange(2.0), 0.5)
    return samples, density, grads, pair.sample_and_log_prob(jr.key(1)), pair.shape, mixture.shape
