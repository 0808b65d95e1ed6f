"""Every layer of `pytreemod.nn`, with a batch for it, to test the laws on.

Eight devices divide all sizes, so the laws on meshes need no other catalogue.
"""

import functools as ft
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.nn.numbers_to_compare import wave


@dataclass(frozen=True)
class Entry:
    """A layer, how to build it, and a batch for it."""

    name: str
    make: Callable[[Any], Any]
    x: Any  # the first axis is the batch
    batches: bool = True  # whether layer(batch) is to equal vmap(layer)(batch)
    out: int = 0  # the axis of the weights that becomes the features of the result
    into: int = 1  # the axis of the weights that is summed over
    stacked: str | None = None  # where arrays have an axis more, before those
    features: int = -1  # the axis of x that the weights are summed over
    axis_name: str | None = None  # whether x is mapped over, under that name
    keyed: bool = True  # whether it is called with a key
    caches: bool = False  # whether its State has a cache, of as many sequences as x

    def build(self, seed: int = 0) -> tuple[Any, nn.State]:
        layer, state = nn.make_with_state(self.make)(jax.random.key(seed))
        state = nn.reset_cache(layer, state, batch=len(self.x)) if self.caches else state
        return layer, state.seed(jax.random.key(2))

    def fill(self) -> tuple[Any, nn.State]:
        """The same with numbers of a pattern; to draw them takes longer."""
        layer, state = jax.eval_shape(self.build)
        # A variance is positive; sums of other leaves have the magnitude of their terms.
        return jax.tree.map(ft.partial(_filled, 0.0), layer), jax.tree.map(
            ft.partial(_filled, 0.75), state
        )

    def apply(self, layer: Any, state: nn.State, x: Any = None, seed: int = 1) -> tuple[Any, Any]:
        x = jnp.asarray(self.x) if x is None else x
        options = {"key": jax.random.key(seed)} if self.keyed else {}
        if "state" not in inspect.signature(layer).parameters:
            return layer(x, **options), state
        if self.axis_name is None:
            return layer(x, state, **options)
        mapped = jax.vmap(layer, in_axes=(0, None), out_axes=(0, None), axis_name=self.axis_name)
        return mapped(x, state)


