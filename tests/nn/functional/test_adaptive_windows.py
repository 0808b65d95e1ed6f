"""`adaptive_pool`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.errors import ArgumentError
from pytreemod.nn.functional import adaptive_pool
from tests.nn.numbers_to_compare import assert_close, wave


def by_hand(x, target_shape, operation):
    """NumPy's way to divide an axis into parts, the larger ones first."""
    first = x.ndim - len(target_shape)
    for axis, count in enumerate(target_shape, first):
        parts = np.array_split(x, count, axis)
        x = np.stack([np.apply_along_axis(operation, axis, part) for part in parts], axis)
    return x


@pytest.mark.parametrize("target", [(1, 1), (3, 2), (4, 5), (2, 3)])
@pytest.mark.parametrize(("ours", "numpys"), [(jnp.mean, np.mean), (jnp.median, np.median)])
@pytest.mark.sampled
def test_windows_are_numpys_parts(target, ours, numpys):
    """Sizes that divide, and sizes that do not; axis after axis, which a median shows."""
    x = wave(2, 3, 4, 5)

    assert_close(adaptive_pool(jnp.asarray(x), target, ours), by_hand(x, target, numpys))


@pytest.mark.parametrize("name", ["avg", "max"])
@pytest.mark.slow
def test_where_sizes_divide_the_windows_are_pytorchs(torch, name):
    """The same numbers and gradients."""
    x = wave(2, 4, 6)
    theirs = torch.tensor(x, requires_grad=True)
    expected = getattr(torch.nn.functional, f"adaptive_{name}_pool2d")(theirs, (2, 3))
    expected.sin().sum().backward()
    operation = {"avg": jnp.mean, "max": jnp.max}[name]

    found = adaptive_pool(jnp.asarray(x), (2, 3), operation)
    grad = jax.grad(lambda x: jnp.sin(adaptive_pool(x, (2, 3), operation)).sum())(jnp.asarray(x))

    assert_close(found, expected)
    assert_close(grad, theirs.grad)


def test_half_precision_is_reduced_in_single():
    """It is rounded once, not after each axis; other dtypes are unchanged."""
    x = jnp.asarray(wave(8, 6), jnp.bfloat16)
    single = x.astype(jnp.float32)

    found = adaptive_pool(x, (1, 1), jnp.mean)

    assert found.dtype == jnp.bfloat16
    assert float(found[0, 0]) == float(jnp.mean(single).astype(jnp.bfloat16))
    assert adaptive_pool(x[0], (2,), jnp.argmax).dtype == jnp.int32
    assert adaptive_pool(jnp.arange(4), (2,), jnp.mean).tolist() == [0.5, 2.5]


@pytest.mark.parametrize("operation", [jnp.sort, lambda window: None])
def test_an_operation_gives_one_number(operation):
    """Several numbers would add axes."""
    with pytest.raises(ArgumentError, match=r"^adaptive_pool\(operation\): expected one number "):
        adaptive_pool(jnp.ones(4), (2,), operation)
