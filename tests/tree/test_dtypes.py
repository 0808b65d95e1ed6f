"""The dtype that JAX makes of one that was asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.tree.dtypes import available_dtype

KEY = jax.random.key(0)
TEXT = r"expected a dtype that JAX supports, got {0}, which becomes {1}\.\n  Enable 64 bits in JAX"


@pytest.mark.parametrize(
    "dtype", ["float64", np.float64, np.dtype("float64"), "complex128"], ids=repr
)
def test_64_bits_that_are_not_there_are_warned_of(dtype):
    """As JAX does; the class of Python is whatever JAX has."""
    name = jnp.dtype(dtype).name
    text = TEXT.format(name, {"float64": "float32", "complex128": "complex64"}[name])

    with pytest.warns(UserWarning, match=r"^here: " + text):
        assert available_dtype("here", dtype).itemsize == jnp.dtype(dtype).itemsize // 2
    assert available_dtype("here", float) == jnp.float32
    assert available_dtype("here", complex) == jnp.complex64
    with jax.enable_x64(True):
        assert available_dtype("here", dtype) == jnp.dtype(dtype)


def test_layers_and_precisions_ask_for_it():
    """By the argument's name, at the line that asks."""
    with pytest.warns(UserWarning, match=r"^Linear\(dtype\): expected a dtype that") as caught:
        assert nn.Linear(2, 2, dtype="float64", key=KEY).weight.dtype == jnp.float32
    assert caught[0].filename == __file__
    with pytest.warns(
        UserWarning, match=r"with_precision.*: expected a dtype that JAX supports, got f"
    ):
        pm.with_precision(nn.Linear(2, 2, key=KEY), "float64")
