"""`max_pool`, `avg_pool` and `pool`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pytreemod.nn.functional import avg_pool, max_pool, pool
from tests.goldens import refusals
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
@pytest.mark.sampled
def test_pooling_is_pytorchs(torch, kind, case):
    """The same numbers as PyTorch's max_pool and avg_pool over one, two and three axes."""
    shape, window, options = CASES[case]
    x = wave(*shape)
    reference = getattr(torch.nn.functional, f"{kind}_pool{len(window)}d")

    found = {"max": max_pool, "avg": avg_pool}[kind](jnp.asarray(x), window, **options)

    assert_close(found, reference(torch.tensor(x), window, **options))


@pytest.mark.parametrize(("size", "window", "stride", "padding"), OVERHANGS)
@pytest.mark.sampled
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
@pytest.mark.sampled
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


HALF = [jnp.bfloat16, jnp.float16]


def means(x, window, stride):
    """The means of windows in float64, restated in NumPy."""
    views = np.lib.stride_tricks.sliding_window_view(np.asarray(x, float), window, (-2, -1))
    return views[..., ::stride, ::stride, :, :].mean((-2, -1))


@pytest.mark.parametrize("dtype", HALF, ids=label)
@pytest.mark.parametrize(("size", "window", "stride"), [(32, 32, 1), (36, 32, 2), (6, 2, 3)])
@pytest.mark.slow
def test_means_of_half_precision_are_added_up_in_single_precision(
    torch, dtype, size, window, stride
):
    """As in PyTorch: a long sum neither stops growing nor overflows; it is rounded once."""
    x = jnp.asarray(10 + wave(1, 2, size, size)).astype(dtype)
    narrow = {jnp.bfloat16: torch.bfloat16, jnp.float16: torch.float16}[dtype]

    found = avg_pool(x, (window, window), stride=stride)
    given = torch.tensor(np.array(x, np.float32)).to(narrow)
    reference = torch.nn.functional.avg_pool2d(given, window, stride)

    eps = float(jnp.finfo(dtype).eps)
    assert found.dtype == dtype
    assert_close(found.astype(float), means(x, (window, window), stride), rtol=eps / 2, atol=0)
    assert_close(found.astype(float), reference.float(), rtol=eps, atol=0)


@pytest.mark.parametrize("dtype", HALF, ids=label)
def test_global_means_of_half_precision(dtype):
    """1024 ones, and 4096 times 30, which float16 cannot add up; under jit as well."""
    for pooled in (avg_pool, jax.jit(avg_pool, static_argnums=1)):
        assert pooled(jnp.ones((1, 32, 32), dtype), (32, 32)).tolist() == [[[1]]]
        assert pooled(jnp.full((1, 64, 64), 30, dtype), (64, 64)).tolist() == [[[30]]]


@pytest.mark.parametrize("dtype", HALF, ids=label)
def test_sums_and_products_of_half_precision(dtype):
    """Intermediate values may be outside of the range of the dtype."""
    ones, twos = jnp.ones(1024, dtype), jnp.array([2.0] * 32 + [0.5] * 32, dtype)

    assert pool(ones, 0, lax.add, (1024,)).tolist() == [1024]
    assert pool(twos, 1, lax.mul, (64,)).tolist() == [1]
    assert pool(ones, 0, lax.add, (1024,)).dtype == dtype


@pytest.mark.parametrize("dtype", HALF, ids=label)
@pytest.mark.parametrize(("function", "expected"), [(max_pool, 1500), (avg_pool, 1500 / 2000)])
@pytest.mark.sampled
def test_gradients_of_half_precision_are_added_up_in_single_precision(function, expected, dtype):
    """An entry in 1500 windows gets the sum of their gradients."""
    x = jnp.zeros(3499, dtype).at[1499].set(1)

    def loss(x):
        return jnp.sum(function(x, (2000,))[:1500].astype(jnp.float32))

    grad = jax.jit(jax.grad(loss))(x)

    assert grad.dtype == dtype
    assert_close(grad[1499].astype(float), expected, rtol=float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize(
    ("dtype", "value"), [(jnp.int8, 100), (jnp.uint8, 255), (jnp.int32, -7), (jnp.bool_, True)]
)
def test_the_mean_of_integers_is_a_float(dtype, value):
    """The sum of sixteen would not fit into 8 bits."""
    found = avg_pool(jnp.full((1, 4, 4), value, dtype), (4, 4))

    assert found.dtype == jnp.float32
    assert found.tolist() == [[[value]]]


def test_the_mean_of_complex_numbers_is_complex():
    """Real and imaginary part each for itself."""
    assert avg_pool(jnp.array([1 + 2j, 3 + 4j]), (2,)).tolist() == [2 + 3j]


def test_wide_inputs_cost_nothing_more():
    """The program has one reduction, and the division of a mean."""
    program = jax.make_jaxpr(lambda x: (avg_pool(x, (2,)), max_pool(x, (2,))))(jnp.ones(4))

    names = [equation.primitive.name for equation in program.eqns]
    assert names == ["reduce_window_sum", "div", "reduce_window_max"]


def test_a_window_of_one_entry_is_the_entry():
    """On one axis or on all."""
    x = jnp.asarray(wave(2, 3))

    for function in (max_pool, avg_pool):
        assert (function(x, (1, 1)) == x).all()
    assert (max_pool(x, (1, 3))[:, 0] == x.max(axis=1)).all()


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.bool_, jnp.bfloat16], ids=label)
def test_a_minimum_keeps_the_dtype(dtype):
    """Padding is the largest value of whatever dtype x has."""
    x = jnp.array([1, 1, 0]).astype(dtype)

    found = pool(x, np.inf, lax.min, (2,), stride=2, padding=1)

    assert found.dtype == dtype
    assert found.astype(int).tolist() == [1, 0]


test_refusals = refusals(globals())
