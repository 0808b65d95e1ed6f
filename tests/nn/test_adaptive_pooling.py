"""`AdaptivePool`, and the layers for one, two and three axes."""

import inspect

import jax.numpy as jnp
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError
from tests.labels import label
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


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((4,), r"expected x of shape \(\.\.\., channels, height, width\), got f32\[4\]"),
        ((1, 1, 4), r"expected x with height >= 2, width >= 3, got f32\[1,1,4\]"),
        ((1, 2, 0), r"expected x with height >= 2, width >= 3, got f32\[1,2,0\]"),
    ],
    ids=label,
)
def test_inputs_that_are_too_small_are_refused(shape, text):
    """Equinox divides by zero there, and PyTorch repeats entries."""
    layer = nn.AdaptiveAvgPool2d((2, 3))

    with pytest.raises(ShapeError, match=rf"^AdaptiveAvgPool2d\(target_shape=\(2, 3\)\): {text}"):
        layer(jnp.ones(shape))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 1, jnp.mean), r"\(target_shape\): expected an integer of at least 1"),
        (((2, 2), 1, jnp.mean), r"\(target_shape\): expected .* a sequence of 1 of them"),
        ((2, 0, jnp.mean), r"\(num_spatial_dims\): expected an integer of at least 1"),
        ((2, 1, "mean"), r"\(operation\): expected a function, got 'mean'"),
    ],
    ids=label,
)
def test_bad_arguments_are_refused(arguments, text):
    """Each by its name."""
    with pytest.raises(ArgumentError, match=rf"^AdaptivePool{text}"):
        nn.AdaptivePool(*arguments)
