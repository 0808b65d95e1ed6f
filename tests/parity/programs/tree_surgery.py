"""Editing models: tree_at in loops, by properties, into lists and dicts, None, updates."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu


class Head(eqx.Module):
    linear: eqx.nn.Linear
    mask: jax.Array | None = None

    @property
    def parameters(self):
        return self.linear.weight, self.linear.bias


class Model(eqx.Module):
    heads: dict[str, Head]
    shared: list
    temperature: float

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.heads = {name: Head(eqx.nn.Linear(2, 1, key=k)) for name, k in zip("ab", keys)}
        self.temperature = 1.0
        self.shared = [eqx.nn.Dropout(0.3), eqx.nn.Linear(2, 2, use_bias=False, key=keys[2]), None]


def is_linear(x):
    return isinstance(x, eqx.nn.Linear)


def linears(model):
    return [x for x in jtu.tree_leaves(model, is_leaf=is_linear) if is_linear(x)]


def main():
    model = Model(jr.PRNGKey(0))
    ones = eqx.tree_at(lambda m: [l.weight for l in linears(m)], model, replace_fn=jnp.ones_like)
    head = eqx.tree_at(lambda m: m.heads["a"].parameters, ones, (jnp.zeros((1, 2)), None))
    masked = eqx.tree_at(
        lambda m: m.heads["b"].mask, head, jnp.array([True, False]), is_leaf=lambda x: x is None
    )
    grown = eqx.tree_at(lambda m: m.shared, masked, [*masked.shared[:2], eqx.nn.Identity()])
    hot = eqx.tree_at(lambda m: (m.temperature, m.heads["a"]), grown, (2.0, grown.heads["b"]))
    zero = jtu.tree_map(
        lambda x: None if x is None or not eqx.is_array(x) else -x, eqx.filter(ones, eqx.is_array)
    )
    updated = eqx.apply_updates(ones, zero)
    frozen = eqx.nn.inference_mode(model)
    swapped = eqx.tree_inference(frozen, value=False)
    flags = model.shared[0].inference, frozen.shared[0].inference, swapped.shared[0].inference
    return (
        hot.heads,
        hot.temperature,
        len(linears(grown)),
        linears(updated)[0].weight,
        flags,
        hot.shared[2],
        head.heads["a"].linear.bias,
    )
