"""GPT-2, loaded from a folder in the layout of Hugging Face, continues a text.

    python examples/gpt2.py                                # small, of random numbers
    python examples/gpt2.py --folder gpt2 --tokens 464,3290 --count 20

A text is a list of numbers here, because there is no tokenizer. It prints the most likely tokens,
found with a KV cache and in one compiled program.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import pytreemod as pm
from pytreemod import nn

QKV = [f"blocks.*.attention.{name}_proj" for name in ("query", "key", "value")]
NAMES = {
    "wte.weight": "tokens.weight",
    "wpe.weight": "places.weight",
    "h.*.ln_1.*": "blocks.*.norms.0.*",
    # Its matrices are for x @ w, and those of queries, keys and values are one.
    "h.*.attn.c_attn.weight": ([f"{x}.weight" for x in QKV], lambda x: np.split(x.T, 3)),
    "h.*.attn.c_attn.bias": ([f"{x}.bias" for x in QKV], lambda x: np.split(x, 3)),
    "h.*.attn.c_proj.weight": ("blocks.*.attention.output_proj.weight", np.transpose),
    "h.*.attn.c_proj.bias": "blocks.*.attention.output_proj.bias",
    "h.*.attn.bias": None,  # a mask, in older files
    "h.*.ln_2.*": "blocks.*.norms.1.*",
    "h.*.mlp.c_fc.weight": ("blocks.*.up.weight", np.transpose),
    "h.*.mlp.c_fc.bias": "blocks.*.up.bias",
    "h.*.mlp.c_proj.weight": ("blocks.*.down.weight", np.transpose),
    "h.*.mlp.c_proj.bias": "blocks.*.down.bias",
    "ln_f.*": "norm.*",
}
KNOWN = {"model_type": "gpt2", "activation_function": "gelu_new", "tie_word_embeddings": True}
KNOWN |= {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
SMALL = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4}


class Block(pm.Module):
    """Attention, then two affine maps, each with a norm before it."""

    norms: tuple[nn.LayerNorm, nn.LayerNorm]
    attention: nn.MultiheadAttention
    up: nn.Linear
    down: nn.Linear

    def __init__(self, config: dict[str, Any], *, key: Array):
        keys, size = jax.random.split(key, 3), config["n_embd"]
        self.norms = (nn.LayerNorm(size, config.get("layer_norm_epsilon", 1e-5)),) * 2
        has_bias = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
        options = {"is_causal": True, "cache_size": config["n_positions"], "key": keys[0]}
        self.attention = nn.MultiheadAttention(config["n_head"], size, **has_bias, **options)
        wide = config.get("n_inner") or 4 * size
        self.up = nn.Linear(size, wide, key=keys[1])
        self.down = nn.Linear(wide, size, key=keys[2])

    def __call__(self, x: Array, state: nn.State | None = None) -> Any:
        found = self.attention(self.norms[0](x), **({} if state is None else {"state": state}))
        found, state = found if state is not None else (found, None)
        x = x + found
        x = x + self.down(jax.nn.gelu(self.up(self.norms[1](x)), approximate=True))
        return x if state is None else (x, state)


class Gpt2(pm.Module):
    """Maps tokens to the scores of the next one; with State, it continues earlier tokens."""

    tokens: nn.Embedding
    places: nn.Embedding
    blocks: nn.Stack[Block]
    norm: nn.LayerNorm

    def __init__(self, config: dict[str, Any], *, key: Array):
        keys, size = jax.random.split(key, 3), config["n_embd"]
        self.tokens = nn.Embedding(config["vocab_size"], size, key=keys[0])
        self.places = nn.Embedding(config["n_positions"], size, key=keys[1])
        self.blocks = nn.Stack(lambda key: Block(config, key=key), config["n_layer"], key=keys[2])
        self.norm = nn.LayerNorm(size, config.get("layer_norm_epsilon", 1e-5))

    def __call__(self, tokens: Array, state: nn.State | None = None, start: Any = 0) -> Any:
        x = self.tokens(tokens) + self.places(start + jnp.arange(tokens.shape[1]))
        x = self.blocks(x, *(() if state is None else (state,)))
        x, state = x if state is not None else (x, None)
        scores = self.tokens.attend(self.norm(x))
        return scores if state is None else (scores, state)


def read(folder: Path, dtype: Any = None) -> tuple[Gpt2, nn.State]:
    """Load the model that `config.json` describes, with the weights of the folder."""
    config = json.loads((folder / "config.json").read_text())
    for name, value in KNOWN.items():
        if config.get(name, value) != value:
            raise ValueError(f"config.json: expected {name}={value!r}, got {config[name]!r}.")
    like, state = pm.filter_eval_shape(pm.make_with_state(Gpt2), config, key=jax.random.key(0))
    # The header of the file has all names: a number of 8 bytes, and that many bytes of JSON.
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    prefix = "" if "wte.weight" in header else "transformer."
    names = {prefix + name: ours for name, ours in NAMES.items()}
    dtype = dtype or config.get("dtype") or config.get("torch_dtype")
    model = pm.load(folder, like, rename=names, cast=dtype)
    return model, nn.reset_cache(model, state)


@pm.filter_jit
def generate(model: Gpt2, state: nn.State, prompt: Array, count: int) -> tuple[Array, nn.State]:
    """Generate the most likely tokens after a prompt: read it at once, then each new token."""

    def next_one(carry: Any, place: Array) -> Any:
        scores, state = model(carry[0][:, None], carry[1], place)
        return (scores[:, -1].argmax(-1), state), carry[0]

    scores, state = model(prompt, nn.reset_cache(model, state, batch=prompt.shape[0]))
    start, places = (scores[:, -1].argmax(-1), state), prompt.shape[1] + jnp.arange(count)
    (_, state), found = pm.filter_scan(next_one, start, places)
    return found.T, state


def main(arguments: list[str] | None = None) -> None:
    """Load or make a model, and let it write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="folder of config.json and model.safetensors")
    parser.add_argument("--tokens", default="3,1,4,1,5", help="the numbers of the text")
    parser.add_argument("--count", type=int, default=8, help="how many tokens to write")
    parser.add_argument("--dtype", help="the dtype of the weights, such as bfloat16")
    options = parser.parse_args(arguments)
    prompt = jnp.asarray([[int(number) for number in options.tokens.split(",")]])
    if options.folder:
        model, state = read(options.folder, options.dtype)
    else:
        model, state = pm.make_with_state(Gpt2)(SMALL, key=jax.random.key(0))
    if not ((prompt >= 0) & (prompt < model.tokens.num_embeddings)).all():
        parser.error(f"--tokens: expected numbers from 0 to {model.tokens.num_embeddings - 1}")
    if prompt.size + options.count > model.places.num_embeddings:
        parser.error(f"the model has {model.places.num_embeddings} positions, for text and count")
    print(*prompt[0].tolist(), "->", *generate(model, state, prompt, options.count)[0][0].tolist())


if __name__ == "__main__":
    main()
