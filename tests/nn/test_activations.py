"""`PReLU`."""

import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("given", [None, 0.25, np.float32(0.25), jnp.asarray(0.25)], ids=label)
def test_prelu_begins_with_a_quarter(given):
    """As an array of its own dtype, which gives way to no other."""
    layer = nn.PReLU(given)

    assert layer.negative_slope.shape == layer.shape == ()
    assert not layer.negative_slope.weak_type
    assert_close(layer(jnp.array([-4.0, 4.0])), [-1, 4])


def test_a_slope_for_each_channel():
    """With axes of one for all that comes after."""
    slopes, x = wave(3, 1, 1), wave(2, 3, 2, 4)

    found = nn.PReLU(jnp.asarray(slopes))(jnp.asarray(x))

    assert_close(found, np.where(x > 0, x, slopes * x))


@pytest.mark.parametrize(
    ("shape", "x", "text"),
    [
        ((3,), (3, 5), r"\(\.\.\., 3\), got f32\[3,5\](.|\n)*layer\(jnp\.moveaxis\(x, 0, -1\)\)"),
        ((3, 1), (3,), r"\(\.\.\., 3, any\), got f32\[3\](.|\n)*It belongs to the last axes of x"),
        ((3, 1), (2, 5), r"\(\.\.\., 3, any\), got f32\[2,5\]"),
    ],
    ids=label,
)
def test_slopes_that_do_not_fit_are_refused(shape, x, text):
    """They would broadcast to what is no shape of x, or to another axis."""
    with pytest.raises(ShapeError, match=rf"^PReLU\(shape=.*\): expected x of shape {text}"):
        nn.PReLU(jnp.ones(shape))(jnp.ones(x))


@pytest.mark.parametrize("given", ["0.25", 1, 1j, True, [0.1, 0.2]], ids=label)
def test_what_is_no_slope_is_refused(given):
    """Integers could not be learnt."""
    with pytest.raises(ArgumentError, match=r"^PReLU\(init_alpha\): expected a floating number"):
        nn.PReLU(given)


def test_the_shape_goes_with_the_slopes():
    """What replaces it is a tuple, as the constructor keeps it."""
    with pytest.raises(ArgumentError, match=r"^PReLU\(shape\): expected \(2,\), got \[2\]"):
        nn.PReLU().replace(shape=[2])


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8])
def test_integers_give_floats(dtype):
    """As in Equinox."""
    low = -4 if dtype == jnp.int32 else 4
    out = nn.PReLU()(jnp.array([low, 8], dtype))

    assert out.dtype == jnp.float32
    assert out.tolist() == [-1.0 if low < 0 else 4.0, 8.0]


@pytest.mark.parametrize("dtype", [bool, complex])
def test_what_has_no_sign_is_refused(dtype):
    """Booleans and complex numbers."""
    with pytest.raises(
        ArgumentError, match=r"^PReLU\(shape=\(\)\): expected x of a floating dtype"
    ):
        nn.PReLU()(jnp.ones(3, dtype))
