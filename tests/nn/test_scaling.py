"""`Scale`."""

import jax
import jax.numpy as jnp
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError, RngError, ShapeError
from tests.nn.numbers_to_compare import assert_close, wave


def test_scale_begins_with_one_or_as_it_is_told(key):
    """A factor for each entry of the last axes; 1 stands for any size."""
    normal, x = jax.nn.initializers.normal(), jnp.asarray(wave(2, 3, 4))
    layer = nn.Scale((3, 1), weight_init=normal, key=key)

    assert_close(nn.Scale()(x), x)
    assert_close(layer.weight, normal(key, (3, 1), jnp.float32))
    assert_close(layer(x), x * layer.weight[None])
    with pytest.raises(RngError, match=r"^Scale\(key\): expected a random key, got None"):
        nn.Scale(weight_init=normal)


def test_what_does_not_fit_is_refused():
    """Sizes that are none, and axes that x has not."""
    with pytest.raises(ArgumentError, match=r"^Scale\(shape\): expected an integer of at least 0"):
        nn.Scale(-1)
    with pytest.raises(
        ShapeError, match=r"^Scale\(shape=\(3,\)\): expected x of shape \(\.\.\., 3"
    ):
        nn.Scale(3)(jnp.ones((3, 2)))
