"""Llama, loaded from a folder in the layout of Hugging Face, continues a text.

    python examples/llama.py --quantize int8                   # small, of random numbers
    python examples/llama.py --folder Llama-3.2-1B --tokens 128000,791,6864 --dtype bfloat16

A text is numbers: there is no tokenizer. Prints the most likely tokens, found with a KV cache.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import pytreemod as pm
from pytreemod import nn

NAMES = {
    "model.embed_tokens.weight": "embed.weight",
    "model.layers.*.input_layernorm.*": "layers.*.norms.0.*",
    "model.layers.*.self_attn.q_proj.weight": "layers.*.attention.query_proj.weight",
    "model.layers.*.self_attn.k_proj.weight": "layers.*.attention.key_proj.weight",
    "model.layers.*.self_attn.v_proj.weight": "layers.*.attention.value_proj.weight",
    "model.layers.*.self_attn.o_proj.weight": "layers.*.attention.output_proj.weight",
    "model.layers.*.self_attn.rotary_emb.inv_freq": None,  # in older files; it is computed
    "model.layers.*.post_attention_layernorm.*": "layers.*.norms.1.*",
    "model.layers.*.mlp.*.weight": "layers.*.*.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
KNOWN = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def rotary_of(config: dict[str, Any]) -> nn.RotaryPositionalEmbedding:
    """Use `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of 4."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", config.get("rope_theta", 10_000.0))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return nn.RotaryPositionalEmbedding(size, theta, scaling=rope)


class Block(pm.Module):
    """Attention, then two linear maps with a gate, each with a norm before it."""

    norms: tuple[nn.RMSNorm, nn.RMSNorm]
    attention: nn.MultiheadAttention
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(self, config: dict[str, Any], *, key: jax.Array):
        keys, rotary = jax.random.split(key, 4), rotary_of(config)
        size, wide = config["hidden_size"], config["intermediate_size"]
        self.norms = (nn.RMSNorm(size, config.get("rms_norm_eps", 1e-6), use_bias=False),) * 2
        sizes = dict.fromkeys(("qk_size", "vo_size"), rotary.embedding_size)
        sizes |= {"num_kv_heads": config.get("num_key_value_heads"), "cache_size": 1}
        heads, options = config["num_attention_heads"], {"is_causal": True, "rotary": rotary}
        self.attention = nn.MultiheadAttention(heads, size, key=keys[0], **sizes, **options)
        self.gate_proj = nn.Linear(size, wide, use_bias=False, key=keys[1])
        self.up_proj = nn.Linear(size, wide, use_bias=False, key=keys[2])
        self.down_proj = nn.Linear(wide, size, use_bias=False, key=keys[3])

    def __call__(self, x: jax.Array, state: nn.State | None = None) -> Any:
        found = self.attention(self.norms[0](x), **({} if state is None else {"state": state}))
        found, state = found if state is not None else (found, None)
        hidden = self.norms[1](x + found)
        x = x + found + self.down_proj(jax.nn.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return x if state is None else (x, state)


class Llama(pm.Module):
    """Maps tokens to the scores of the next one; with State, it continues earlier tokens."""

    embed: nn.Embedding
    layers: nn.Stack[Block]
    norm: nn.RMSNorm
    head: nn.Linear | None

    def __init__(self, config: dict[str, Any], *, key: jax.Array):
        keys, rows, size = jax.random.split(key, 3), config["vocab_size"], config["hidden_size"]
        self.embed = nn.Embedding(rows, size, key=keys[0])
        depth, is_tied = config["num_hidden_layers"], config.get("tie_word_embeddings", False)
        self.layers = nn.Stack(lambda key: Block(config, key=key), depth, key=keys[1])
        self.norm = nn.RMSNorm(size, config.get("rms_norm_eps", 1e-6), use_bias=False)
        self.head = None if is_tied else nn.Linear(size, rows, use_bias=False, key=keys[2])

    def __call__(self, tokens: jax.Array, state: nn.State | None = None) -> Any:
        x = self.layers(self.embed(tokens), *(() if state is None else (state,)))
        x, state = x if state is not None else (x, None)
        scores = self.embed.attend(self.norm(x)) if self.head is None else self.head(self.norm(x))
        return scores if state is None else (scores, state)


def read(folder: Path, dtype: Any = None) -> tuple[Llama, nn.State]:
    """Load the model that `config.json` describes, with the weights of the folder."""
    config = json.loads((folder / "config.json").read_text())
    for name, value in KNOWN.items():
        if config.get(name, value) != value:
            raise ValueError(f"config.json: expected {name}={value!r}, got {config[name]!r}.")
    like, state = pm.filter_eval_shape(pm.make_with_state(Llama), config, key=jax.random.key(0))
    names = {name: to for name, to in NAMES.items() if like.head or name != "lm_head.weight"}
    dtype = dtype or config.get("dtype") or config.get("torch_dtype")
    model = pm.load(folder, like, rename=names, cast=dtype)
    return model, nn.reset_cache(model, state)


@pm.filter_jit
def generate(model: Llama, state: nn.State, prompt: jax.Array, count: int) -> Any:
    """Generate the most likely tokens after a prompt: read it at once, then each new token."""

    def next_one(carry: Any, _: None) -> Any:
        scores, state = model(carry[0][:, None], carry[1])
        return (scores[:, -1].argmax(-1), state), carry[0]

    state = nn.reset_cache(model, state, batch=len(prompt), size=prompt.shape[1] + count)
    scores, state = model(prompt, state)
    (_, state), found = pm.filter_scan(next_one, (scores[:, -1].argmax(-1), state), length=count)
    return found.T, state


def main(arguments: list[str] | None = None) -> None:
    """Load or make a model, and let it write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="folder of config.json and the weights")
    parser.add_argument("--tokens", default="3,1,4,1,5", help="the numbers of the text")
    parser.add_argument("--count", type=int, default=8, help="how many tokens to write")
    parser.add_argument("--dtype", help="the dtype of the weights, such as bfloat16")
    parser.add_argument("--quantize", help="quantize the loaded matrices to int8 or int4")
    options = parser.parse_args(arguments)
    prompt = jnp.asarray([[int(number) for number in options.tokens.split(",")]])
    if options.folder:
        model, state = read(options.folder, options.dtype)
    else:
        model, state = pm.make_with_state(Llama)(SMALL, key=jax.random.key(0))
    if not ((prompt >= 0) & (prompt < model.embed.num_embeddings)).all():
        parser.error(f"--tokens: expected numbers from 0 to {model.embed.num_embeddings - 1}")
    if options.quantize:
        exact, model = model, pm.quantize(model, options.quantize)
        error = jnp.abs(model(prompt) - exact(prompt)).max()
        before, after = (sum(x.nbytes for x in jax.tree.leaves(m)) for m in (exact, model))
        print(f"{before:,} bytes before, {after:,} after; scores differ by {error:.3f}")
    print(*prompt[0].tolist(), "->", *generate(model, state, prompt, options.count)[0][0].tolist())


if __name__ == "__main__":
    main()
