"""A variational autoencoder of Conv layers in the plain documented style, trained two steps."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax


class Encoder(eqx.Module):
    layers: list
    latent: int = eqx.field(static=True)

    def __init__(self, latent, key):
        k1, k2 = jr.split(key)
        self.latent = latent
        self.layers = [
            eqx.nn.Conv2d(1, 2, kernel_size=3, stride=2, padding=1, key=k1),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(8, 2 * latent, key=k2),
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x[: self.latent], x[self.latent :]


class VAE(eqx.Module):
    encoder: Encoder
    decoder: eqx.nn.MLP

    def __init__(self, latent, *, key):
        ekey, dkey = jr.split(key)
        self.encoder = Encoder(latent, ekey)
        self.decoder = eqx.nn.MLP(latent, 16, 4, 1, final_activation=jax.nn.sigmoid, key=dkey)

    def __call__(self, x, key):
        mean, log_scale = self.encoder(x)
        z = mean + jnp.exp(log_scale) * jr.normal(key, mean.shape)
        return self.decoder(z).reshape(x.shape), mean, log_scale


@eqx.filter_jit
def make_step(model, xs, key, opt_state, update):
    @eqx.filter_value_and_grad
    def loss(model):
        out, mean, log_scale = jax.vmap(model)(xs, jr.split(key, len(xs)))
        divergence = jnp.sum(mean**2 + jnp.exp(log_scale) - log_scale)
        return jnp.mean((out - xs) ** 2) + 1e-2 * divergence

    value, grads = loss(model)
    updates, opt_state = update(grads, opt_state)
    return value, eqx.apply_updates(model, updates), opt_state


def main():
    model = VAE(2, key=jr.PRNGKey(0))
    optim = optax.sgd(1e-1)
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    xs = jnp.linspace(0.0, 1.0, 32).reshape(2, 1, 4, 4)
    losses = []
    for key in jr.split(jr.PRNGKey(1), 2):
        value, model, opt_state = make_step(model, xs, key, opt_state, optim.update)
        losses.append(value)
    return losses, jax.tree.leaves(eqx.filter(model, eqx.is_array))