def _filled(mean: float, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Numbers without a pattern around a mean; a key, or zeros."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(2), leaf.shape)
    values = mean + wave(*leaf.shape) / 4
    return jnp.asarray(
        values if jnp.issubdtype(leaf.dtype, jnp.floating) else 0 * values, leaf.dtype
    )


def as_parameters(entries: Iterable[Any], name: Callable[[Any], str] = lambda entry: entry.name):
    """One entry of each class for every run; its other forms, named after it, in the slow one."""
    met, found = set(), []
    for entry in entries:
        kind = name(entry).split()[0]
        marks = [pytest.mark.slow] if kind in met else []
        met.add(kind)
        found.append(pytest.param(entry, id=name(entry), marks=marks))
    return found


def flatten(x):
    return x.reshape(x.shape[0], -1)


def small_net(key):
    """A network of every kind of layer that `Sequential` has to deal with."""
    one, two = jax.random.split(key)
    return nn.Sequential(
        [
            nn.Conv2d(4, 8, 3, key=one),
            nn.BatchNorm(8),
            nn.Lambda(jax.nn.relu),
            nn.MaxPool2d(2),
            nn.Dropout(0.5),
            nn.Lambda(flatten),
            nn.Linear(8, 4, key=two),
        ]
    )


def both_ways(key):
    one, two = jax.random.split(key)
    return nn.Bidirectional(nn.RNN(nn.GRUCell(8, 4, key=one)), nn.RNN(nn.GRUCell(8, 4, key=two)))


VECTORS, SEQUENCES, IMAGES = wave(4, 8), wave(4, 3, 8), wave(4, 8, 4, 4)
LINES, VOLUMES = wave(4, 8, 4), wave(4, 8, 2, 2, 3)

CATALOGUE = [
    Entry("Linear", lambda key: nn.Linear(8, 4, key=key), VECTORS),
    Entry("Linear to scalar", lambda key: nn.Linear(8, "scalar", key=key), VECTORS),
    Entry("Linear from scalar", lambda key: nn.Linear("scalar", 8, key=key), wave(4)),
    Entry(
        "LinearGeneral",
        lambda key: nn.LinearGeneral((8, 2), (2, 4), (-1, -3), key=key),
        wave(4, 2, 5, 8),
        out=-1,
        into=0,
    ),
    Entry(
        "Einsum",
        lambda key: nn.Einsum("...hi,hio->...ho", (4, 8, 4), (4, 1), key=key),
        wave(4, 4, 8),
        out=2,
    ),
    Entry("MLP", lambda key: nn.MLP(8, 4, 8, 2, key=key), VECTORS),
    Entry(
        "MLP with a Module between",
        lambda key: nn.MLP(8, "scalar", 4, 2, nn.PReLU(), jnp.tanh, key=key),
        VECTORS,
        stacked=".activation",
    ),
    Entry("Conv1d", lambda key: nn.Conv1d(8, 4, 2, key=key), LINES, features=1),
    Entry("Conv2d", lambda key: nn.Conv2d(8, 4, 3, 2, "SAME", key=key), IMAGES, features=1),
    Entry(
        "Conv2d with groups",
        lambda key: nn.Conv2d(8, 8, 3, groups=2, padding=1, padding_mode="REFLECT", key=key),
        IMAGES,
        features=1,
    ),
    Entry(
        "ConvTranspose1d",
        lambda key: nn.ConvTranspose1d(8, 4, 3, 2, 0, "SAME", padding_mode="CIRCULAR", key=key),
        LINES,
        features=1,
    ),
    Entry(
        "ConvTranspose2d",
        lambda key: nn.ConvTranspose2d(8, 4, 3, 2, 1, 1, key=key),
        IMAGES,
        features=1,
    ),
    Entry("MaxPool2d", lambda key: nn.MaxPool2d(2, 2, 1), IMAGES, features=1),
    Entry("AvgPool1d", lambda key: nn.AvgPool1d(3, padding=1), LINES, features=1),
    Entry("Pool", lambda key: nn.Pool(jnp.inf, jax.lax.min, 1, 2), LINES, features=1),
    Entry("AdaptivePool", lambda key: nn.AdaptivePool(3, 1, jnp.min), LINES, features=1),
    Entry("AdaptiveAvgPool2d", lambda key: nn.AdaptiveAvgPool2d((2, 3)), IMAGES, features=1),
    Entry("AdaptiveMaxPool1d", lambda key: nn.AdaptiveMaxPool1d(3), LINES, features=1),
    Entry("Conv3d", lambda key: nn.Conv3d(8, 8, 2, use_bias=False, key=key), VOLUMES, features=1),
    Entry(
        "ConvTranspose3d",
        lambda key: nn.ConvTranspose3d(8, 8, 2, use_bias=False, key=key),
        VOLUMES,
        features=1,
    ),
    Entry("MaxPool1d", lambda key: nn.MaxPool1d(2), LINES, features=1),
    Entry("MaxPool3d", lambda key: nn.MaxPool3d(2), VOLUMES, features=1),
    Entry("AvgPool2d", lambda key: nn.AvgPool2d(2, 2, use_ceil=True), IMAGES, features=1),
    Entry("AvgPool3d", lambda key: nn.AvgPool3d(2), VOLUMES, features=1),
    Entry("AdaptiveAvgPool1d", lambda key: nn.AdaptiveAvgPool1d(2), LINES, features=1),
    Entry("AdaptiveAvgPool3d", lambda key: nn.AdaptiveAvgPool3d(1), VOLUMES, features=1),
    Entry("AdaptiveMaxPool2d", lambda key: nn.AdaptiveMaxPool2d((2, 3)), IMAGES, features=1),
    Entry("AdaptiveMaxPool3d", lambda key: nn.AdaptiveMaxPool3d(1), VOLUMES, features=1),
    Entry("LayerNorm", lambda key: nn.LayerNorm(8), SEQUENCES),
    Entry("RMSNorm", lambda key: nn.RMSNorm(8), SEQUENCES),
    Entry("PReLU", lambda key: nn.PReLU(), VECTORS),
    Entry("PReLU for each channel", lambda key: nn.PReLU(jnp.full((8,), 0.1)), VECTORS),
    Entry("GroupNorm", lambda key: nn.GroupNorm(4, 8, num_spatial_dims=1), LINES, features=1),
    Entry(
        "InstanceNorm",
        lambda key: nn.InstanceNorm(8, channelwise_affine=True, num_spatial_dims=1),
        LINES,
        features=1,
    ),
    Entry("BatchNorm", lambda key: nn.BatchNorm(8), LINES, features=1, batches=False),
    Entry(
        "BatchNorm that averages", lambda key: nn.BatchNorm(8, mode="ema"), VECTORS, batches=False
    ),
    Entry(
        "BatchNorm under vmap",
        lambda key: nn.BatchNorm(8, "batch"),
        LINES,
        features=1,
        axis_name="batch",
        batches=False,
    ),
    Entry("Dropout", lambda key: nn.Dropout(0.5), VECTORS, batches=False),
    Entry(
        "Dropout with a stream",
        lambda key: nn.Dropout(0.5, broadcast_dims=0, stream=nn.RngStream()),
        VECTORS,
        keyed=False,
        batches=False,
    ),
    Entry(
        "Lazy, made by an example",
        lambda key: pm.materialize(
            nn.Lazy(lambda n, key: nn.Linear(n, 4, key=key), key=key), jnp.asarray(VECTORS)
        ),
        VECTORS,
    ),
    Entry(
        "SpectralNorm",
        lambda key: nn.SpectralNorm(nn.Linear(8, 4, key=key), "weight", key=key),
        VECTORS,
        batches=False,
    ),
    Entry(
        "SpectralNorm of a convolution",
        lambda key: nn.SpectralNorm(nn.Conv1d(8, 4, 2, key=key), "weight", key=key),
        LINES,
        features=1,
        batches=False,
    ),
    Entry("WeightNorm", lambda key: nn.WeightNorm(nn.Linear(8, 4, key=key)), VECTORS),
    Entry(
        "WeightNorm of a convolution",
        lambda key: nn.WeightNorm(nn.Conv1d(8, 4, 2, key=key), axis=None),
        LINES,
        features=1,
    ),
    Entry("Embedding", lambda key: nn.Embedding(8, 4, key=key), jnp.array([[3, 0, 7]] * 4), 1, 0),
    Entry("GRUCell over time", lambda key: nn.RNN(nn.GRUCell(8, 4, key=key)), SEQUENCES),
    Entry("LSTMCell over time", lambda key: nn.RNN(nn.LSTMCell(8, 4, key=key)), SEQUENCES),
    Entry("SimpleCell over time", lambda key: nn.RNN(nn.SimpleCell(8, 4, key=key)), SEQUENCES),
    Entry("Bidirectional", both_ways, SEQUENCES),
    Entry(
        "RotaryPositionalEmbedding",
        lambda key: nn.RotaryPositionalEmbedding(8),
        VECTORS,
        batches=False,
    ),
    Entry(
        "MultiheadAttention",
        lambda key: nn.MultiheadAttention(4, 8, use_value_bias=True, key=key),
        SEQUENCES,
    ),
    Entry(
        "MultiheadAttention with dropout",
        lambda key: nn.MultiheadAttention(4, 8, qk_size=2, output_size=4, dropout_p=0.5, key=key),
        SEQUENCES,
        batches=False,
    ),
    Entry(
        "MultiheadAttention of today",
        lambda key: nn.MultiheadAttention(
            4,
            8,
            num_kv_heads=2,
            is_causal=True,
            window=2,
            qk_norm="rms",
            rotary=nn.RotaryPositionalEmbedding(2, interleaved=True),
            key=key,
        ),
        SEQUENCES,
    ),
    Entry(
        "MultiheadAttention with a cache",
        lambda key: nn.MultiheadAttention(4, 8, is_causal=True, cache_size=3, key=key),
        SEQUENCES,
        caches=True,
        batches=False,
    ),
    Entry("Identity", lambda key: nn.Identity(), VECTORS),
    Entry("Lambda", lambda key: nn.Lambda(jnp.tanh), VECTORS),
    Entry(
        "Ensemble",
        lambda key: nn.Ensemble(ft.partial(nn.Linear, 8, 4), 2, key=key),
        VECTORS,
        stacked="",
        batches=False,
    ),
    Entry(
        "Stack", lambda key: nn.Stack(ft.partial(nn.Linear, 8, 8), 2, key=key), VECTORS, stacked=""
    ),
    Entry("Sequential", small_net, wave(4, 4, 4, 4), features=1, batches=False),
]
