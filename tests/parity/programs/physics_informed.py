"""A physics-informed net: second derivatives of a Module in its input, coefficients learnt, too."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class Burgers(eqx.Module):
    net: eqx.nn.MLP
    log_viscosity: jax.Array = eqx.field(converter=lambda v: jnp.log(jnp.asarray(v)))
    weights: dict = eqx.field(default_factory=lambda: {"pde": 1.0, "data": 10.0}, static=False)

    def u(self, t, x):
        return self.net(jnp.stack([t, x]))

    def residual(self, t, x):
        u, (u_t, u_x) = jax.value_and_grad(self.u, argnums=(0, 1))(t, x)
        u_xx = jax.grad(jax.grad(self.u, 1), 1)(t, x)
        return u_t + u * u_x - jnp.exp(self.log_viscosity) * u_xx

    def loss(self, points, data):
        pde = jnp.mean(jax.vmap(self.residual)(*points.T) ** 2)
        fit = jnp.mean((jax.vmap(self.u)(data[:, 0], data[:, 1]) - data[:, 2]) ** 2)
        return self.weights["pde"] * pde + self.weights["data"] * fit


def main():
    net = eqx.nn.MLP(2, "scalar", 3, 1, jnp.tanh, key=jr.PRNGKey(2))
    model = Burgers(net, 0.1)
    points, data = jr.uniform(jr.PRNGKey(0), (4, 2)), jr.uniform(jr.PRNGKey(1), (2, 3))
    value, grads = eqx.filter_jit(eqx.filter_value_and_grad(Burgers.loss))(model, points, data)
    return value, grads.log_viscosity, grads.net.layers[0].weight, model.weights, grads.weights
