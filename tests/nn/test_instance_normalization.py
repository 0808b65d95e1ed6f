"""`InstanceNorm`."""

import inspect

import jax
import jax.numpy as jnp
import pytest

from pytreemod import nn
from tests.goldens import refusals
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.slow
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_instance_norm_is_pytorchs(torch, dims):
    """The same numbers with the same defaults, by rank or mapped; initial weights are equal."""
    x = wave(2, 3, *range(2, 2 + dims))
    theirs = getattr(torch.nn, f"InstanceNorm{dims}d")(3)
    defaults = inspect.signature(nn.InstanceNorm).parameters

    expected = theirs(torch.tensor(x))

    assert_close(nn.InstanceNorm(3, num_spatial_dims=dims)(jnp.asarray(x)), expected)
    assert_close(jax.vmap(nn.InstanceNorm(3))(jnp.asarray(x)), expected)
    assert defaults["eps"].default == theirs.eps
    assert defaults["channelwise_affine"].default is theirs.affine is False
    layer = nn.InstanceNorm(3, channelwise_affine=True)
    assert (layer.weight.tolist(), layer.bias.tolist()) == ([1] * 3, [0] * 3)


test_refusals = refusals(globals())
