"""Every layer that Equinox has, too: made with the same key, it computes the same.

The same key gives the same first weights, so nothing is copied.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import keystr, tree_leaves_with_path

import pytreemod as pm
from pytreemod import nn
from tests.nn.numbers_to_compare import assert_close, wave


@dataclass(frozen=True)
class Twin:
    """A layer of either library, and the inputs of one call."""

    name: str
    make: Callable[[Any, Any], Any]  # of `nn` and a key
    inputs: tuple[Any, ...]


class Slope(pm.Module):
    """An activation that holds an array, as ours."""

    factor: jax.Array

    def __call__(self, x):
        return jnp.where(x > 0, x, self.factor * x)


class EquinoxSlope(equinox.Module):
    """The same as Equinox's."""

    factor: jax.Array

    def __call__(self, x):
        return jnp.where(x > 0, x, self.factor * x)


def slope_for(lib):
    """An activation that the layers of `lib` can hold."""
    return (Slope if lib is nn else EquinoxSlope)(jnp.asarray(0.1))


SEQUENCE = wave(3, 4)
CARRIES = wave(3, phase=1), wave(3, phase=2)
MASK = np.tril(np.ones((3, 3), bool))

TWINS = [
    Twin("Linear", lambda lib, key: lib.Linear(3, 4, key=key), (wave(3),)),
    Twin("Linear without bias", lambda lib, key: lib.Linear(3, 4, False, key=key), (wave(3),)),
    Twin("Linear to scalar", lambda lib, key: lib.Linear(3, "scalar", key=key), (wave(3),)),
    Twin("Linear from scalar", lambda lib, key: lib.Linear("scalar", 4, key=key), (wave(),)),
    Twin("MLP", lambda lib, key: lib.MLP(3, 2, 4, 2, key=key), (wave(3),)),
    Twin(
        "MLP with a Module between",
        lambda lib, key: lib.MLP(3, 2, 4, 2, slope_for(lib), jnp.tanh, key=key),
        (wave(3),),
    ),
    Twin("Conv1d", lambda lib, key: lib.Conv1d(2, 3, 2, key=key), (wave(2, 5),)),
    Twin(
        "Conv2d with strides and groups",
        lambda lib, key: lib.Conv2d(4, 8, 3, 2, "SAME", groups=2, key=key),
        (wave(4, 5, 6),),
    ),
    Twin(
        "Conv2d with dilation and reflection",
        lambda lib, key: lib.Conv2d(2, 3, 3, 1, 1, 2, padding_mode="REFLECT", key=key),
        (wave(2, 7, 7),),
    ),
    Twin(
        "Conv3d",
        lambda lib, key: lib.Conv3d(1, 2, 2, use_bias=False, key=key),
        (wave(1, 3, 3, 3),),
    ),
    Twin(
        "ConvTranspose1d around a circle",
        lambda lib, key: lib.ConvTranspose1d(
            2, 3, 3, 2, padding="SAME", padding_mode="CIRCULAR", key=key
        ),
        (wave(2, 4),),
    ),
    Twin(
        "ConvTranspose2d",
        lambda lib, key: lib.ConvTranspose2d(4, 2, 3, 2, 1, 1, groups=2, key=key),
        (wave(4, 3, 3),),
    ),
    Twin(
        "ConvTranspose3d",
        lambda lib, key: lib.ConvTranspose3d(1, 2, 2, dilation=2, key=key),
        (wave(1, 2, 2, 2),),
    ),
    Twin("MaxPool1d", lambda lib, key: lib.MaxPool1d(2), (wave(2, 5),)),
    Twin("MaxPool2d", lambda lib, key: lib.MaxPool2d(2, 2, 1), (wave(2, 5, 5),)),
    Twin("AvgPool1d", lambda lib, key: lib.AvgPool1d(3, padding=1), (wave(2, 6),)),
    Twin("AvgPool2d", lambda lib, key: lib.AvgPool2d(2, 2, use_ceil=True), (wave(2, 5, 5),)),
    Twin("AvgPool3d", lambda lib, key: lib.AvgPool3d(2), (wave(1, 3, 3, 3),)),
    Twin("AdaptiveAvgPool2d", lambda lib, key: lib.AdaptiveAvgPool2d((2, 3)), (wave(2, 5, 7),)),
    Twin("AdaptiveMaxPool1d", lambda lib, key: lib.AdaptiveMaxPool1d(3), (wave(2, 7),)),
    Twin("LayerNorm", lambda lib, key: lib.LayerNorm((2, 3)), (wave(2, 3),)),
    Twin("RMSNorm", lambda lib, key: lib.RMSNorm((2, 3)), (wave(2, 3),)),
    Twin("GroupNorm", lambda lib, key: lib.GroupNorm(2, 4), (wave(4, 3),)),
    Twin("PReLU", lambda lib, key: lib.PReLU(0.1), (wave(3, phase=1),)),
    Twin("Dropout", lambda lib, key: lib.Dropout(0.5, inference=True), (wave(3),)),
    Twin("Embedding", lambda lib, key: lib.Embedding(5, 2, key=key), (jnp.asarray(3),)),
    Twin(
        "RotaryPositionalEmbedding", lambda lib, key: lib.RotaryPositionalEmbedding(4), (SEQUENCE,)
    ),
    Twin(
        "MultiheadAttention",
        lambda lib, key: lib.MultiheadAttention(
            2, 4, 6, 3, 5, use_key_bias=True, use_output_bias=True, key=key
        ),
        (SEQUENCE, wave(2, 6), wave(2, 3)),
    ),
    Twin(
        "MultiheadAttention with a mask",
        lambda lib, key: lib.MultiheadAttention(2, 4, use_value_bias=True, key=key),
        (SEQUENCE, SEQUENCE, SEQUENCE, MASK),
    ),
    Twin("GRUCell", lambda lib, key: lib.GRUCell(2, 3, key=key), (wave(2), CARRIES[0])),
    Twin(
        "GRUCell without bias",
        lambda lib, key: lib.GRUCell(2, 3, False, key=key),
        (wave(2), CARRIES[0]),
    ),
    Twin("LSTMCell", lambda lib, key: lib.LSTMCell(2, 3, key=key), (wave(2), CARRIES)),
    Twin(
        "LSTMCell without bias",
        lambda lib, key: lib.LSTMCell(2, 3, False, key=key),
        (wave(2), CARRIES),
    ),
    Twin(
        "WeightNorm",
        lambda lib, key: lib.WeightNorm(lib.Conv1d(2, 3, 2, key=key), axis=None),
        (wave(2, 4),),
    ),
    Twin(
        "Sequential",
        lambda lib, key: lib.Sequential(
            [lib.Linear(3, 2, key=key), lib.Lambda(jnp.tanh), lib.Identity()]
        ),
        (wave(3),),
    ),
]


