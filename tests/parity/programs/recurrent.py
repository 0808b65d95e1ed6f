"""An Elman cell with a learnt start, bidirectional, batched: initializers, scan, getattr."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class Elman(eqx.Module):
    w_in: jax.Array
    w_rec: jax.Array
    start: jax.Array
    hidden: int = eqx.field(static=True)
    bias: jax.Array | None

    def __init__(self, n_in, hidden, use_bias=True, *, key):
        k_in, k_rec = jr.split(key)
        self.w_in = jax.nn.initializers.glorot_uniform()(k_in, (hidden, n_in))
        self.w_rec = jax.nn.initializers.orthogonal()(k_rec, (hidden, hidden))
        self.start = jnp.zeros(hidden)
        self.bias = jnp.zeros(hidden) if use_bias else None
        self.hidden = hidden

    def __call__(self, x, h):
        pre = self.w_in @ x + self.w_rec @ h
        return jnp.tanh(pre if self.bias is None else pre + self.bias)


class Bidirectional(eqx.Module):
    forward: Elman
    backward: Elman

    def __call__(self, xs):
        outs = []
        for name, reverse in [("forward", False), ("backward", True)]:
            cell = getattr(self, name)
            step = lambda h, x, cell=cell: (cell(x, h),) * 2
            outs.append(jax.lax.scan(step, cell.start, xs, reverse=reverse)[1])
        return jnp.concatenate(outs, axis=-1)


def main():
    k1, k2 = jr.split(jr.PRNGKey(3))
    model = Bidirectional(Elman(2, 3, key=k1), Elman(2, 3, use_bias=False, key=k2))
    xs = jnp.arange(12.0).reshape(2, 3, 2) / 10
    run = eqx.filter_jit(eqx.filter_vmap(model))
    grads = eqx.filter_grad(lambda m: jnp.sum(jax.vmap(m)(xs)))(model)
    return run(xs), grads, repr(model), eqx.tree_pformat(model, short_arrays=False).count("[")
