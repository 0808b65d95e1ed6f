"""A Hamiltonian net: the field is a gradient of the net with respect to its input."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class HamiltonianNet(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(2, "scalar", 4, 2, jax.nn.softplus, key=key)

    @eqx.filter_jit
    def energy(self, q, p):
        return self.mlp(jnp.stack([q, p]))

    def field(self, q, p):
        dq, dp = jax.grad(self.energy, argnums=(0, 1))(q, p)
        return dp, -dq

    def __call__(self, t, y, args=None):
        return self.field(*y)


@eqx.filter_value_and_grad
def loss(model, qs, ps):
    dq, dp = jax.vmap(model.field)(qs, ps)
    return jnp.mean((dq - ps) ** 2 + (dp + qs) ** 2)


def main():
    model = HamiltonianNet(jr.PRNGKey(0))
    qs, ps = jnp.linspace(-1.0, 1.0, 3), jnp.linspace(0.5, -0.5, 3)
    value, grads = eqx.filter_jit(loss)(model, qs, ps)
    return value, jax.tree.leaves(eqx.filter(grads, eqx.is_array)), model(0.0, (qs[0], ps[0]))
