"""A flow of coupling layers: stacked by filter_vmap, run by a scan in both directions."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class Coupling(eqx.Module):
    net: eqx.nn.MLP
    flip: jax.Array
    size: int = eqx.field(static=True)

    def __init__(self, size, flip, *, key):
        self.net = eqx.nn.MLP(
            size // 2, size, width_size=4, depth=1, activation=jax.nn.tanh, key=key
        )
        self.flip = flip
        self.size = size

    def _parameters(self, kept):
        shift, log_scale = jnp.split(self.net(kept), 2)
        return shift, jnp.tanh(log_scale)

    def forward(self, x):
        x = jnp.where(self.flip, jnp.flip(x), x)
        kept, moved = jnp.split(x, 2)
        shift, log_scale = self._parameters(kept)
        return jnp.concatenate([kept, moved * jnp.exp(log_scale) + shift]), jnp.sum(log_scale)

    def inverse(self, y):
        kept, moved = jnp.split(y, 2)
        shift, log_scale = self._parameters(kept)
        x = jnp.concatenate([kept, (moved - shift) * jnp.exp(-log_scale)])
        return jnp.where(self.flip, jnp.flip(x), x), -jnp.sum(log_scale)


class Flow(eqx.Module):
    layers: Coupling

    def __init__(self, size, depth, *, key):
        make = lambda flip, key: Coupling(size, flip, key=key)
        self.layers = eqx.filter_vmap(make)(jnp.arange(depth) % 2 == 0, jr.split(key, depth))

    def _scan(self, x, method, reverse):
        dynamic, static = eqx.partition(self.layers, eqx.is_array)

        def body(carry, layer):
            x, total = carry
            x, log_det = getattr(eqx.combine(layer, static), method)(x)
            return (x, total + log_det), None

        return jax.lax.scan(body, (x, jnp.zeros(())), dynamic, reverse=reverse)[0]

    def forward(self, x):
        return self._scan(x, "forward", False)

    def inverse(self, y):
        return self._scan(y, "inverse", True)


def main():
    flow = Flow(4, 3, key=jr.PRNGKey(3))
    x = jnp.linspace(-1.0, 1.0, 4)
    y, log_det = eqx.filter_jit(flow.forward)(x)
    back, log_inverse = eqx.filter_jit(flow.inverse)(y)
    loss = lambda flow: jnp.sum(flow.inverse(x)[0] ** 2) - flow.inverse(x)[1]
    grads = jax.tree.leaves(eqx.filter(eqx.filter_grad(loss)(flow), eqx.is_array))
    return y, log_det, back, log_inverse, grads, flow.layers.net.layers[0].weight.shape
