import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


def test_attend_is_the_product_with_each_row(key):
    layer, x = nn.Embedding(5, 3, key=key), wave(2, 4, 3)

    assert_close(layer.attend(jnp.asarray(x)), x @ np.asarray(layer.weight).T)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=label)
@pytest.mark.sampled
def test_the_gradient_of_a_row_that_is_often_read_is_added_up_in_single(dtype):
    """In bfloat16 itself the sum of 4096 ones is 256, in float16 2048."""
    rows = jnp.asarray(np.repeat([0, 1, -1, 7], [4096, 3, 1000, 5]))
    layer = nn.Embedding(weight=jnp.ones((5, 2), dtype))

    def loss(layer):
        return jnp.sum(layer(rows)[:-5].astype(jnp.float32))

    grad = jax.jit(jax.grad(loss))(layer).weight

    assert grad.dtype == dtype
    assert_close(grad.astype(jnp.float32)[:, 0], [4096, 3, 0, 0, 1000])


def test_tangents_are_rows_of_the_tangent():
    """In forward mode, too, and twice; indices out of range have no tangent."""
    weight, change = jnp.asarray(wave(4, 2)), jnp.asarray(wave(4, 2, phase=1.0))
    rows = jnp.array([3, -4, 9])

    def read(weight, rows=rows):
        return nn.Embedding(weight=weight)(rows)

    out, tangent = jax.jvp(read, (weight,), (change,))

    assert_close(out, [weight[3], weight[0], [np.nan] * 2])
    assert_close(tangent, [change[3], change[0], [0, 0]])
    slope = jax.grad(lambda weight: jnp.sum(read(weight, rows[:2]) ** 2))
    assert_close(jax.jvp(slope, (weight,), (change,))[1][3], 2 * change[3])


DTYPES = [jnp.int4, jnp.uint4, jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32, jnp.uint32]


def limits_of(dtype, num):
    """The limits of the dtype and of the table, if the dtype can represent them."""
    limits = jnp.iinfo(dtype)
    ends = [limits.min, limits.max, 0, -1, 1, -num, num - 1, -num - 1, num, 2**32 + 1, -(2**32) - 1]
    return [int(n) for n in ends if limits.min <= n <= limits.max]


def rows_by_hand(numbers, num):
    """Restated with Python's integers, which have no limits, for rows that hold their number."""
    return [n % num if -num <= n < num else np.nan for n in numbers]


@pytest.mark.parametrize("num", [300, 3, 128, 70_000])
@pytest.mark.sampled
def test_a_row_number_means_the_same_beyond_what_its_dtype_counts(num):
    """Traced or not: 3 of three rows is NaN, whatever its dtype, and never another row."""
    layer = nn.Embedding(weight=jnp.arange(num, dtype=jnp.float32)[:, None])
    asked = {dtype: limits_of(dtype, num) for dtype in DTYPES}
    xs = [np.array(numbers).astype(dtype) for dtype, numbers in asked.items()]

    traced = jax.jit(lambda xs: [layer(x) for x in xs])(xs)

    for x, numbers, out in zip(xs, asked.values(), traced, strict=True):
        assert_close(out[:, 0], rows_by_hand(numbers, num))
        assert_close(layer(x)[:, 0], rows_by_hand(numbers, num))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
@pytest.mark.parametrize("x64", [False, True], ids=["32 bits", "64 bits"])
def test_half_of_a_long_number_names_no_row(dtype, x64):
    """2**32 + 1 is not row 1, although JAX would drop its upper half."""
    numbers = limits_of(dtype, 300)

    with jax.enable_x64(x64):
        layer = nn.Embedding(weight=np.arange(300, dtype=np.float32)[:, None])
        assert_close(layer(np.array(numbers, dtype))[:, 0], rows_by_hand(numbers, 300))


def test_initial_values_are_standard_normal_or_as_told(key):
    """Mean zero and variance one; an initializer is called with the sizes and the dtype."""
    weight = nn.Embedding(100, 50, key=key).weight
    ones = jax.nn.initializers.ones
    told = nn.Embedding(5, 3, dtype=jnp.bfloat16, key=key, weight_init=ones).weight

    assert abs(float(weight.mean())) < 0.05
    assert abs(float(weight.std()) - 1) < 0.05
    assert (told.dtype, told.tolist()) == (jnp.bfloat16, [[1] * 3] * 5)
