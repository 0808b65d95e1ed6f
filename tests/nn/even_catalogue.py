"""Every layer of `pytreemod.nn` with sizes that eight devices divide, and a batch for it."""

import functools as ft
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pytreemod import nn
from tests.nn.catalogue import Slope
from tests.nn.numbers_to_compare import wave


@dataclass(frozen=True)
class EvenEntry:
    """A layer, how to build it, and a batch for it."""

    name: str
    make: Callable[[Any], Any]
    x: Any  # the first axis is the batch
    out: int = 0  # the axis of the weights that becomes the features of the result
    into: int = 1  # the axis of the weights that is summed over
    stacked: str | None = None  # where arrays have an axis more, before those
    features: int = -1  # the axis of x that the weights are summed over
    axis_name: str | None = None  # whether x is mapped over, under that name
    keyed: bool = True  # whether it is called with a key
    caches: bool = False  # whether its State has a cache, of as many sequences as x

    def build(self) -> tuple[Any, nn.State]:
        """The layer and its State, of arrays with the right shapes; to draw them takes longer."""
        layer, state = jax.eval_shape(self._make)
        # A variance is positive; sums of other leaves have the magnitude of their terms.
        return jax.tree.map(ft.partial(_filled, 0.0), layer), jax.tree.map(
            ft.partial(_filled, 0.75), state
        )

    def _make(self) -> tuple[Any, nn.State]:
        layer, state = nn.make_with_state(self.make)(jax.random.key(0))
        state = nn.reset_cache(layer, state, batch=len(self.x)) if self.caches else state
        return layer, state.seed(jax.random.key(2))

    def apply(self, layer: Any, state: nn.State, x: Any) -> tuple[Any, Any]:
        """The layer's output, and the State afterwards."""
        key = jax.random.key(1) if self.keyed else None
        if not (isinstance(layer, nn.StatefulLayer) and layer.is_stateful()):
            return layer(x, key=key), state
        if self.axis_name is None:
            return layer(x, state, key=key)
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


def flatten(x):
    """A batch of images as a batch of vectors."""
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
    """Two small recurrent networks."""
    one, two = jax.random.split(key)
    return nn.Bidirectional(nn.RNN(nn.GRUCell(8, 4, key=one)), nn.RNN(nn.GRUCell(8, 4, key=two)))


VECTORS, SEQUENCES, IMAGES = wave(4, 8), wave(4, 3, 8), wave(4, 8, 4, 4)
LINES, VOLUMES = wave(4, 8, 4), wave(4, 8, 2, 2, 3)

