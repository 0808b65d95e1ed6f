"""`Scale`."""

import jax
import jax.numpy as jnp

from pytreemod import nn
from tests.goldens import refusals
from tests.nn.numbers_to_compare import assert_close, wave


def test_scale_begins_with_one_or_as_it_is_told(key):
    """A factor for each entry of the last axes; 1 broadcasts to any size."""
    normal, x = jax.nn.initializers.normal(), jnp.asarray(wave(2, 3, 4))
    layer = nn.Scale((3, 1), weight_init=normal, key=key)

    assert_close(nn.Scale()(x), x)
    assert_close(layer.weight, normal(key, (3, 1), jnp.float32))
    assert_close(layer(x), x * layer.weight[None])


test_refusals = refusals(globals())
