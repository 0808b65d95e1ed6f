"""A tied autoencoder: the decoder's weight is the encoder's, put there again at each call."""

import equinox as eqx
import jax
import jax.numpy as jnp


class Tied(eqx.Module):
    encoder: eqx.nn.Linear
    decoder: eqx.nn.Linear

    def __init__(self, size, hidden, *, key):
        ekey, dkey = jax.random.split(key)
        self.encoder = eqx.nn.Linear(size, hidden, key=ekey)
        decoder = eqx.nn.Linear(hidden, size, key=dkey)
        self.decoder = eqx.tree_at(lambda d: d.weight, decoder, None)

    def _decoder(self):
        is_none = lambda x: x is None
        return eqx.tree_at(lambda d: d.weight, self.decoder, self.encoder.weight.T, is_leaf=is_none)

    def __call__(self, x):
        return self._decoder()(jnp.tanh(self.encoder(x)))


def main():
    model = Tied(3, 2, key=jax.random.PRNGKey(7))
    x = jnp.array([1.0, -1.0, 0.5])
    loss = lambda m: jnp.sum((m(x) - x) ** 2)
    value, grads = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model)
    pruned = eqx.tree_at(
        lambda m: m.encoder.weight, model, replace_fn=lambda w: jnp.where(jnp.abs(w) < 0.3, 0.0, w)
    )
    no_bias = eqx.tree_at(lambda m: (m.encoder.bias, m.decoder.bias), model, (None, None))
    count = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    return value, grads.encoder.weight, grads.decoder.weight, pruned(x), count, no_bias.encoder.bias
