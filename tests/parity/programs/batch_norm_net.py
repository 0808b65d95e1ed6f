"""A small residual net with BatchNorm: State through a list of layers, axis name, training step."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax


class Block(eqx.Module):
    conv: eqx.nn.Conv1d
    norm: eqx.nn.BatchNorm

    def __init__(self, channels, *, key):
        self.conv = eqx.nn.Conv1d(channels, channels, 3, padding="SAME", use_bias=False, key=key)
        self.norm = eqx.nn.BatchNorm(channels, axis_name="batch", mode="batch")

    def __call__(self, x, state):
        y, state = self.norm(self.conv(x), state)
        return x + jax.nn.relu(y), state


class Net(eqx.Module):
    blocks: list[Block]
    pool: eqx.nn.AvgPool1d
    head: eqx.nn.Linear

    def __init__(self, *, key):
        *keys, head = jr.split(key, 3)
        self.blocks = [Block(2, key=k) for k in keys]
        self.pool = eqx.nn.AvgPool1d(2, 2)
        self.head = eqx.nn.Linear(4, 2, key=head)

    def __call__(self, x, state):
        for block in self.blocks:
            x, state = block(x, state)
        return self.head(self.pool(x).ravel()), state


def loss(model, state, xs, ys):
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, state = batched(xs, state)
    return optax.softmax_cross_entropy_with_integer_labels(logits, ys).mean(), state


@eqx.filter_jit
def make_step(model, state, xs, ys):
    (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, state, xs, ys)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), state, value


def main():
    model, state = eqx.nn.make_with_state(Net)(key=jr.PRNGKey(0))
    xs, ys = jr.normal(jr.PRNGKey(1), (4, 2, 4)), jnp.array([0, 1, 1, 0])
    values = []
    for _ in range(2):
        model, state, value = make_step(model, state, xs, ys)
        values.append(value)
    return values, model.head, model.blocks[0].norm.weight, model.blocks[1].conv.weight
