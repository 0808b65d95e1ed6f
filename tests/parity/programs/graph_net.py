"""Message passing on graphs that are Modules: segment sums, padding, batches by tree_map."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np


class Graph(eqx.Module):
    nodes: jax.Array
    senders: np.ndarray
    receivers: np.ndarray

    @property
    def n_node(self):
        return self.nodes.shape[-2]

    def with_nodes(self, nodes):
        return eqx.tree_at(lambda g: g.nodes, self, nodes)


class MessagePassing(eqx.Module):
    message: eqx.nn.Linear
    update: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    aggregate: staticmethod = eqx.field(static=True, default=staticmethod(jax.ops.segment_sum))

    def __init__(self, size, *, key):
        mkey, ukey = jr.split(key)
        self.message = eqx.nn.Linear(2 * size, size, key=mkey)
        self.update = eqx.nn.Linear(2 * size, size, key=ukey)
        self.norm = eqx.nn.LayerNorm(size)

    def __call__(self, graph):
        pairs = jnp.concatenate([graph.nodes[graph.senders], graph.nodes[graph.receivers]], -1)
        messages = jax.nn.relu(jax.vmap(self.message)(pairs))
        received = self.aggregate(messages, graph.receivers, graph.n_node)
        new = jax.vmap(self.update)(jnp.concatenate([graph.nodes, received], -1))
        return graph.with_nodes(jax.vmap(self.norm)(new))


@eqx.filter_jit
def apply(layers, graph):
    for layer in layers:
        graph = layer(graph)
    return graph


def main():
    layers = [MessagePassing(2, key=k) for k in jr.split(jr.PRNGKey(0))]
    graph = Graph(jnp.arange(6.0).reshape(3, 2), np.array([0, 1, 2]), np.array([1, 2, 0]))
    out = apply(layers, graph)
    batch = jax.tree.map(lambda *xs: jnp.stack(xs), graph, out)
    batched = eqx.filter_vmap(apply, in_axes=(None, eqx.if_array(0)))(layers, batch)
    return out.nodes, out.n_node, batched.nodes[0] - out.nodes, type(graph.senders).__name__
