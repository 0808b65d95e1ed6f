"""Every layer that Equinox also has, to compare numbers and files on.

A row builds the layer, or a network, with either library: `make(lib, key)`, where `lib` is Equinox
or this one. A layer that both have by now gets a row, with the inputs of a call without State.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.nn.numbers_to_compare import wave


@dataclass(frozen=True)
class Both:
    """How to build the same with either library."""

    name: str
    make: Callable[[Any, Any], Any]
    inputs: tuple[Any, ...] | None = None


def scaled(lib: Any) -> Any:
    """An activation that may be learnt, as a class of either library."""

    class Slope(lib.Module):
        factor: jax.Array

        def __call__(self, x):
            return jnp.where(x > 0, x, self.factor * x)

    return Slope(jnp.asarray(0.1))


VECTOR, LINE, IMAGE, VOLUME = wave(3, phase=1), wave(2, 5), wave(2, 5, 6), wave(1, 3, 3, 3)
SEQUENCE, MASK = wave(3, 4), jnp.tril(jnp.ones((3, 3), bool))
HIDDEN = wave(2, phase=1), wave(2, phase=2)

LAYERS = [
    Both("Linear", lambda lib, key: lib.nn.Linear(3, 4, key=key), (VECTOR,)),
    Both("Linear without bias", lambda lib, key: lib.nn.Linear(3, 4, False, key=key), (VECTOR,)),
    Both("Linear in bfloat16", lambda lib, key: lib.nn.Linear(3, 4, dtype=jnp.bfloat16, key=key)),
    Both("Linear to scalar", lambda lib, key: lib.nn.Linear(3, "scalar", key=key), (VECTOR,)),
    Both("Linear from scalar", lambda lib, key: lib.nn.Linear("scalar", 4, key=key), (wave(),)),
    Both("MLP", lambda lib, key: lib.nn.MLP(3, 2, 4, 2, key=key), (VECTOR,)),
    Both(
        "MLP with a Module between",
        lambda lib, key: lib.nn.MLP(3, 2, 4, 2, scaled(lib), jnp.tanh, key=key),
        (VECTOR,),
    ),
    Both("Conv", lambda lib, key: lib.nn.Conv(1, 2, 3, 2, key=key), (LINE,)),
    Both("Conv1d", lambda lib, key: lib.nn.Conv1d(2, 3, 2, key=key), (LINE,)),
    Both(
        "Conv2d with strides and groups",
        lambda lib, key: lib.nn.Conv2d(2, 4, 3, 2, "SAME", groups=2, key=key),
        (IMAGE,),
    ),
    Both(
        "Conv2d with dilation and reflection",
        lambda lib, key: lib.nn.Conv2d(2, 3, 3, 1, 1, 2, padding_mode="REFLECT", key=key),
        (IMAGE,),
    ),
    Both("Conv3d", lambda lib, key: lib.nn.Conv3d(1, 2, 2, use_bias=False, key=key), (VOLUME,)),
    Both("ConvTranspose", lambda lib, key: lib.nn.ConvTranspose(1, 2, 3, 2, key=key), (LINE,)),
    Both(
        "ConvTranspose1d around a circle",
        lambda lib, key: lib.nn.ConvTranspose1d(
            2, 3, 3, 2, padding="SAME", padding_mode="CIRCULAR", key=key
        ),
        (LINE,),
    ),
    Both(
        "ConvTranspose2d",
        lambda lib, key: lib.nn.ConvTranspose2d(2, 4, 3, 2, 1, 1, groups=2, key=key),
        (IMAGE,),
    ),
    Both(
        "ConvTranspose3d",
        lambda lib, key: lib.nn.ConvTranspose3d(1, 2, 2, dilation=2, key=key),
        (VOLUME,),
    ),
    Both("MaxPool1d", lambda lib, key: lib.nn.MaxPool1d(2), (LINE,)),
    Both("MaxPool2d", lambda lib, key: lib.nn.MaxPool2d(2, 2, 1), (IMAGE,)),
    Both("MaxPool3d", lambda lib, key: lib.nn.MaxPool3d(2), (VOLUME,)),
    Both("AvgPool1d", lambda lib, key: lib.nn.AvgPool1d(3, padding=1), (LINE,)),
    Both("AvgPool2d", lambda lib, key: lib.nn.AvgPool2d(2, 2, use_ceil=True), (IMAGE,)),
    Both("AvgPool3d", lambda lib, key: lib.nn.AvgPool3d(2), (VOLUME,)),
    Both("Pool", lambda lib, key: lib.nn.Pool(7.0, lax.min, 1, 2)),
    Both("AdaptivePool", lambda lib, key: lib.nn.AdaptivePool(2, 1, jnp.min), (LINE,)),
    Both("AdaptiveAvgPool1d", lambda lib, key: lib.nn.AdaptiveAvgPool1d(2), (LINE,)),
    Both("AdaptiveAvgPool2d", lambda lib, key: lib.nn.AdaptiveAvgPool2d((2, 4)), (IMAGE,)),
    Both("AdaptiveAvgPool3d", lambda lib, key: lib.nn.AdaptiveAvgPool3d(2), (VOLUME,)),
    Both("AdaptiveMaxPool1d", lambda lib, key: lib.nn.AdaptiveMaxPool1d(3), (LINE,)),
    Both("AdaptiveMaxPool2d", lambda lib, key: lib.nn.AdaptiveMaxPool2d((2, 3)), (IMAGE,)),
    Both("AdaptiveMaxPool3d", lambda lib, key: lib.nn.AdaptiveMaxPool3d(1), (VOLUME,)),
    Both("LayerNorm", lambda lib, key: lib.nn.LayerNorm((2, 5)), (LINE,)),
    Both("RMSNorm", lambda lib, key: lib.nn.RMSNorm((2, 5), use_bias=False), (LINE,)),
    Both("PReLU", lambda lib, key: lib.nn.PReLU(jnp.full((3,), 0.1)), (VECTOR,)),
    Both("GroupNorm", lambda lib, key: lib.nn.GroupNorm(2, 4), (wave(4, 3),)),
    Both("BatchNorm", lambda lib, key: lib.nn.BatchNorm(3, "batch", mode="batch")),
    Both(
        "BatchNorm over two axes, in inference",
        lambda lib, key: lib.nn.BatchNorm(3, ("a", "b"), mode="batch", inference=True),
    ),
    Both("BatchNorm of the other mode", lambda lib, key: lib.nn.BatchNorm(3, "b", mode="ema")),
    Both("Dropout", lambda lib, key: lib.nn.Dropout(0.3, inference=True), (VECTOR,)),
    Both(
        "SpectralNorm",
        lambda lib, key: lib.nn.SpectralNorm(lib.nn.Linear(3, 4, key=key), "weight", key=key),
    ),
    Both(
        "Shared",
        lambda lib, key: lib.nn.Shared(
            (lib.nn.Embedding(5, 3, key=key), lib.nn.Linear(3, 5, key=key)),
            lambda pair: pair[1].weight,
            lambda pair: pair[0].weight,
        ),
    ),
    Both("Embedding", lambda lib, key: lib.nn.Embedding(5, 2, key=key), (jnp.asarray(3),)),
    Both("GRUCell", lambda lib, key: lib.nn.GRUCell(3, 2, key=key), (VECTOR, HIDDEN[0])),
    Both(
        "GRUCell without bias",
        lambda lib, key: lib.nn.GRUCell(3, 2, False, key=key),
        (VECTOR, HIDDEN[0]),
    ),
    Both("LSTMCell", lambda lib, key: lib.nn.LSTMCell(3, 2, key=key), (VECTOR, HIDDEN)),
    Both(
        "LSTMCell without bias",
        lambda lib, key: lib.nn.LSTMCell(3, 2, False, key=key),
        (VECTOR, HIDDEN),
    ),
    Both(
        "RotaryPositionalEmbedding",
        lambda lib, key: lib.nn.RotaryPositionalEmbedding(4),
        (SEQUENCE,),
    ),
    Both(
        "MultiheadAttention",
        lambda lib, key: lib.nn.MultiheadAttention(
            2,
            4,
            6,
            3,
            5,
            use_key_bias=True,
            use_output_bias=True,
            dropout_p=0.3,
            inference=True,
            key=key,
        ),
        (SEQUENCE, wave(2, 6), wave(2, 3)),
    ),
    Both(
        "MultiheadAttention with a mask",
        lambda lib, key: lib.nn.MultiheadAttention(2, 4, use_value_bias=True, key=key),
        (SEQUENCE, SEQUENCE, SEQUENCE, MASK),
    ),
    Both("Identity", lambda lib, key: lib.nn.Identity(), (VECTOR,)),
    Both("Lambda", lambda lib, key: lib.nn.Lambda(jnp.tanh), (VECTOR,)),
    Both(
        "Sequential",
        lambda lib, key: lib.nn.Sequential([lib.nn.Dropout(0.0), lib.nn.Linear(3, 2, key=key)]),
        (VECTOR,),
    ),
]
