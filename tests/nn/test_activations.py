import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close


@pytest.mark.parametrize("given", [None, 0.25, np.float32(0.25), jnp.asarray(0.25)], ids=label)
def test_prelu_begins_with_a_quarter(given):
    """Its slope is an array with its own dtype, which promotes to no other."""
    layer = nn.PReLU(given)

    assert layer.negative_slope.shape == layer.shape == ()
    assert not layer.negative_slope.weak_type
    assert_close(layer(jnp.array([-4.0, 4.0])), [-1, 4])


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8])
def test_integers_give_floats(dtype):
    low = -4 if dtype == jnp.int32 else 4
    out = nn.PReLU()(jnp.array([low, 8], dtype))

    assert out.dtype == jnp.float32
    assert out.tolist() == [-1.0 if low < 0 else 4.0, 8.0]
