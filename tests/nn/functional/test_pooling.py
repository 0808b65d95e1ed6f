"""`max_pool`, `avg_pool` and `pool`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pytreemod.nn.functional import avg_pool, max_pool, pool
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave

CASES = {
    "1d": ((2, 2, 7), (3,), {"stride": 2}),
    "2d": ((2, 2, 5, 6), (3, 2), {"stride": 1}),
    "3d": ((1, 2, 3, 4, 3), (2, 3, 2), {"stride": (1, 2, 1)}),
    "padding": ((2, 2, 5, 6), (3, 2), {"stride": 2, "padding": 1}),
}

# Sizes that leave an overhang, or none, or a window that would start in the padding.
OVERHANGS = [(7, 2, 2, 0), (7, 3, 2, 1), (7, 2, 2, 1), (6, 2, 3, 0), (5, 3, 4, 1), (8, 4, 4, 2)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["max", "avg"])
def test_pooling_is_pytorchs(torch, kind, case):
    """The same numbers as PyTorch's max_pool and avg_pool over one, two and three axes."""
    shape, window, options = CASES[case]
    x = wave(*shape)
    reference = getattr(torch.nn.functional, f"{kind}_pool{len(window)}d")

    found = {"max": max_pool, "avg": avg_pool}[kind](jnp.asarray(x), window, **options)

    assert_close(found, reference(torch.tensor(x), window, **options))


@pytest.mark.parametrize(("size", "window", "stride", "padding"), OVERHANGS)
def test_use_ceil_keeps_the_windows_that_pytorch_keeps(torch, size, window, stride, padding):
    """use_ceil counts an overhanging window, but none that starts beyond the input."""
    x = wave(2, size)

    found = max_pool(jnp.asarray(x), (window,), stride=stride, padding=padding, use_ceil=True)

    reference = torch.nn.functional.max_pool1d(
        torch.tensor(x), window, stride, padding, ceil_mode=True
    )
    assert_close(found, reference)


def test_what_overhangs_counts_as_zeros_in_an_average():
    """The last window of 1, 2, 3 by twos is (3 + 0) / 2."""
    found = avg_pool(jnp.array([1.0, 2.0, 3.0]), (2,), stride=2, use_ceil=True)

    assert_close(found, [1.5, 1.5])


def test_uneven_padding():
    """(low, high) pads below and above; a maximum never takes the padding."""
    x = jnp.array([-1.0, -2.0, -3.0])

    assert_close(max_pool(x, (2,), padding=[(1, 0)]), [-1.0, -1.0, -2.0])
    assert_close(avg_pool(x, (2,), padding=[(1, 0)]), [-0.5, -1.5, -2.5])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.bfloat16, jnp.bool_], ids=label)
def test_a_maximum_keeps_the_dtype(dtype):
    """Padding is the smallest value of whatever dtype x has."""
    x = jnp.array([1, 0, 1]).astype(dtype)

    found = max_pool(x, (2,), stride=2, padding=1)

    assert found.dtype == dtype
    assert found.astype(int).tolist() == [1, 1]


def test_pool_takes_any_operation():
    """Sums, minima and products of windows, restated in NumPy."""
    x = wave(6)
    rows = x.reshape(3, 2)

    for init, operation, reference in [
        (0, lax.add, np.sum),
        (np.inf, lax.min, np.min),
        (1, lax.mul, np.prod),
    ]:
        assert_close(pool(jnp.asarray(x), init, operation, (2,), stride=2), reference(rows, axis=1))


@pytest.mark.parametrize("function", [max_pool, avg_pool])
def test_pooling_has_gradients(torch, function):
    """The gradients are PyTorch's."""
    x = wave(2, 6)

    found = jax.grad(lambda x: jnp.sum(jnp.sin(function(x, (3,), stride=2))))(jnp.asarray(x))

    tensor = torch.tensor(x, requires_grad=True)
    reference = getattr(torch.nn.functional, f"{function.__name__}1d")
    reference(tensor, 3, 2).sin().sum().backward()
    assert_close(found, tensor.grad)
