"""An ensemble: made by filter_vmap, trained as one, voted, taken apart."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np


class Ensemble(eqx.Module):
    members: eqx.nn.MLP
    size: int = eqx.field(static=True)

    def __init__(self, size, key):
        self.size = size

        @eqx.filter_vmap
        def make(key):
            return eqx.nn.MLP(2, "scalar", 3, 1, activation=jnp.tanh, key=key)

        self.members = make(jr.split(key, size))

    def each(self, x):
        return eqx.filter_vmap(lambda m, x: m(x), in_axes=(eqx.if_array(0), None))(self.members, x)

    def __call__(self, x):
        votes = self.each(x)
        return votes.mean(), votes.std()

    def __getitem__(self, i):
        return jax.tree.map(lambda leaf: leaf[i] if eqx.is_array(leaf) else leaf, self.members)


@eqx.filter_vmap(in_axes=(eqx.if_array(0), None, None))
@eqx.filter_grad
def member_grads(member, xs, ys):
    return jnp.mean((jax.vmap(member)(xs) - ys) ** 2)


def main():
    ensemble = Ensemble(3, jr.key(0))
    xs, ys = jnp.eye(2), np.array([0.0, 1.0], np.float32)
    grads = eqx.filter_jit(member_grads)(ensemble.members, xs, ys)
    mean, std = ensemble(xs[0])
    alone = jnp.stack([ensemble[i](xs[0]) for i in range(3)])
    return mean, std, alone - ensemble.each(xs[0]), grads.layers[0].weight, ensemble.size