EVEN_CATALOGUE = [
    EvenEntry("Linear", lambda key: nn.Linear(8, 4, key=key), VECTORS),
    EvenEntry("Linear to scalar", lambda key: nn.Linear(8, "scalar", key=key), VECTORS),
    EvenEntry("Linear from scalar", lambda key: nn.Linear("scalar", 8, key=key), wave(4)),
    EvenEntry(
        "LinearGeneral",
        lambda key: nn.LinearGeneral((8, 2), (2, 4), (-1, -3), key=key),
        wave(4, 2, 5, 8),
        out=-1,
        into=0,
    ),
    EvenEntry(
        "Einsum",
        lambda key: nn.Einsum("...hi,hio->...ho", (4, 8, 4), (4, 1), key=key),
        wave(4, 4, 8),
        out=2,
    ),
    EvenEntry("Scale", lambda key: nn.Scale((8,)), VECTORS),
    EvenEntry("MLP", lambda key: nn.MLP(8, 4, 8, 2, key=key), VECTORS),
    EvenEntry(
        "MLP with a Module between",
        lambda key: nn.MLP(8, "scalar", 4, 2, Slope(jnp.array(0.1)), jnp.tanh, key=key),
        VECTORS,
        stacked=".activation",
    ),
    EvenEntry(
        "MLP that scans",
        lambda key: nn.MLP(8, 4, 8, 3, scan=True, key=key),
        VECTORS,
        stacked=".layers[1]",
    ),
    EvenEntry("Conv1d", lambda key: nn.Conv1d(8, 4, 2, key=key), LINES, features=1),
    EvenEntry("Conv2d", lambda key: nn.Conv2d(8, 4, 3, 2, "SAME", key=key), IMAGES, features=1),
    EvenEntry(
        "Conv2d with groups",
        lambda key: nn.Conv2d(8, 8, 3, groups=2, padding=1, padding_mode="REFLECT", key=key),
        IMAGES,
        features=1,
    ),
    EvenEntry(
        "ConvTranspose1d",
        lambda key: nn.ConvTranspose1d(
            8, 4, 3, 2, padding="SAME", padding_mode="CIRCULAR", key=key
        ),
        LINES,
        features=1,
    ),
    EvenEntry(
        "ConvTranspose2d",
        lambda key: nn.ConvTranspose2d(8, 4, 3, 2, 1, 1, key=key),
        IMAGES,
        features=1,
    ),
    EvenEntry("MaxPool2d", lambda key: nn.MaxPool2d(2, 2, 1), IMAGES, features=1),
    EvenEntry("AvgPool1d", lambda key: nn.AvgPool1d(3, padding=1), LINES, features=1),
    EvenEntry("Pool", lambda key: nn.Pool(jnp.inf, jax.lax.min, 1, 2), LINES, features=1),
    EvenEntry("AdaptivePool", lambda key: nn.AdaptivePool(3, 1, jnp.min), LINES, features=1),
    EvenEntry("AdaptiveAvgPool2d", lambda key: nn.AdaptiveAvgPool2d((2, 3)), IMAGES, features=1),
    EvenEntry("AdaptiveMaxPool1d", lambda key: nn.AdaptiveMaxPool1d(3), LINES, features=1),
    EvenEntry("LayerNorm", lambda key: nn.LayerNorm(8), SEQUENCES),
    EvenEntry("RMSNorm", lambda key: nn.RMSNorm(8), SEQUENCES),
    EvenEntry("PReLU", lambda key: nn.PReLU(), VECTORS),
    EvenEntry("PReLU for each channel", lambda key: nn.PReLU(jnp.full((8,), 0.1)), VECTORS),
    EvenEntry("GroupNorm", lambda key: nn.GroupNorm(4, 8, num_spatial_dims=1), LINES, features=1),
    EvenEntry(
        "InstanceNorm",
        lambda key: nn.InstanceNorm(8, channelwise_affine=True, num_spatial_dims=1),
        LINES,
        features=1,
    ),
    EvenEntry("BatchNorm", lambda key: nn.BatchNorm(8), LINES, features=1),
    EvenEntry("BatchNorm that averages", lambda key: nn.BatchNorm(8, mode="ema"), VECTORS),
    EvenEntry(
        "BatchNorm under vmap",
        lambda key: nn.BatchNorm(8, "batch"),
        LINES,
        features=1,
        axis_name="batch",
    ),
    EvenEntry("Dropout", lambda key: nn.Dropout(0.5), VECTORS),
    EvenEntry(
        "Dropout with a stream",
        lambda key: nn.Dropout(0.5, broadcast_dims=0, stream=nn.RngStream()),
        VECTORS,
        keyed=False,
    ),
    EvenEntry(
        "SpectralNorm",
        lambda key: nn.SpectralNorm(nn.Linear(8, 4, key=key), "weight", key=key),
        VECTORS,
    ),
    EvenEntry(
        "SpectralNorm of a convolution",
        lambda key: nn.SpectralNorm(nn.Conv1d(8, 4, 2, key=key), "weight", key=key),
        LINES,
        features=1,
    ),
    EvenEntry("WeightNorm", lambda key: nn.WeightNorm(nn.Linear(8, 4, key=key)), VECTORS),
    EvenEntry(
        "WeightNorm of a convolution",
        lambda key: nn.WeightNorm(nn.Conv1d(8, 4, 2, key=key), axis=None),
        LINES,
        features=1,
    ),
    EvenEntry(
        "Embedding", lambda key: nn.Embedding(8, 4, key=key), jnp.array([[3, 0, 7]] * 4), 1, 0
    ),
    EvenEntry("GRUCell over time", lambda key: nn.RNN(nn.GRUCell(8, 4, key=key)), SEQUENCES),
    EvenEntry("LSTMCell over time", lambda key: nn.RNN(nn.LSTMCell(8, 4, key=key)), SEQUENCES),
    EvenEntry("SimpleCell over time", lambda key: nn.RNN(nn.SimpleCell(8, 4, key=key)), SEQUENCES),
    EvenEntry("Bidirectional", both_ways, SEQUENCES),
    EvenEntry("RotaryPositionalEmbedding", lambda key: nn.RotaryPositionalEmbedding(8), SEQUENCES),
    EvenEntry(
        "MultiheadAttention",
        lambda key: nn.MultiheadAttention(4, 8, use_value_bias=True, key=key),
        SEQUENCES,
    ),
    EvenEntry(
        "MultiheadAttention with dropout",
        lambda key: nn.MultiheadAttention(4, 8, qk_size=2, output_size=4, dropout_p=0.5, key=key),
        SEQUENCES,
    ),
    EvenEntry(
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
    EvenEntry(
        "MultiheadAttention with a cache",
        lambda key: nn.MultiheadAttention(4, 8, is_causal=True, cache_size=3, key=key),
        SEQUENCES,
        caches=True,
    ),
    EvenEntry("Identity", lambda key: nn.Identity(), VECTORS),
    EvenEntry("Lambda", lambda key: nn.Lambda(jnp.tanh), VECTORS),
    EvenEntry(
        "Ensemble",
        lambda key: nn.Ensemble(ft.partial(nn.Linear, 8, 4), 2, key=key),
        VECTORS,
        stacked="",
    ),
    EvenEntry(
        "Stack", lambda key: nn.Stack(ft.partial(nn.Linear, 8, 8), 2, key=key), VECTORS, stacked=""
    ),
    EvenEntry("Sequential", small_net, wave(4, 4, 4, 4), features=1),
]
