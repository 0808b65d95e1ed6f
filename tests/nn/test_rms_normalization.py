"""`RMSNorm`."""

import jax.numpy as jnp

from pytreemod import nn
from tests.goldens import refusals


def test_rms_norm_starts_as_the_plain_formula():
    """Weight one and bias zero, in the dtype that was asked for; eps is 1e-5."""
    layer = nn.RMSNorm((2,), dtype=jnp.bfloat16)

    assert layer.weight.dtype == layer.bias.dtype == jnp.bfloat16
    assert (layer.weight.tolist(), layer.bias.tolist()) == ([1, 1], [0, 0])
    assert (layer.shape, layer.eps, layer.use_weight, layer.use_bias) == ((2,), 1e-5, True, True)
    bare = nn.RMSNorm(2, use_weight=False, use_bias=False)
    assert (bare.weight, bare.bias) == (None, None)


test_refusals = refusals(globals())
