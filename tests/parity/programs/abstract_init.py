"""Shapes without arrays: filter_eval_shape of constructors, filled from a dict, checked, jitted."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu


class Net(eqx.Module):
    layers: tuple
    scale: jax.Array
    activation: callable = jax.nn.relu
    depth: int = eqx.field(static=True, default=2)

    def __init__(self, sizes, *, key):
        keys = jr.split(key, len(sizes) - 1)
        self.layers = tuple(eqx.nn.Linear(a, b, key=k) for a, b, k in zip(sizes, sizes[1:], keys))
        self.scale = jnp.ones(())
        self.depth = len(self.layers)

    def __call__(self, x):
        for layer in self.layers:
            x = self.activation(layer(x))
        return self.scale * x


def load(skeleton, checkpoint):
    is_struct = lambda x: isinstance(x, jax.ShapeDtypeStruct)

    def pick(path, leaf):
        if not is_struct(leaf):
            return leaf
        value = checkpoint[jtu.keystr(path)]
        if value.shape != leaf.shape or value.dtype != leaf.dtype:
            raise ValueError(f"{jtu.keystr(path)}: {value.shape}")
        return value

    return jtu.tree_map_with_path(pick, skeleton, is_leaf=is_struct)


def main():
    key = jr.key(0)
    skeleton = eqx.filter_eval_shape(Net, (2, 3, 1), key=key)
    net = eqx.filter_jit(Net)((2, 3, 1), key=key)
    checkpoint = {
        jtu.keystr(path): leaf
        for path, leaf in jtu.tree_leaves_with_path(net)
        if eqx.is_array(leaf)
    }
    loaded = load(skeleton, checkpoint)
    out = eqx.filter_eval_shape(loaded, jax.ShapeDtypeStruct((2,), jnp.float32))
    again = eqx.filter_eval_shape(lambda: eqx.nn.MLP(2, 2, 2, 1, key=jr.PRNGKey(0)))
    return (
        sorted(checkpoint),
        loaded(jnp.ones(2)),
        out,
        again.layers[0].bias,
        skeleton.depth,
        skeleton.scale,
    )