def value_and_gradients(layer, is_array, partition, combine, inputs):
    """The leaves of the result, and the gradients of a sum over them, by the paths of leaves."""
    parameters, rest = partition(layer, is_array)
    numbers, others = partition(jax.tree.map(jnp.asarray, inputs), is_array)

    def loss(both):
        parameters, numbers = both
        out = jax.tree.leaves(combine(parameters, rest)(*combine(numbers, others)))
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in out), out

    gradients, out = jax.jit(jax.grad(loss, has_aux=True))((parameters, numbers))
    return out, {keystr(path): leaf for path, leaf in tree_leaves_with_path(gradients)}


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_value_and_gradients_are_equinoxs(twin, key):
    """Of the weights, which have the same paths, and of the inputs."""
    out, gradients = value_and_gradients(
        twin.make(nn, key), pm.is_inexact_array, pm.partition, pm.combine, twin.inputs
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected, theirs = value_and_gradients(
            twin.make(equinox.nn, key),
            equinox.is_inexact_array,
            equinox.partition,
            equinox.combine,
            twin.inputs,
        )

    jax.tree.map(assert_close, out, expected)
    assert gradients.keys() == theirs.keys()
    for path, gradient in gradients.items():
        assert_close(gradient, theirs[path], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_batch_norm_and_its_statistics_are_equinoxs(mode):
    """Over several steps, each mapped over a batch, and then in inference."""
    ours, state = nn.make_with_state(nn.BatchNorm)(3, "batch", mode=mode)
    theirs, their_state = equinox.nn.make_with_state(equinox.nn.BatchNorm)(3, "batch", mode=mode)

    def mapped(layer):
        return jax.vmap(layer, in_axes=(0, None), out_axes=(0, None), axis_name="batch")

    for step in range(4):
        if step == 3:
            ours, theirs = nn.inference_mode(ours), equinox.nn.inference_mode(theirs)
        x = jnp.asarray(wave(4, 3, 2, phase=step)) * 2 + step
        out, state = mapped(ours)(x, state)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            expected, their_state = mapped(theirs)(x, their_state)
        assert_close(out, expected, atol=1e-4)


def test_spectral_norm_is_equinoxs(key):
    """At each step of training, and then in inference."""

    def make(lib):
        layer = lib.Linear(3, 4, key=key)
        return lib.make_with_state(lib.SpectralNorm)(layer, "weight", key=key)

    (ours, state), (theirs, their_state) = make(nn), make(equinox.nn)
    for step in range(3):
        if step == 2:
            ours, theirs = nn.inference_mode(ours), equinox.nn.inference_mode(theirs)
        x = jnp.asarray(wave(3, phase=step))
        out, state = ours(x, state)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            expected, their_state = theirs(x, their_state)
        assert_close(out, expected, rtol=1e-4, atol=1e-4)
