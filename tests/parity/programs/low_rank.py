"""A LoRA-like wrapper put around each Linear by tree_map with is_leaf; merged again afterwards."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class LoRA(eqx.Module):
    base: eqx.nn.Linear
    a: jax.Array
    b: jax.Array
    scale: float = eqx.field(static=True, default=2.0)

    def __init__(self, base, rank, *, key, **kwargs):
        self.base = base
        self.a = jr.normal(key, (rank, base.in_features)) / base.in_features
        self.b = jnp.zeros((base.out_features, rank))
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __call__(self, x, *, key=None):
        return self.base(x, key=key) + self.scale * (self.b @ (self.a @ x))

    def merge(self):
        weight = self.base.weight + self.scale * self.b @ self.a
        return eqx.tree_at(lambda l: l.weight, self.base, weight)


is_linear = lambda x: isinstance(x, eqx.nn.Linear)
is_lora = lambda x: isinstance(x, LoRA)


def adapt(model, rank, key):
    leaves, treedef = jax.tree.flatten(model, is_leaf=is_linear)
    keys = iter(jr.split(key, len(leaves)))
    wrap = lambda x: LoRA(x, rank, key=next(keys), scale=1.5) if is_linear(x) else x
    return jax.tree.unflatten(treedef, [wrap(leaf) for leaf in leaves])


def adapters(model):
    spec = jax.tree.map(lambda _: False, model)
    found = lambda m: [
        p for l in jax.tree.leaves(m, is_leaf=is_lora) if is_lora(l) for p in (l.a, l.b)
    ]
    return eqx.tree_at(found, spec, replace_fn=lambda _: True)


def main():
    model = eqx.nn.MLP(2, 2, 3, 1, key=jr.PRNGKey(0))
    adapted = adapt(model, 1, jr.PRNGKey(1))
    trained, static = eqx.partition(adapted, adapters(adapted))
    loss = lambda trained: jnp.sum(eqx.combine(trained, static)(jnp.ones(2)) ** 2)
    grads = jax.grad(loss)(trained)
    adapted = eqx.apply_updates(adapted, jax.tree.map(lambda g: -g, grads))
    merged = jax.tree.map(lambda x: x.merge() if is_lora(x) else x, adapted, is_leaf=is_lora)
    same = jax.tree.structure(eqx.filter(merged, eqx.is_array)) == jax.tree.structure(
        eqx.filter(model, eqx.is_array)
    )
    return (
        jax.tree.leaves(grads),
        merged(jnp.ones(2)),
        adapted(jnp.ones(2)),
        same,
        len(jax.tree.leaves(trained)),
    )
