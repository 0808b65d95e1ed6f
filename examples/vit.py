"""A vision transformer, loaded from a folder in the layout of Hugging Face, classifies images.

    python examples/vit.py                                  # small, of random numbers
    python examples/vit.py --folder vit-base-patch16-224 --images images.npy

The images are a float array (batch, 3, height, width), as `preprocessor_config.json` describes: for
most folders from -1 to 1. Without a file they are noise. Prints the most likely classes.
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

NAMES = {
    "vit.embeddings.cls_token": ("first", np.ravel),
    "vit.embeddings.position_embeddings": ("places", lambda x: x[0]),
    "vit.embeddings.patch_embeddings.projection.weight": "patches.weight",
    # A bias of a convolution has an axis for each axis of the image, as in Equinox.
    "vit.embeddings.patch_embeddings.projection.bias": ("patches.bias", lambda x: x[:, None, None]),
    "vit.encoder.layer.*.layernorm_before.*": "blocks.*.norms.0.*",
    "vit.encoder.layer.*.attention.attention.query.*": "blocks.*.attention.query_proj.*",
    "vit.encoder.layer.*.attention.attention.key.*": "blocks.*.attention.key_proj.*",
    "vit.encoder.layer.*.attention.attention.value.*": "blocks.*.attention.value_proj.*",
    "vit.encoder.layer.*.attention.output.dense.*": "blocks.*.attention.output_proj.*",
    "vit.encoder.layer.*.layernorm_after.*": "blocks.*.norms.1.*",
    "vit.encoder.layer.*.intermediate.dense.*": "blocks.*.up.*",
    "vit.encoder.layer.*.output.dense.*": "blocks.*.down.*",
    "vit.layernorm.*": "norm.*",
    "classifier.*": "head.*",
}
BIASES = ("use_query_bias", "use_key_bias", "use_value_bias")
KNOWN = {"model_type": "vit", "hidden_act": "gelu"}
SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 128, "image_size": 32, "patch_size": 8}


class Block(pm.Module):
    """Attention, then two affine maps, each with a norm before it."""

    norms: tuple[nn.LayerNorm, nn.LayerNorm]
    attention: nn.MultiheadAttention
    up: nn.Linear
    down: nn.Linear

    def __init__(self, config: dict[str, Any], *, key: Array):
        keys, size = jax.random.split(key, 3), config["hidden_size"]
        norm = nn.LayerNorm(size, config.get("layer_norm_eps", 1e-12))
        self.norms = (norm, norm)
        has_bias = dict.fromkeys(BIASES, config.get("qkv_bias", True))
        heads = config["num_attention_heads"]
        self.attention = nn.MultiheadAttention(
            heads, size, use_output_bias=True, key=keys[0], **has_bias
        )
        wide = config["intermediate_size"]
        self.up = nn.Linear(size, wide, key=keys[1])
        self.down = nn.Linear(wide, size, key=keys[2])

    def __call__(self, x: Array) -> Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x)), approximate=False))


class Vit(pm.Module):
    """Maps images to the scores of classes."""

    patches: nn.Conv2d
    first: Array
    places: Array
    blocks: nn.Stack[Block]
    norm: nn.LayerNorm
    head: nn.Linear

    def __init__(self, config: dict[str, Any], *, key: Array):
        keys, size, side = jax.random.split(key, 4), config["hidden_size"], config["patch_size"]
        channels, classes = config.get("num_channels", 3), len(config.get("id2label", range(2)))
        self.patches = nn.Conv2d(channels, size, side, stride=side, key=keys[0])
        self.first = jnp.zeros(size)
        count = (config["image_size"] // side) ** 2
        self.places = 0.02 * jax.random.normal(keys[1], (1 + count, size))
        depth = config["num_hidden_layers"]
        self.blocks = nn.Stack(lambda key: Block(config, key=key), depth, key=keys[2])
        self.norm = nn.LayerNorm(size, config.get("layer_norm_eps", 1e-12))
        self.head = nn.Linear(size, classes, key=keys[3])

    def __call__(self, images: Array) -> Array:
        """(batch, channels, height, width) -> (batch, classes)"""
        x = self.patches(images)
        x = x.reshape(*x.shape[:2], -1).mT
        first = jnp.broadcast_to(self.first, (len(x), 1, x.shape[-1]))
        x = self.blocks(jnp.concatenate([first, x], axis=1) + self.places)
        # The first position, which has no patch, describes the complete image.
        return self.head(self.norm(x[:, 0]))


def read(folder: Path, dtype: Any = None) -> tuple[Vit, dict[str, Any]]:
    """Load the model that `config.json` describes, with its weights; return that file, too."""
    config = json.loads((folder / "config.json").read_text())
    for name, value in KNOWN.items():
        if config.get(name, value) != value:
            raise ValueError(f"config.json: expected {name}={value!r}, got {config[name]!r}.")
    like = pm.filter_eval_shape(lambda: Vit(config, key=jax.random.key(0)))
    dtype = dtype or config.get("dtype") or config.get("torch_dtype")
    return pm.load(folder, like, rename=NAMES, cast=dtype), config


def main(arguments: list[str] | None = None) -> None:
    """Load or make a model, and let it classify."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="folder of config.json and the weights")
    parser.add_argument("--images", type=Path, help="a NumPy file; noise if not given")
    parser.add_argument("--dtype", help="the dtype of the weights, such as bfloat16")
    options = parser.parse_args(arguments)
    if options.folder:
        model, config = read(options.folder, options.dtype)
    else:
        model, config = Vit(SMALL, key=jax.random.key(0)), SMALL
    noise = (2, config.get("num_channels", 3), config["image_size"], config["image_size"])
    images = (
        np.load(options.images) if options.images else jax.random.normal(jax.random.key(1), noise)
    )
    scores = pm.filter_jit(model)(jnp.asarray(images, model.first.dtype))
    for number, chances in enumerate(jax.nn.softmax(scores.astype(jnp.float32)).tolist()):
        best = sorted(enumerate(chances), key=lambda pair: -pair[1])[:3]
        found = [f"{config.get('id2label', {}).get(str(i), i)} {p:.1%}" for i, p in best]
        print(f"image {number}: {', '.join(found)}")


if __name__ == "__main__":
    main()
