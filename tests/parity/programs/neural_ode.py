"""A neural ODE with its own loop: checkpointed steps, time as an input, keyword-only keys."""

import equinox as eqx
import jax
import jax.nn as jnn
import jax.numpy as jnp
import jax.random as jr


class Func(eqx.Module):
    mlp: eqx.nn.MLP
    out_scale: jax.Array

    def __init__(self, data_size, width_size, depth, *, key, **kwargs):
        super().__init__(**kwargs)
        self.out_scale = jnp.array(1.0)
        self.mlp = eqx.nn.MLP(
            in_size=data_size,
            out_size=data_size,
            width_size=width_size,
            depth=depth,
            activation=jnn.softplus,
            final_activation=jnn.tanh,
            key=key,
        )

    def __call__(self, t, y, args):
        return self.out_scale * self.mlp(y)


class NeuralODE(eqx.Module):
    func: Func

    def __init__(self, *args, key, **kwargs):
        super().__init__(**kwargs)
        self.func = Func(*args, key=key)

    def __call__(self, ts, y0):
        @eqx.filter_checkpoint
        def step(y, span):
            t0, t1 = span
            return y + (t1 - t0) * self.func(t0, y, None)

        def body(y, span):
            y = step(y, span)
            return y, y

        return jax.lax.scan(body, y0, (ts[:-1], ts[1:]))[1]


def main():
    model = NeuralODE(2, 4, 1, key=jr.PRNGKey(5))
    ts = jnp.linspace(0.0, 1.0, 4)

    @eqx.filter_value_and_grad
    def grad_loss(model, ti, yi):
        y_pred = jax.vmap(model, in_axes=(None, 0))(ti, yi)
        return jnp.mean((yi[:, None] - y_pred) ** 2)

    loss, grads = eqx.filter_jit(grad_loss)(model, ts, jnp.ones((2, 2)))
    return (
        loss,
        jax.tree.leaves(grads),
        sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array))),
    )
