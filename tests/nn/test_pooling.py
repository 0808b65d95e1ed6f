"""The pooling layers."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from tests.goldens import refusals
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave

LAYERS = [
    (nn.MaxPool1d, (7,)),
    (nn.MaxPool2d, (5, 6)),
    (nn.MaxPool3d, (4, 5, 4)),
    (nn.AvgPool1d, (7,)),
    (nn.AvgPool2d, (5, 6)),
    (nn.AvgPool3d, (4, 5, 4)),
]


@pytest.mark.parametrize(("make", "spatial"), LAYERS)
def test_pools_are_pytorchs(torch, make, spatial):
    """The same numbers as the layer of that name in PyTorch."""
    x = wave(2, 3, *spatial)
    reference = getattr(torch.nn, make.__name__)(3, stride=2, padding=1)

    assert_close(make(3, stride=2, padding=1)(jnp.asarray(x)), reference(torch.tensor(x)))


@pytest.mark.parametrize(("make", "spatial"), LAYERS)
@pytest.mark.sampled
def test_the_default_stride_is_one(make, spatial):
    """As in Equinox, and not the window's size as in PyTorch."""
    out = make(2)(jnp.ones((1, *spatial)))

    assert out.shape == (1, *(size - 1 for size in spatial))
    assert (out == 1).all()


@pytest.mark.parametrize(("make", "spatial"), LAYERS)
def test_signatures_and_kinship(make, spatial):
    """Each takes (kernel_size, stride, padding, use_ceil), and is a Pool of its dimension."""
    layer = make(2, 1, 0, use_ceil=True)

    names = ["kernel_size", "stride", "padding", "use_ceil"]
    assert list(inspect.signature(make).parameters) == names
    assert isinstance(layer, nn.Pool)
    assert layer.num_spatial_dims == len(spatial)


@pytest.mark.parametrize(("size", "stride", "padding"), [(7, 2, 1), (8, 3, 0)])
def test_use_ceil_is_pytorchs_ceil_mode(torch, size, stride, padding):
    """An overhanging window counts."""
    x = wave(2, size, size)
    reference = torch.nn.MaxPool2d(2, stride, padding, ceil_mode=True)

    found = nn.MaxPool2d(2, stride, padding, use_ceil=True)(jnp.asarray(x))

    assert_close(found, reference(torch.tensor(x)))


def test_use_ceil_fits_a_window_that_is_larger_than_the_input():
    """One overhanging window, instead of an error."""
    assert_close(nn.AvgPool1d(4, 4, use_ceil=True)(jnp.ones((1, 2))), [[0.5]])


def test_a_pool_of_ones_own(key):
    """Any operation, any number of axes, an array as neutral element."""
    layer = nn.Pool(jnp.array(-math.inf), jax.lax.max, 4, 2, stride=2)
    x = wave(1, 2, 2, 2, 2)

    assert_close(layer(jnp.asarray(x)).reshape(()), x.max())
    assert jax.tree.leaves(layer) == []


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=label)
@pytest.mark.parametrize("make", [nn.AvgPool1d, nn.AvgPool2d])
@pytest.mark.sampled
def test_averages_of_half_precision_are_pytorchs(torch, make, dtype):
    """The sum over a large window neither stops at 256 nor overflows."""
    layer = make(24, padding=3)
    shape = (1, 2, *[24] * layer.num_spatial_dims)
    x = jnp.asarray(100 + wave(*shape)).astype(dtype)
    narrow = {jnp.bfloat16: torch.bfloat16, jnp.float16: torch.float16}[dtype]
    reference = getattr(torch.nn, make.__name__)(24, stride=1, padding=3)

    found = layer(x)

    given = torch.tensor(np.array(x, np.float32)).to(narrow)
    assert found.dtype == dtype
    rtol = float(jnp.finfo(dtype).eps)
    assert_close(found.astype(float), reference(given).float(), rtol=rtol)


def test_an_average_of_integers_and_of_an_input_that_is_too_small():
    """Pixels of 8 bits have an average; a text shows the dtype that was given."""
    layer = nn.AvgPool2d(3)

    assert layer(jnp.full((1, 3, 3), 200, jnp.uint8)).tolist() == [[[200]]]


test_refusals = refusals(globals())
