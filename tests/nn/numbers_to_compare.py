"""Inputs that are the same in every run, and the comparison of numbers from two sources."""

import math
from typing import Any

import jax
import numpy as np

RTOL, ATOL = 2e-5, 2e-5


def wave(*shape: int, phase: float = 0.0) -> np.ndarray:
    """Float32 values between -2 and 2 without a pattern along any axis."""
    return (
        (2 * np.sin(1.7 * np.arange(math.prod(shape)) ** 1.3 + phase)).astype("f4").reshape(shape)
    )


def assert_close(found: Any, expected: Any, *, rtol: float = RTOL, atol: float = ATOL) -> None:
    """Same shape, same numbers: of arrays, of PyTorch's tensors, or the bits of random keys."""
    found, expected = _numbers(found), _numbers(expected)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


def _numbers(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x.detach() if hasattr(x, "detach") else x)
