"""`LayerNorm`."""

import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from tests.goldens import refusals
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("shape", [4, (3, 4), ()], ids=label)
def test_layer_norm_is_pytorchs(torch, shape):
    """The same numbers with copied weights; with a shape of () only the bias is left."""
    layer = nn.LayerNorm(shape, eps=1e-3)
    weight, bias = wave(*layer.shape, phase=1), wave(*layer.shape, phase=2)
    x = wave(2, 3, 4)

    out = layer.replace(weight=jnp.asarray(weight), bias=jnp.asarray(bias))(jnp.asarray(x))

    if layer.shape == ():
        assert_close(out, np.full_like(x, bias))
    else:
        reference = torch.nn.functional.layer_norm(
            torch.tensor(x), layer.shape, torch.tensor(weight), torch.tensor(bias), 1e-3
        )
        assert_close(out, reference)


@pytest.mark.parametrize(("use_weight", "use_bias"), [(True, False), (False, True)])
def test_layer_norm_starts_as_the_plain_formula(use_weight, use_bias):
    """Weight one and bias zero, each only if asked for."""
    layer = nn.LayerNorm((2, 3), use_weight=use_weight, use_bias=use_bias, dtype=jnp.bfloat16)

    assert (layer.weight is not None, layer.bias is not None) == (use_weight, use_bias)
    for leaf, start in ((layer.weight, 1), (layer.bias, 0)):
        if leaf is not None:
            assert leaf.dtype == jnp.bfloat16
            assert leaf.tolist() == [[start] * 3] * 2


@pytest.mark.parametrize("value", [True, False])
def test_an_older_name_of_two_arguments_is_taken_with_a_warning(value):
    """`elementwise_affine` sets both weight and bias."""
    with pytest.warns(UserWarning, match="its older name"):
        layer = nn.LayerNorm(3, elementwise_affine=value)

    assert (layer.weight is None, layer.bias is None) == (not value, not value)


test_refusals = refusals(globals())
