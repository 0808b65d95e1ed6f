"""The dtype that JAX makes of one that was asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn

KEY = jax.random.key(0)


@pytest.mark.parametrize("dtype", ["float64", np.dtype("float64")], ids=repr)
def test_64_bits_that_are_not_there_are_warned_of(dtype):
    """By JAX and by precisions; the class of Python is what JAX has."""
    with pytest.warns(UserWarning, match="float64"):
        assert nn.Linear(2, 2, dtype=dtype, key=KEY).weight.dtype == jnp.float32
    with pytest.warns(UserWarning, match=r"(?s)Precision.*float64"):
        pm.with_precision(nn.Linear(2, 2, key=KEY), dtype)
    assert nn.Linear(2, 2, dtype=float, key=KEY).weight.dtype == jnp.float32
    with jax.enable_x64(True):
        assert nn.Linear(2, 2, dtype=dtype, key=KEY).weight.dtype == jnp.float64
