"""`RMSNorm`."""

import jax.numpy as jnp
import pytest

from pytreemod import nn
from pytreemod.errors import ShapeError
from tests.goldens import refusals
from tests.labels import label


def test_rms_norm_starts_as_the_plain_formula():
    """Weight one and bias zero, in the dtype that was asked for; eps is 1e-5."""
    layer = nn.RMSNorm((2,), dtype=jnp.bfloat16)

    assert layer.weight.dtype == layer.bias.dtype == jnp.bfloat16
    assert (layer.weight.tolist(), layer.bias.tolist()) == ([1, 1], [0, 0])
    assert (layer.shape, layer.eps, layer.use_weight, layer.use_bias) == ((2,), 1e-5, True, True)
    bare = nn.RMSNorm(2, use_weight=False, use_bias=False)
    assert (bare.weight, bare.bias) == (None, None)


@pytest.mark.parametrize(
    ("shape", "x", "text"),
    [
        ((3,), (3, 5), r"\(\.\.\., 3\), got f32\[3,5\](.|\n)*layer\(jnp\.moveaxis\("),
        ((3,), (7, 5), r"\(\.\.\., 3\), got f32\[7,5\](.|\n)*RMSNorm\(\(5,\)\)"),
        ((2, 3), (3,), r"\(\.\.\., 2, 3\), got f32\[3\](.|\n)*x has too few axes"),
    ],
    ids=label,
)
def test_rms_norm_refuses_other_trailing_axes(shape, x, text):
    """The text says which would fit."""
    with pytest.raises(ShapeError, match=rf"^RMSNorm\(shape=.*\): expected x of shape {text}"):
        nn.RMSNorm(shape)(jnp.ones(x))


test_refusals = refusals(globals())
