"""Every layer that Equinox also has, to test files on.

A row builds the layer, or a network, with either library: `make(lib, key)`, where `lib` is Equinox
or this one. A layer that both have by now gets a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Both:
    """How to build the same with either library."""

    name: str
    make: Callable[[Any, Any], Any]


def scaled(lib: Any) -> Any:
    """An activation that may be learnt, as a class of either library."""

    class Slope(lib.Module):
        factor: jax.Array

        def __call__(self, x):
            return jnp.where(x > 0, x, self.factor * x)

    return Slope(jnp.asarray(0.1))


LAYERS = [
    Both("Linear", lambda lib, key: lib.nn.Linear(3, 4, key=key)),
    Both("Linear without bias", lambda lib, key: lib.nn.Linear(3, 4, use_bias=False, key=key)),
    Both("Linear in bfloat16", lambda lib, key: lib.nn.Linear(3, 4, dtype=jnp.bfloat16, key=key)),
    Both("Linear to scalar", lambda lib, key: lib.nn.Linear(3, "scalar", key=key)),
    Both("MLP", lambda lib, key: lib.nn.MLP(3, 2, 4, 2, key=key)),
    Both(
        "MLP with a Module between",
        lambda lib, key: lib.nn.MLP(3, 2, 4, 2, scaled(lib), jnp.tanh, key=key),
    ),
    Both("MLP that scans", lambda lib, key: lib.nn.MLP(3, 2, 4, 3, scan=True, key=key)),
    Both("Conv", lambda lib, key: lib.nn.Conv(1, 2, 3, 2, key=key)),
    Both("Conv1d", lambda lib, key: lib.nn.Conv1d(2, 3, 2, key=key)),
    Both("Conv2d", lambda lib, key: lib.nn.Conv2d(2, 4, 3, 2, "SAME", groups=2, key=key)),
    Both("Conv3d", lambda lib, key: lib.nn.Conv3d(1, 2, 2, use_bias=False, key=key)),
    Both("ConvTranspose", lambda lib, key: lib.nn.ConvTranspose(1, 2, 3, 2, key=key)),
    Both("ConvTranspose1d", lambda lib, key: lib.nn.ConvTranspose1d(2, 3, 2, key=key)),
    Both(
        "ConvTranspose2d",
        lambda lib, key: lib.nn.ConvTranspose2d(2, 4, 3, 2, 1, groups=2, key=key),
    ),
    Both("ConvTranspose3d", lambda lib, key: lib.nn.ConvTranspose3d(1, 2, 2, key=key)),
    Both("MaxPool1d", lambda lib, key: lib.nn.MaxPool1d(2)),
    Both("MaxPool2d", lambda lib, key: lib.nn.MaxPool2d(2, 2, 1)),
    Both("MaxPool3d", lambda lib, key: lib.nn.MaxPool3d(2)),
    Both("AvgPool1d", lambda lib, key: lib.nn.AvgPool1d(3, padding=1)),
    Both("AvgPool2d", lambda lib, key: lib.nn.AvgPool2d(2)),
    Both("AvgPool3d", lambda lib, key: lib.nn.AvgPool3d(2)),
    Both("Pool", lambda lib, key: lib.nn.Pool(7, lax.min, 1, 2)),
    Both("AdaptivePool", lambda lib, key: lib.nn.AdaptivePool(2, 1, jnp.min)),
    Both("AdaptiveAvgPool1d", lambda lib, key: lib.nn.AdaptiveAvgPool1d(2)),
    Both("AdaptiveAvgPool2d", lambda lib, key: lib.nn.AdaptiveAvgPool2d((2, 3))),
    Both("AdaptiveAvgPool3d", lambda lib, key: lib.nn.AdaptiveAvgPool3d(1)),
    Both("AdaptiveMaxPool1d", lambda lib, key: lib.nn.AdaptiveMaxPool1d(2)),
    Both("AdaptiveMaxPool2d", lambda lib, key: lib.nn.AdaptiveMaxPool2d((2, 3))),
    Both("AdaptiveMaxPool3d", lambda lib, key: lib.nn.AdaptiveMaxPool3d(1)),
    Both("LayerNorm", lambda lib, key: lib.nn.LayerNorm((2, 3))),
    Both("RMSNorm", lambda lib, key: lib.nn.RMSNorm((2, 3), use_bias=False)),
    Both("PReLU", lambda lib, key: lib.nn.PReLU(jnp.full((2, 1), 0.1))),
    Both("GroupNorm", lambda lib, key: lib.nn.GroupNorm(2, 4)),
    Both("BatchNorm", lambda lib, key: lib.nn.BatchNorm(3, "batch", mode="batch")),
    Both(
        "BatchNorm over two axes, in inference",
        lambda lib, key: lib.nn.BatchNorm(3, ("a", "b"), mode="batch", inference=True),
    ),
    Both("BatchNorm of the other mode", lambda lib, key: lib.nn.BatchNorm(3, "b", mode="ema")),
    Both("Dropout", lambda lib, key: lib.nn.Dropout(0.3, inference=True)),
    Both(
        "SpectralNorm",
        lambda lib, key: lib.nn.SpectralNorm(lib.nn.Linear(3, 4, key=key), "weight", key=key),
    ),
    Both("WeightNorm", lambda lib, key: lib.nn.WeightNorm(lib.nn.Linear(3, 4, key=key))),
    Both(
        "WeightNorm of a convolution",
        lambda lib, key: lib.nn.WeightNorm(lib.nn.Conv2d(2, 3, 2, key=key), "weight", None),
    ),
    Both(
        "Shared",
        lambda lib, key: lib.nn.Shared(
            (lib.nn.Embedding(5, 3, key=key), lib.nn.Linear(3, 5, key=key)),
            lambda pair: pair[1].weight,
            lambda pair: pair[0].weight,
        ),
    ),
    Both("Embedding", lambda lib, key: lib.nn.Embedding(5, 2, key=key)),
    Both("GRUCell", lambda lib, key: lib.nn.GRUCell(3, 2, key=key)),
    Both("LSTMCell", lambda lib, key: lib.nn.LSTMCell(3, 2, key=key)),
    Both("LSTMCell without bias", lambda lib, key: lib.nn.LSTMCell(3, 2, False, key=key)),
    Both("RotaryPositionalEmbedding", lambda lib, key: lib.nn.RotaryPositionalEmbedding(4)),
    Both(
        "MultiheadAttention",
        lambda lib, key: lib.nn.MultiheadAttention(
            2, 4, 6, 3, 5, use_key_bias=True, use_output_bias=True, dropout_p=0.3, key=key
        ),
    ),
    Both("Identity", lambda lib, key: lib.nn.Identity()),
    Both("Lambda", lambda lib, key: lib.nn.Lambda(jnp.tanh)),
    Both(
        "Sequential",
        lambda lib, key: lib.nn.Sequential([lib.nn.Dropout(0.1), lib.nn.Linear(2, 2, key=key)]),
    ),
]
