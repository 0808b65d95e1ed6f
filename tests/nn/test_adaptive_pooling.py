"""`AdaptivePool`, and the layers for one, two and three axes."""

import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError
from tests.nn.numbers_to_compare import assert_close, wave


def by_parts(x, target_shape, operation):
    """NumPy's way to divide an axis into parts, the larger ones first."""
    first = x.ndim - len(target_shape)
    for axis, count in enumerate(target_shape, first):
        parts = np.array_split(x, count, axis)
        x = np.stack([np.apply_along_axis(operation, axis, part) for part in parts], axis)
    return x


@pytest.mark.parametrize("target", [(1, 1), (3, 2), (2, 3)])
@pytest.mark.parametrize(("ours", "numpys"), [(jnp.mean, np.mean), (jnp.median, np.median)])
def test_windows_are_numpys_parts(target, ours, numpys):
    """Sizes that divide, and sizes that do not; axis after axis, which a median shows."""
    x = wave(2, 3, 4, 5)

    found = nn.AdaptivePool(target, 2, ours)(jnp.asarray(x))

    assert_close(found, by_parts(x, target, numpys))


def test_half_precision_is_reduced_in_single():
    """It is rounded once, not after each axis; an index and a mean of integers are converted."""
    x = jnp.asarray(wave(1, 8, 6), jnp.bfloat16)

    found = nn.AdaptiveAvgPool2d(1)(x)

    assert found.dtype == jnp.bfloat16
    assert float(found[0, 0, 0]) == float(jnp.mean(x.astype("f4")).astype(jnp.bfloat16))
    assert nn.AdaptivePool(2, 1, jnp.argmax)(x[0]).dtype == jnp.int32
    assert nn.AdaptiveAvgPool1d(2)(jnp.arange(4)[None]).tolist() == [[0.5, 2.5]]


@pytest.mark.parametrize("operation", [jnp.sort, lambda window: None])
def test_an_operation_gives_one_number(operation):
    """Several numbers would add axes."""
    with pytest.raises(ArgumentError, match="operation"):
        nn.AdaptivePool(2, 1, operation)(jnp.ones((1, 4)))


def test_an_input_that_is_too_small_is_refused():
    """A window without numbers has no mean."""
    with pytest.raises(ShapeError, match="height"):
        nn.AdaptiveAvgPool2d((2, 3))(jnp.ones((1, 1, 4)))
