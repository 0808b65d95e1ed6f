"""Mixed precision by tree_map: master weights in float32, a policy, dynamic loss scaling."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu


class Policy(eqx.Module):
    param: jnp.dtype = eqx.field(static=True, converter=jnp.dtype, default=jnp.float32)
    compute: jnp.dtype = eqx.field(static=True, converter=jnp.dtype, default="bfloat16")

    def cast(self, tree, dtype):
        change = lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x
        return jtu.tree_map(change, tree)


class LossScale(eqx.Module):
    scale: jax.Array
    good: jax.Array

    def unscale(self, grads):
        return jtu.tree_map(lambda g: g.astype(jnp.float32) / self.scale, grads)

    def adjust(self, finite):
        scale = jnp.where(finite, self.scale, self.scale / 2)
        return LossScale(scale, jnp.where(finite, self.good + 1, 0))


def all_finite(tree):
    leaves = [jnp.all(jnp.isfinite(x)) for x in jtu.tree_leaves(eqx.filter(tree, eqx.is_array))]
    return jnp.all(jnp.stack(leaves))


@eqx.filter_jit
def make_step(model, scaler, policy, x):
    def loss(model):
        return (
            jnp.sum(policy.cast(model, policy.compute)(x.astype(policy.compute)) ** 2)
            * scaler.scale
        )

    grads = scaler.unscale(eqx.filter_grad(loss)(model))
    finite = all_finite(grads)
    step = lambda g: jnp.where(finite, -0.1 * g, jnp.zeros_like(g))
    return eqx.apply_updates(model, jtu.tree_map(step, grads)), scaler.adjust(finite), finite


def main():
    model = eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=jax.random.key(0)), eqx.nn.LayerNorm(2)])
    scaler = LossScale(jnp.array(8.0, jnp.float32), jnp.array(0, jnp.int32))
    policy = Policy()
    new, scaler, finite = make_step(model, scaler, policy, jnp.ones(2))
    _, overflown, _ = make_step(new, scaler, policy, jnp.full(2, jnp.inf))
    half = policy.cast(new, jnp.float16)
    return scaler, overflown, finite, new[0].weight.dtype, half[1].weight, str(policy.compute)
