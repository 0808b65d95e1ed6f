"""A GAN step: two models in one function, two optimizers, donated buffers, one loss with a sign."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax


class TrainState(eqx.Module):
    model: eqx.Module
    opt_state: optax.OptState
    tx: optax.GradientTransformation = eqx.field(static=True)
    step: jax.Array

    @classmethod
    def create(cls, model, tx):
        return cls(model, tx.init(eqx.filter(model, eqx.is_inexact_array)), tx, jnp.array(0))

    def apply(self, grads):
        updates, opt_state = self.tx.update(grads, self.opt_state)
        model = eqx.apply_updates(self.model, updates)
        return TrainState(model, opt_state, self.tx, self.step + 1)


def loss(models, real, noise):
    generator, discriminator = models
    score = jax.vmap(discriminator)
    return jnp.mean(score(real)) - jnp.mean(score(jax.vmap(generator)(noise)))


@eqx.filter_jit(donate="all-except-first")
def make_step(real, states, key):
    generator, discriminator = states
    noise = jr.normal(key, (len(real), 2))
    models = generator.model, discriminator.model
    value, (g_grads, d_grads) = eqx.filter_value_and_grad(loss)(models, real, noise)
    return value, (
        generator.apply(g_grads),
        discriminator.apply(jax.tree.map(jnp.negative, d_grads)),
    )


def clip(linear):
    return jax.tree.map(lambda x: jnp.clip(x, -0.1, 0.1) if eqx.is_array(x) else x, linear)


def main():
    gkey, dkey = jr.split(jr.key(0))
    states = (
        TrainState.create(eqx.nn.Linear(2, 2, key=gkey), optax.sgd(0.1)),
        TrainState.create(eqx.nn.MLP(2, "scalar", 3, 1, key=dkey), optax.rmsprop(0.01)),
    )
    real = jnp.ones((3, 2))
    values = []
    for key in jr.split(jr.key(1), 2):
        value, states = make_step(real, states, key)
        values.append(value)
    return values, states[0].model, states[1].step, clip(states[0].model)
