"""`GroupNorm`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from tests.goldens import refusals
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("spatial", [(), (2, 3)], ids=label)
def test_group_norm_is_pytorchs(torch, spatial):
    """The same numbers, with weights copied over; PyTorch's takes a batch, ours is mapped."""
    layer = nn.GroupNorm(2, 4, eps=1e-3)
    x, weight, bias = wave(5, 4, *spatial), wave(4, phase=1), wave(4, phase=2)
    reference = torch.nn.GroupNorm(2, 4, eps=1e-3)
    reference.weight.data, reference.bias.data = torch.tensor(weight), torch.tensor(bias)

    layer = layer.replace(weight=jnp.asarray(weight), bias=jnp.asarray(bias))

    assert_close(jax.vmap(layer)(jnp.asarray(x)), reference(torch.tensor(x)))


@pytest.mark.parametrize("channels", [None, 4])
def test_group_norm_without_weights(channels):
    """Each group has mean zero and variance one; without a number of channels, any number works."""
    layer, x = nn.GroupNorm(2, channels, 0.0, channelwise_affine=False), jnp.asarray(wave(4, 5))

    out = np.asarray(layer(x)).reshape(2, -1)

    assert (layer.weight, layer.bias) == (None, None)
    assert_close(out.mean(1), np.zeros(2))
    assert_close(out.var(1), np.ones(2))
    if channels is None:
        assert layer(jnp.ones((6, 5))).shape == (6, 5)


def test_group_norm_starts_as_the_plain_formula():
    """Weight one and bias zero, in the dtype that was asked for; eps is 1e-5."""
    layer = nn.GroupNorm(1, 2, dtype=jnp.bfloat16)

    assert layer.weight.dtype == layer.bias.dtype == jnp.bfloat16
    assert (layer.weight.tolist(), layer.bias.tolist()) == ([1, 1], [0, 0])
    assert (layer.groups, layer.channels, layer.eps) == (1, 2, 1e-5)


test_refusals = refusals(globals())
