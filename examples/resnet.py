"""A residual network, loaded from a folder in the layout of Hugging Face, classifies images.

    python examples/resnet.py                               # small, of random numbers
    python examples/resnet.py --folder resnet-50 --images images.npy

The images are a float array (batch, 3, height, width), as `preprocessor_config.json` describes.
Without a file they are noise. The running statistics of BatchNorm are in a State, which is loaded
from the same file. Prints the most likely classes.
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

NAMES = {  # 0 is the model, 1 its State
    "resnet.embedder.embedder.convolution.weight": "0.stem.conv.weight",
    "resnet.embedder.embedder.normalization.running_mean": "1.stem.norm.state_index.0",
    "resnet.embedder.embedder.normalization.running_var": "1.stem.norm.state_index.1",
    "resnet.encoder.**.convolution.weight": "0.**.conv.weight",
    "resnet.encoder.**.normalization.running_mean": "1.**.norm.state_index.0",
    "resnet.encoder.**.normalization.running_var": "1.**.norm.state_index.1",
    "**.normalization.num_batches_tracked": None,
    "resnet.embedder.embedder.normalization.*": "0.stem.norm.*",
    "resnet.encoder.**.normalization.*": "0.**.norm.*",
    "classifier.1.*": "0.head.*",
}
KNOWN = {"model_type": "resnet", "hidden_act": "relu"}
SMALL = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]}


class Unit(pm.Module):
    """A convolution, and BatchNorm of its result."""

    conv: nn.Conv2d
    norm: nn.BatchNorm

    def __init__(self, n_in: int, n_out: int, side: int, stride: int = 1, *, key: Array):
        self.conv = nn.Conv2d(n_in, n_out, side, stride, side // 2, use_bias=False, key=key)
        self.norm = nn.BatchNorm(n_out, momentum=0.9)

    def __call__(self, x: Array, state: nn.State) -> tuple[Array, nn.State]:
        return self.norm(self.conv(x), state)


class Block(nn.StatefulLayer):
    """Two or three units, whose result is added to their input."""

    layer: tuple[Unit, ...]
    shortcut: Unit | None

    def __init__(self, config: dict[str, Any], n_in: int, n_out: int, stride: int, *, key: Array):
        keys = jax.random.split(key, 4)
        thin, is_early = n_out // 4, config.get("downsample_in_bottleneck", False)
        first, second = (stride, 1) if is_early else (1, stride)
        shapes = [(n_in, thin, 1, first), (thin, thin, 3, second), (thin, n_out, 1)]
        if config.get("layer_type") == "basic":
            shapes = [(n_in, n_out, 3, stride), (n_out, n_out, 3)]
        pairs = zip(shapes, keys[1:], strict=False)
        self.layer = tuple(Unit(*shape, key=key) for shape, key in pairs)
        is_same = n_in == n_out and stride == 1
        self.shortcut = None if is_same else Unit(n_in, n_out, 1, stride, key=keys[0])

    def __call__(self, x: Array, state: nn.State) -> tuple[Array, nn.State]:
        found = x
        for number, unit in enumerate(self.layer):
            found, state = unit(found if number == 0 else jax.nn.relu(found), state)
        if self.shortcut is not None:
            x, state = self.shortcut(x, state)
        return jax.nn.relu(x + found), state


class ResNet(pm.Module):
    """Maps images to the scores of classes."""

    stem: Unit
    stages: tuple[nn.Sequential, ...]
    head: nn.Linear

    def __init__(self, config: dict[str, Any], *, key: Array):
        keys = iter(jax.random.split(key, 2 + sum(config["depths"])))
        size = config["embedding_size"]
        self.stem = Unit(config.get("num_channels", 3), size, 7, 2, key=next(keys))
        stages = []
        for wide, depth in zip(config["hidden_sizes"], config["depths"], strict=True):
            stride = 2 if stages or config.get("downsample_in_first_stage", False) else 1
            sizes = [(size, wide, stride), *[(wide, wide, 1)] * (depth - 1)]
            stages.append(nn.Sequential([Block(config, *of, key=next(keys)) for of in sizes]))
            size = wide
        self.stages = tuple(stages)
        self.head = nn.Linear(size, len(config.get("id2label", range(2))), key=next(keys))

    def __call__(self, images: Array, state: nn.State) -> tuple[Array, nn.State]:
        """(batch, channels, height, width) -> (batch, classes)"""
        x, state = self.stem(images, state)
        x = nn.MaxPool2d(3, 2, padding=1)(jax.nn.relu(x))
        for stage in self.stages:
            x, state = stage(x, state)
        return self.head(x.mean((-2, -1))), state


def read(folder: Path, dtype: Any = None) -> tuple[ResNet, nn.State, dict[str, Any]]:
    """Load the model that `config.json` describes, with its weights; return that file, too."""
    config = json.loads((folder / "config.json").read_text())
    for name, value in KNOWN.items():
        if config.get(name, value) != value:
            raise ValueError(f"config.json: expected {name}={value!r}, got {config[name]!r}.")
    make = pm.make_with_state(ResNet)
    like = pm.filter_eval_shape(lambda: make(config, key=jax.random.key(0)))
    dtype = dtype or config.get("dtype") or config.get("torch_dtype")
    # Statistics are in float32, whatever the dtype of the weights.
    cast = pm.by({"1": "float32", ...: dtype})
    return *pm.load(folder, like, rename=NAMES, cast=cast), config


def main(arguments: list[str] | None = None) -> None:
    """Load or make a model, and let it classify."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="folder of config.json and the weights")
    parser.add_argument("--images", type=Path, help="a NumPy file; noise if not given")
    parser.add_argument("--dtype", help="the dtype of the weights, such as bfloat16")
    options = parser.parse_args(arguments)
    if options.folder:
        model, state, config = read(options.folder, options.dtype)
    else:
        model, state, config = *pm.make_with_state(ResNet)(SMALL, key=jax.random.key(0)), SMALL
    noise = jax.random.normal(jax.random.key(1), (2, config.get("num_channels", 3), 64, 64))
    images = jnp.asarray(np.load(options.images) if options.images else noise)
    images = images.astype(model.head.weight.dtype)
    scores, state = pm.filter_jit(pm.inference_mode(model))(images, state)
    for number, chances in enumerate(jax.nn.softmax(scores.astype(jnp.float32)).tolist()):
        best = sorted(enumerate(chances), key=lambda pair: -pair[1])[:3]
        found = [f"{config.get('id2label', {}).get(str(i), i)} {p:.1%}" for i, p in best]
        print(f"image {number}: {', '.join(found)}")


if __name__ == "__main__":
    main()
