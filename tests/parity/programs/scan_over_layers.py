"""A deep transformer-like net: one block's code compiled once, by a scan over stacked blocks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    heads: int = eqx.field(static=True)

    def __init__(self, size, heads, *, key):
        k1, k2 = jr.split(key)
        self.norm = eqx.nn.LayerNorm(size)
        self.qkv = eqx.nn.Linear(size, 3 * size, use_bias=False, key=k1)
        self.out = eqx.nn.Linear(size, size, key=k2)
        self.dropout = eqx.nn.Dropout(0.2)
        self.heads = heads

    def __call__(self, x, mask, *, key, inference=None):
        q, k, v = jnp.split(jax.vmap(self.qkv)(jax.vmap(self.norm)(x)), 3, axis=-1)
        split = lambda t: t.reshape(t.shape[0], self.heads, -1)
        logits = jnp.einsum("shd,thd->hst", split(q), split(k)) / jnp.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(mask, logits, -1e9))
        mixed = jnp.einsum("hst,thd->shd", weights, split(v)).reshape(x.shape)
        return x + self.dropout(jax.vmap(self.out)(mixed), key=key, inference=inference)


class Transformer(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: Block
    depth: int = eqx.field(static=True)

    def __init__(self, vocabulary, size, heads, depth, *, key):
        ekey, bkey = jr.split(key)
        self.embed = eqx.nn.Embedding(vocabulary, size, key=ekey)
        make = eqx.filter_vmap(lambda key: Block(size, heads, key=key))
        self.blocks = make(jr.split(bkey, depth))
        self.depth = depth

    def __call__(self, tokens, *, key=None, inference=None):
        x = jax.vmap(self.embed)(tokens)
        mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        params, static = eqx.partition(self.blocks, eqx.is_array)
        keys = jr.split(jr.key(0) if key is None else key, self.depth)

        def body(x, inputs):
            layer, key = inputs
            block = eqx.combine(layer, static)
            return block(x, mask, key=key, inference=inference), jnp.mean(x)

        x, means = jax.lax.scan(body, x, (params, keys))
        return x @ self.embed.weight.T, means


def main():
    model = Transformer(5, 4, 2, 2, key=jr.PRNGKey(0))
    tokens = jnp.array([0, 3, 1])
    logits, means = eqx.filter_jit(model)(tokens, key=jr.key(1))
    plain, _ = eqx.filter_jit(eqx.nn.inference_mode(model))(tokens)
    return logits, means, plain, model.blocks.qkv.weight.shape
