"""`PReLU`."""

import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ShapeError
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("given", [None, 0.25, np.float32(0.25), jnp.asarray(0.25)], ids=label)
def test_prelu_begins_with_a_quarter(given):
    """Its slope is an array with its own dtype, which promotes to no other."""
    layer = nn.PReLU(given)

    assert layer.negative_slope.shape == layer.shape == ()
    assert not layer.negative_slope.weak_type
    assert_close(layer(jnp.array([-4.0, 4.0])), [-1, 4])


def test_a_slope_for_each_channel():
    """The slope gets axes of size one for all axes after the channels."""
    slopes, x = wave(3, 1, 1), wave(2, 3, 2, 4)

    found = nn.PReLU(jnp.asarray(slopes))(jnp.asarray(x))

    assert_close(found, np.where(x > 0, x, slopes * x))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8])
def test_integers_give_floats(dtype):
    """As in Equinox."""
    low = -4 if dtype == jnp.int32 else 4
    out = nn.PReLU()(jnp.array([low, 8], dtype))

    assert out.dtype == jnp.float32
    assert out.tolist() == [-1.0 if low < 0 else 4.0, 8.0]


@pytest.mark.parametrize(("slope", "shape"), [((3,), (3, 5)), ((3, 1), (2, 5))])
def test_slopes_that_do_not_fit_are_refused(slope, shape):
    """They would broadcast."""
    with pytest.raises(ShapeError, match="PReLU"):
        nn.PReLU(jnp.ones(slope))(jnp.ones(shape))
