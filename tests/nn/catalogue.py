"""Every layer of `pytreemod.nn`, with an input for it, to test the laws on."""

import functools as ft
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pytreemod import nn
from pytreemod.module.classes import Module
from tests.nn.numbers_to_compare import wave


class Slope(Module):
    """An activation that holds an array."""

    factor: jax.Array

    def __call__(self, x):
        return jnp.where(x > 0, x, self.factor * x)


@dataclass(frozen=True)
class Entry:
    """A layer, how to build it, and one input for it."""

    name: str
    make: Callable[[Any], Any]
    x: Any
    batches: bool = True  # whether layer(batch) is to equal vmap(layer)(batch)
    axis_name: str | None = None  # whether x is a batch to be mapped over, under that name
    keyed: bool = True  # whether it is called with a key

    def build(self, seed: int = 0) -> tuple[Any, nn.State]:
        """The layer and its State."""
        layer, state = nn.make_with_state(self.make)(jax.random.key(seed))
        return layer, state.seed(jax.random.key(2))

    def apply(self, layer: Any, state: nn.State, x: Any = None, seed: int = 1) -> tuple[Any, Any]:
        """The layer's output, and the State afterwards."""
        x = jnp.asarray(self.x) if x is None else x
        key = jax.random.key(seed) if self.keyed else None
        if not (isinstance(layer, nn.StatefulLayer) and layer.is_stateful()):
            return layer(x, key=key), state
        if self.axis_name is None:
            return layer(x, state, key=key)
        mapped = jax.vmap(layer, in_axes=(0, None), out_axes=(0, None), axis_name=self.axis_name)
        return mapped(x, state)


def flatten(x):
    """A batch of images as a batch of vectors."""
    return x.reshape(x.shape[0], -1)


def small_net(key):
    """A network of every kind of layer that `Sequential` has to deal with."""
    one, two = jax.random.split(key)
    return nn.Sequential(
        [
            nn.Conv2d(1, 2, 3, key=one),
            nn.BatchNorm(2),
            nn.Lambda(jax.nn.relu),
            nn.MaxPool2d(2),
            nn.Dropout(0.5),
            nn.Lambda(flatten),
            nn.Linear(18, 3, key=two),
        ]
    )


def both_ways(key):
    """Two small recurrent networks, with one number of hidden state each."""
    one, two = jax.random.split(key)
    return nn.Bidirectional(
        nn.RNN(nn.SimpleCell(2, 1, key=one)), nn.RNN(nn.SimpleCell(2, 1, False, key=two))
    )


