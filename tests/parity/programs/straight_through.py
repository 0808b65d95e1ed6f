"""Custom gradients on trees: a straight-through estimator, a clipped one, and one with None."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu


@eqx.filter_custom_vjp
def straight_through(x, levels, *, temperature):
    return jtu.tree_map(lambda leaf: jnp.round(leaf * levels) / levels, x)


@straight_through.def_fwd
def straight_through_fwd(perturbed, x, levels, *, temperature):
    del perturbed
    return straight_through(x, levels, temperature=temperature), None


@straight_through.def_bwd
def straight_through_bwd(residuals, grad, perturbed, x, levels, *, temperature):
    assert residuals is None
    return jtu.tree_map(lambda g, p: temperature * g if p else None, grad, perturbed)


@eqx.filter_custom_jvp
def safe_norm(tree, scale):
    return scale * jnp.sqrt(sum(jnp.sum(x**2) for x in jtu.tree_leaves(tree)))


@safe_norm.def_jvp
def safe_norm_jvp(primals, tangents):
    tree, scale = primals
    t_tree, t_scale = tangents
    norm = safe_norm(tree, scale)
    safe = jnp.where(norm == 0, 1.0, norm)
    tangent = jnp.zeros_like(norm)
    for x, t in zip(jtu.tree_leaves(tree), jtu.tree_leaves(t_tree)):
        tangent += jnp.sum(x * t) * scale**2 / safe
    if t_scale is not None:
        tangent += t_scale * norm / scale
    return norm, tangent


class Codes(eqx.Module):
    table: jax.Array
    offset: jax.Array
    name: str = eqx.field(static=True)

    def __call__(self, levels):
        rounded = straight_through({"t": self.table, "o": self.offset}, levels, temperature=0.5)
        return jnp.sum(rounded["t"] ** 2) + rounded["o"]


def main():
    codes = Codes(jnp.array([0.3, -0.7]), jnp.array(0.1), "codes")
    value, grads = eqx.filter_value_and_grad(Codes.__call__)(codes, 4)
    norm = jax.grad(safe_norm)([jnp.zeros(2), jnp.array(0.0)], 1.0)
    both = jax.grad(safe_norm, argnums=(0, 1))(jnp.array([3.0, 4.0]), 2.0)
    forward = eqx.filter_jvp(lambda x: safe_norm(x, 3), (jnp.ones(2),), (jnp.ones(2),))
    return value, grads, norm, both, forward
