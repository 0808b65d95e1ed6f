"""A net whose weights another net makes: ravel, unravel by a stored function, combine."""

import equinox as eqx
import jax
import jax.flatten_util as jfu
import jax.numpy as jnp
import jax.random as jr


class HyperNet(eqx.Module):
    maker: eqx.nn.Linear
    unravel: callable = eqx.field(static=True)
    skeleton: eqx.nn.MLP = eqx.field(static=True)

    def __init__(self, context, *, key):
        mkey, tkey = jr.split(key)
        target = eqx.nn.MLP(1, 1, 2, 1, activation=jnp.sin, key=tkey)
        params, self.skeleton = eqx.partition(target, eqx.is_array)
        flat, self.unravel = jfu.ravel_pytree(params)
        maker = eqx.nn.Linear(context, flat.size, key=mkey)
        self.maker = eqx.tree_at(lambda m: m.bias, maker, flat)

    def target(self, context):
        return eqx.combine(self.unravel(0.1 * self.maker(context)), self.skeleton)

    def __call__(self, context, x):
        return self.target(context)(x)


def main():
    net = HyperNet(2, key=jr.PRNGKey(0))
    contexts, xs = jnp.eye(2), jnp.ones((2, 1))
    out = eqx.filter_jit(jax.vmap(net))(contexts, xs)
    grads = eqx.filter_grad(lambda n: jnp.sum(jax.vmap(n)(contexts, xs)))(net)
    models = eqx.filter_vmap(net.target)(contexts)
    return out, grads.maker.bias, models.layers[0].weight.shape, models.layers[1].bias