CATALOGUE = [
    Entry("Linear", lambda key: nn.Linear(3, 4, key=key), wave(3)),
    Entry("Linear without bias", lambda key: nn.Linear(3, 4, False, key=key), wave(3)),
    Entry("Linear from scalar", lambda key: nn.Linear("scalar", 4, key=key), wave()),
    Entry("Linear to scalar", lambda key: nn.Linear(3, "scalar", key=key), wave(3)),
    Entry(
        "LinearGeneral",
        lambda key: nn.LinearGeneral((2, 3), (4, 2), (-1, -3), key=key),
        wave(3, 5, 2),
    ),
    Entry(
        "Einsum", lambda key: nn.Einsum("...hi,hio->...ho", (2, 3, 4), (2, 1), key=key), wave(2, 3)
    ),
    Entry("Scale", lambda key: nn.Scale((2, 1)), wave(2, 3)),
    Entry("MLP", lambda key: nn.MLP(3, 2, 4, 2, key=key), wave(3)),
    Entry(
        "MLP with a Module between",
        lambda key: nn.MLP(3, "scalar", 4, 2, Slope(jnp.array(0.1)), jnp.tanh, key=key),
        wave(3),
    ),
    Entry("MLP that scans", lambda key: nn.MLP(3, 2, 4, 3, scan=True, key=key), wave(3)),
    Entry("Conv1d", lambda key: nn.Conv1d(2, 3, 2, key=key), wave(2, 4)),
    Entry("Conv2d", lambda key: nn.Conv2d(2, 4, 3, 2, "SAME", groups=2, key=key), wave(2, 4, 5)),
    Entry("Conv3d", lambda key: nn.Conv3d(1, 2, 2, use_bias=False, key=key), wave(1, 3, 2, 3)),
    Entry(
        "ConvTranspose1d",
        lambda key: nn.ConvTranspose1d(
            2, 3, 3, 2, padding="SAME", padding_mode="CIRCULAR", key=key
        ),
        wave(2, 3),
    ),
    Entry(
        "ConvTranspose2d",
        lambda key: nn.ConvTranspose2d(4, 2, 3, 2, 1, 1, groups=2, key=key),
        wave(4, 2, 3),
    ),
    Entry(
        "ConvTranspose3d",
        lambda key: nn.ConvTranspose3d(1, 2, 2, use_bias=False, key=key),
        wave(1, 2, 1, 2),
    ),
    Entry("MaxPool1d", lambda key: nn.MaxPool1d(2), wave(2, 4)),
    Entry("MaxPool2d", lambda key: nn.MaxPool2d(2, 2, 1), wave(2, 4, 4)),
    Entry("MaxPool3d", lambda key: nn.MaxPool3d(2), wave(2, 2, 3, 2)),
    Entry("AvgPool1d", lambda key: nn.AvgPool1d(3, padding=1), wave(2, 4)),
    Entry("AvgPool2d", lambda key: nn.AvgPool2d(2, 2, use_ceil=True), wave(2, 3, 4)),
    Entry("AvgPool3d", lambda key: nn.AvgPool3d(2), wave(2, 2, 3, 2)),
    Entry("Pool", lambda key: nn.Pool(jnp.inf, jax.lax.min, 1, 2), wave(2, 4)),
    Entry("AdaptivePool", lambda key: nn.AdaptivePool(2, 1, jnp.min), wave(2, 5)),
    Entry("AdaptiveAvgPool1d", lambda key: nn.AdaptiveAvgPool1d(2), wave(2, 5)),
    Entry("AdaptiveAvgPool2d", lambda key: nn.AdaptiveAvgPool2d((2, 3)), wave(2, 4, 3)),
    Entry("AdaptiveAvgPool3d", lambda key: nn.AdaptiveAvgPool3d(1), wave(2, 2, 3, 2)),
    Entry("AdaptiveMaxPool1d", lambda key: nn.AdaptiveMaxPool1d(2), wave(2, 5)),
    Entry("AdaptiveMaxPool2d", lambda key: nn.AdaptiveMaxPool2d((2, 3)), wave(2, 4, 3)),
    Entry("AdaptiveMaxPool3d", lambda key: nn.AdaptiveMaxPool3d(1), wave(2, 2, 3, 2)),
    Entry("LayerNorm", lambda key: nn.LayerNorm((2, 3)), wave(2, 3)),
    Entry("RMSNorm", lambda key: nn.RMSNorm((2, 3)), wave(2, 3)),
    Entry("PReLU", lambda key: nn.PReLU(), wave(3)),
    Entry("PReLU for each channel", lambda key: nn.PReLU(jnp.full((2, 1), 0.1)), wave(2, 3)),
    Entry("GroupNorm", lambda key: nn.GroupNorm(2, 4), wave(4, 3), batches=False),
    Entry("GroupNorm of batches", lambda key: nn.GroupNorm(2, 4, num_spatial_dims=1), wave(4, 3)),
    Entry("InstanceNorm", lambda key: nn.InstanceNorm(2), wave(2, 3), batches=False),
    Entry(
        "InstanceNorm of batches",
        lambda key: nn.InstanceNorm(2, channelwise_affine=True, num_spatial_dims=1),
        wave(2, 3),
    ),
    Entry(
        "BatchNorm with channels last",
        lambda key: nn.BatchNorm(3, channel_axis=-1),
        wave(4, 2, 3),
        batches=False,
    ),
    Entry("BatchNorm", lambda key: nn.BatchNorm(3), wave(4, 3), batches=False),
    Entry(
        "BatchNorm under vmap",
        lambda key: nn.BatchNorm(3, "batch"),
        wave(4, 3, 2),
        batches=False,
        axis_name="batch",
    ),
    Entry("Dropout", lambda key: nn.Dropout(0.5), wave(6), batches=False),
    Entry(
        "Dropout with a stream",
        lambda key: nn.Dropout(0.5, broadcast_dims=0, stream=nn.RngStream()),
        wave(3, 6),
        batches=False,
        keyed=False,
    ),
    Entry(
        "SpectralNorm",
        lambda key: nn.SpectralNorm(nn.Linear(3, 4, key=key), "weight", key=key),
        wave(3),
        batches=False,
    ),
    Entry("WeightNorm", lambda key: nn.WeightNorm(nn.Linear(3, 4, key=key)), wave(3)),
    Entry(
        "WeightNorm of a convolution",
        lambda key: nn.WeightNorm(nn.Conv1d(2, 3, 2, key=key), axis=None),
        wave(2, 4),
    ),
    Entry("Embedding", lambda key: nn.Embedding(5, 2, key=key), jnp.array([3, 0])),
    Entry("GRUCell over time", lambda key: nn.RNN(nn.GRUCell(2, 3, key=key)), wave(2, 2)),
    Entry("LSTMCell over time", lambda key: nn.RNN(nn.LSTMCell(2, 3, key=key)), wave(2, 2)),
    Entry("SimpleCell over time", lambda key: nn.RNN(nn.SimpleCell(2, 3, key=key)), wave(2, 2)),
    Entry("Bidirectional", both_ways, wave(2, 2)),
    Entry("RotaryPositionalEmbedding", lambda key: nn.RotaryPositionalEmbedding(4), wave(3, 4)),
    Entry(
        "MultiheadAttention",
        lambda key: nn.MultiheadAttention(2, 4, use_value_bias=True, key=key),
        wave(3, 4),
    ),
    Entry(
        "MultiheadAttention with dropout",
        lambda key: nn.MultiheadAttention(2, 4, qk_size=3, output_size=5, dropout_p=0.5, key=key),
        wave(3, 4),
        batches=False,
    ),
    Entry(
        "MultiheadAttention of today",
        lambda key: nn.MultiheadAttention(
            2,
            4,
            num_kv_heads=1,
            is_causal=True,
            window=2,
            qk_norm="rms",
            rotary=nn.RotaryPositionalEmbedding(2, interleaved=True),
            key=key,
        ),
        wave(3, 4),
    ),
    Entry(
        "MultiheadAttention with a cache",
        lambda key: nn.MultiheadAttention(2, 4, is_causal=True, cache_size=3, key=key),
        wave(3, 4),
        batches=False,
    ),
    Entry("Identity", lambda key: nn.Identity(), wave(3)),
    Entry("Lambda", lambda key: nn.Lambda(jnp.tanh), wave(3)),
    Entry(
        "Ensemble",
        lambda key: nn.Ensemble(ft.partial(nn.Linear, 3, 3), 2, key=key),
        wave(3),
        batches=False,
    ),
    Entry("Stack", lambda key: nn.Stack(ft.partial(nn.Linear, 3, 3), 2, key=key), wave(3)),
    Entry("Sequential", small_net, wave(4, 1, 6, 6), batches=False),
]
