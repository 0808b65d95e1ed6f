"""`AdaptivePool`, and the layers for one, two and three axes."""

import inspect

import jax.numpy as jnp
import pytest

from pytreemod import nn
from tests.goldens import refusals
from tests.nn.numbers_to_compare import assert_close, wave

LAYERS = [
    (nn.AdaptiveAvgPool1d, (6,)),
    (nn.AdaptiveAvgPool2d, (4, 6)),
    (nn.AdaptiveAvgPool3d, (2, 4, 6)),
    (nn.AdaptiveMaxPool1d, (6,)),
    (nn.AdaptiveMaxPool2d, (4, 6)),
    (nn.AdaptiveMaxPool3d, (2, 4, 6)),
]


@pytest.mark.parametrize(("make", "spatial"), LAYERS)
@pytest.mark.sampled
def test_adaptive_pools_are_pytorchs_where_sizes_divide(torch, make, spatial):
    """The same numbers as the layer of that name; each takes target_shape alone."""
    x = wave(2, 3, *spatial)

    assert list(inspect.signature(make).parameters) == ["target_shape"]
    assert_close(make(2)(jnp.asarray(x)), getattr(torch.nn, make.__name__)(2)(torch.tensor(x)))


test_refusals = refusals(globals())
