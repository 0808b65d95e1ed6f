"""Every layer that Equinox also has, to compare numbers and files on.

A row has a function `make(nn, key)`, where `nn` is Equinox's room or ours, and the inputs of a call
without State, if there is one. A layer that both have by now gets a row.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from tests.nn.numbers_to_compare import wave

VECTOR, LINE, IMAGE, VOLUME = wave(3, phase=1), wave(2, 5), wave(2, 5, 6), wave(1, 3, 3, 3)
SEQUENCE, MASK = wave(3, 4), jnp.tril(jnp.ones((3, 3), bool))
HIDDEN = wave(2, phase=1), wave(2, phase=2)
SIDES = (0, 1), (2, 0)
OPTIONS = {"use_key_bias": True, "use_output_bias": True, "dropout_p": 0.3, "inference": True}

LAYERS: dict[str, tuple[Any, ...]] = {
    "Linear": (lambda nn, key: nn.Linear(3, 4, key=key), VECTOR),
    "Linear without bias": (lambda nn, key: nn.Linear(3, 4, False, key=key), VECTOR),
    "Linear in bfloat16": (lambda nn, key: nn.Linear(3, 4, dtype=jnp.bfloat16, key=key),),
    "Linear to scalar": (lambda nn, key: nn.Linear(3, "scalar", key=key), VECTOR),
    "Linear from scalar": (lambda nn, key: nn.Linear("scalar", 4, key=key), wave()),
    "MLP": (lambda nn, key: nn.MLP(3, 2, 4, 2, key=key), VECTOR),
    "MLP of one layer": (lambda nn, key: nn.MLP(3, 2, 4, 0, key=key), VECTOR),
    "MLP of scalars": (lambda nn, key: nn.MLP("scalar", "scalar", 4, 1, key=key), wave()),
    "MLP without biases": (
        lambda nn, key: nn.MLP(3, 2, 4, 2, jnp.sin, jnp.tanh, False, False, key=key),
        VECTOR,
    ),
    "Conv": (lambda nn, key: nn.Conv(1, 2, 3, 2, key=key), LINE),
    "Conv1d": (lambda nn, key: nn.Conv1d(2, 3, 2, key=key), LINE),
    "Conv1d by depth": (lambda nn, key: nn.Conv1d(2, 2, 2, groups=2, key=key), LINE),
    "Conv1d around a circle": (
        lambda nn, key: nn.Conv1d(2, 2, 3, padding=1, padding_mode="CIRCULAR", key=key),
        LINE,
    ),
    "Conv2d of sizes": (lambda nn, key: nn.Conv2d(2, 3, (1, 3), (2, 1), key=key), IMAGE),
    "Conv2d padded by side": (lambda nn, key: nn.Conv2d(2, 3, 3, 1, SIDES, key=key), IMAGE),
    "Conv2d padded below": (lambda nn, key: nn.Conv2d(2, 3, 3, 2, "SAME_LOWER", key=key), IMAGE),
    "Conv2d with replication": (
        lambda nn, key: nn.Conv2d(2, 3, 3, padding=1, padding_mode="REPLICATE", key=key),
        IMAGE,
    ),
    "Conv2d with all of it": (lambda nn, key: nn.Conv2d(2, 4, 3, 2, 1, 2, 2, key=key), IMAGE),
    "Conv2d of one size": (lambda nn, key: nn.Conv2d(2, 4, 3, 2, "SAME", (1, 2), key=key), IMAGE),
    "Conv2d with dilation and reflection": (
        lambda nn, key: nn.Conv2d(2, 3, 3, 1, (1, 2), 2, padding_mode="REFLECT", key=key),
        IMAGE,
    ),
    "Conv3d": (lambda nn, key: nn.Conv3d(1, 2, 2, use_bias=False, key=key), VOLUME),
    "ConvTranspose": (lambda nn, key: nn.ConvTranspose(1, 2, 3, 2, key=key), LINE),
    "ConvTranspose1d with gaps": (
        lambda nn, key: nn.ConvTranspose1d(2, 3, 1, 3, 0, "SAME", key=key),
        LINE,
    ),
    "ConvTranspose1d around a circle": (
        lambda nn, key: nn.ConvTranspose1d(2, 3, 3, 2, 0, "SAME", padding_mode="CIRCULAR", key=key),
        LINE,
    ),
    "ConvTranspose2d": (lambda nn, key: nn.ConvTranspose2d(2, 4, 3, 2, 1, 1, 2, 2, key=key), IMAGE),
    "ConvTranspose3d": (lambda nn, key: nn.ConvTranspose3d(1, 2, 2, dilation=2, key=key), VOLUME),
    "MaxPool1d": (lambda nn, key: nn.MaxPool1d(2), LINE),
    "MaxPool2d": (lambda nn, key: nn.MaxPool2d(2, 2, 1), IMAGE),
    "MaxPool2d of sizes": (lambda nn, key: nn.MaxPool2d((1, 3), (2, 1)), IMAGE),
    "MaxPool2d padded": (lambda nn, key: nn.MaxPool2d(3, padding=((0, 1), (1, 0))), IMAGE),
    "MaxPool2d rounded up": (lambda nn, key: nn.MaxPool2d(3, 2, 1, True), IMAGE),
    "MaxPool3d": (lambda nn, key: nn.MaxPool3d(2), VOLUME),
    "AvgPool1d": (lambda nn, key: nn.AvgPool1d(3, padding=1), LINE),
    "AvgPool2d": (lambda nn, key: nn.AvgPool2d(2, 2, use_ceil=True), IMAGE),
    "AvgPool2d padded": (lambda nn, key: nn.AvgPool2d(3, 2, 1), IMAGE),
    "AvgPool3d": (lambda nn, key: nn.AvgPool3d(2), VOLUME),
    "Pool": (lambda nn, key: nn.Pool(7.0, lax.min, 1, 2),),
    "AdaptivePool": (lambda nn, key: nn.AdaptivePool(2, 1, jnp.min), LINE),
    "AdaptivePool of medians": (lambda nn, key: nn.AdaptivePool(2, 2, jnp.median), IMAGE),
    "AdaptiveAvgPool1d": (lambda nn, key: nn.AdaptiveAvgPool1d(2), LINE),
    "AdaptiveAvgPool2d": (lambda nn, key: nn.AdaptiveAvgPool2d((2, 4)), IMAGE),
    "AdaptiveAvgPool3d": (lambda nn, key: nn.AdaptiveAvgPool3d(2), VOLUME),
    "AdaptiveMaxPool1d": (lambda nn, key: nn.AdaptiveMaxPool1d(3), LINE),
    "AdaptiveMaxPool2d": (lambda nn, key: nn.AdaptiveMaxPool2d((2, 3)), IMAGE),
    "AdaptiveMaxPool3d": (lambda nn, key: nn.AdaptiveMaxPool3d(1), VOLUME),
    "LayerNorm": (lambda nn, key: nn.LayerNorm((2, 5)), LINE),
    "LayerNorm without bias": (lambda nn, key: nn.LayerNorm((2, 5), 0.1, use_bias=False), LINE),
    "LayerNorm of a number": (lambda nn, key: nn.LayerNorm((), use_weight=False), wave()),
    "RMSNorm": (lambda nn, key: nn.RMSNorm((2, 5), use_bias=False), LINE),
    "RMSNorm without weights": (lambda nn, key: nn.RMSNorm(5, 1e-5, False, False), wave(5)),
    "PReLU": (lambda nn, key: nn.PReLU(jnp.full((3,), 0.1)), VECTOR),
    "PReLU with one slope": (lambda nn, key: nn.PReLU(), VECTOR),
    "GroupNorm": (lambda nn, key: nn.GroupNorm(2, 4), wave(4, 3)),
    "GroupNorm of one group": (lambda nn, key: nn.GroupNorm(1, 4, 0.1), wave(4, 3)),
    "GroupNorm alone": (lambda nn, key: nn.GroupNorm(2, channelwise_affine=False), wave(4, 3)),
    "BatchNorm": (lambda nn, key: nn.BatchNorm(3, "batch", mode="batch"),),
    "BatchNorm over two axes, in inference": (
        lambda nn, key: nn.BatchNorm(3, ("a", "b"), mode="batch", inference=True),
    ),
    "BatchNorm of the other mode": (lambda nn, key: nn.BatchNorm(3, "b", mode="ema"),),
    "Dropout": (lambda nn, key: nn.Dropout(0.3, inference=True), VECTOR),
    "SpectralNorm": (lambda nn, key: nn.SpectralNorm(nn.Linear(3, 4, key=key), "weight", key=key),),
    "Shared": (
        lambda nn, key: nn.Shared(
            (nn.Embedding(5, 3, key=key), nn.Linear(3, 5, key=key)),
            lambda pair: pair[1].weight,
            lambda pair: pair[0].weight,
        ),
    ),
    "Embedding": (lambda nn, key: nn.Embedding(5, 2, key=key), jnp.asarray(3)),
    "Embedding of a table": (lambda nn, key: nn.Embedding(weight=wave(5, 2)), jnp.asarray(3)),
    "GRUCell": (lambda nn, key: nn.GRUCell(3, 2, key=key), VECTOR, HIDDEN[0]),
    "GRUCell without bias": (lambda nn, key: nn.GRUCell(3, 2, False, key=key), VECTOR, HIDDEN[0]),
    "LSTMCell": (lambda nn, key: nn.LSTMCell(3, 2, key=key), VECTOR, HIDDEN),
    "LSTMCell without bias": (lambda nn, key: nn.LSTMCell(3, 2, False, key=key), VECTOR, HIDDEN),
    "RotaryPositionalEmbedding": (lambda nn, key: nn.RotaryPositionalEmbedding(4), SEQUENCE),
    "MultiheadAttention": (
        lambda nn, key: nn.MultiheadAttention(2, 4, 6, 3, 5, **OPTIONS, key=key),
        SEQUENCE,
        wave(2, 6),
        wave(2, 3),
    ),
    "MultiheadAttention with a mask": (
        lambda nn, key: nn.MultiheadAttention(2, 4, use_value_bias=True, key=key),
        SEQUENCE,
        SEQUENCE,
        SEQUENCE,
        MASK,
    ),
    "Identity": (lambda nn, key: nn.Identity(), VECTOR),
    "Lambda": (lambda nn, key: nn.Lambda(jnp.tanh), VECTOR),
    "Sequential": (
        lambda nn, key: nn.Sequential([nn.Dropout(0.0), nn.Linear(3, 2, key=key)]),
        VECTOR,
    ),
}
