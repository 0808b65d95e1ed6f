"""`embedding`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.errors import ArgumentError
from pytreemod.nn.functional import embedding
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,)], ids=label)
def test_embedding_is_pytorchs(torch, shape):
    """The same rows as torch.nn.functional.embedding, for numbers of any shape."""
    table = wave(5, 2)
    rows = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5

    found = embedding(jnp.asarray(rows), jnp.asarray(table))

    assert_close(found, torch.nn.functional.embedding(torch.tensor(rows), torch.tensor(table)))


def test_gradient_adds_up_where_a_row_is_read_twice():
    """Each reading of a row contributes to its gradient."""
    table = jnp.ones((3, 1))

    grad = jax.grad(lambda table: embedding(jnp.array([2, 0, 2]), table).sum())(table)

    assert grad.tolist() == [[1], [0], [2]]


def test_a_number_out_of_range_is_not_read_as_another_row():
    """3 and -4 in a table of three rows give nan, also under jit; -1 is the last row."""
    table = jnp.arange(3.0)[:, None]

    rows = jax.jit(embedding)(jnp.array([0, -1, 3, -4]), table)

    assert_close(rows, [[0], [2], [np.nan], [np.nan]])


SIZES = [3, 128, 300, 70_000]
"""Tables that have fewer rows, as many, and more than a dtype of 8 or 16 bits can count."""

DTYPES = [jnp.int4, jnp.uint4, jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32, jnp.uint32]


def expected_rows(numbers, num):
    """Restated with Python's integers, which have no limits."""
    return [n % num if -num <= n < num else np.nan for n in map(int, numbers)]


def table(num):
    """A table whose rows hold their own number."""
    return np.arange(num, dtype=np.float32)[:, None]


def interesting_numbers(dtype, num):
    """The limits of the dtype and of the table, if the dtype can represent them."""
    limits = jnp.iinfo(dtype)
    ends = [limits.min, limits.max, 0, -1, 1, -num, num - 1, -num - 1, num, 2**32 + 1, -(2**32) - 1]
    return [int(n) for n in ends if limits.min <= n <= limits.max]


@pytest.mark.parametrize("num", SIZES)
@pytest.mark.sampled
def test_a_row_number_means_the_same_in_every_dtype(num):
    """Also where the number of rows does not fit into the dtype; traced or not, NumPy's or ours."""
    asked = {dtype: interesting_numbers(dtype, num) for dtype in DTYPES}
    xs = [np.array(numbers).astype(dtype) for dtype, numbers in asked.items()]

    traced = jax.jit(lambda xs: [embedding(x, table(num)) for x in xs])(xs)

    for x, numbers, out in zip(xs, asked.values(), traced, strict=True):
        assert_close(out[:, 0], expected_rows(numbers, num))
        assert_close(embedding(x, table(num))[:, 0], expected_rows(numbers, num))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
@pytest.mark.parametrize("x64", [False, True], ids=["32 bits", "64 bits"])
def test_only_half_of_a_long_number_names_no_row(dtype, x64):
    """2**32 + 1 is not row 1, although JAX would drop its upper half."""
    numbers = interesting_numbers(dtype, 300)
    rows = np.array(numbers, dtype)

    with jax.enable_x64(x64):
        expected = np.array(expected_rows(numbers, 300))
        assert_close(embedding(rows, table(300))[:, 0], expected)
        for row, wanted in zip(rows, expected, strict=True):
            assert_close(embedding(row, table(300)), [wanted])
        if x64:
            assert_close(jax.jit(embedding)(rows, table(300))[:, 0], expected)


@pytest.mark.parametrize("x", [jnp.array([True]), np.ones(2), True, 1.0], ids=label)
def test_what_is_no_integer_is_refused(x):
    """True is not row 1."""
    with pytest.raises(ArgumentError, match=r"^embedding\(x\): expected integers, got (bool|f)"):
        embedding(x, table(3))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=label)
def test_the_gradient_of_a_row_that_is_often_read_is_added_up_in_single_precision(dtype):
    """In bfloat16 itself the sum of 4096 ones is 256, in float16 2048."""
    rows = jnp.asarray(np.repeat([0, 1, -1, 7], [4096, 3, 1000, 5]))
    weight = jnp.ones((5, 2), dtype)

    def loss(weight):
        return jnp.sum(embedding(rows, weight)[:-5].astype(jnp.float32))

    grad = jax.jit(jax.grad(loss))(weight)

    assert grad.dtype == dtype
    assert_close(grad.astype(jnp.float32)[:, 0], [4096, 3, 0, 0, 1000])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=label)
@pytest.mark.slow
def test_tangents_are_rows_of_the_tangent(dtype):
    """In forward mode, too, and twice; indices out of range have no tangent."""
    weight = jnp.asarray(wave(4, 2), dtype)
    change = jnp.asarray(wave(4, 2, phase=1.0), dtype)
    rows = jnp.array([3, -4, 9])

    out, tangent = jax.jvp(lambda weight: embedding(rows, weight), (weight,), (change,))

    assert out.dtype == tangent.dtype == dtype
    assert_close(out[:2].astype(float), weight[jnp.array([3, 0])].astype(float))
    assert np.isnan(np.asarray(out[2], np.float32)).all()
    assert_close(tangent.astype(float), [*change[jnp.array([3, 0])].astype(float), [0, 0]])
    slope = jax.grad(lambda weight: jnp.sum(embedding(rows[:2], weight) ** 2))
    assert_close(jax.jvp(slope, (weight,), (change,))[1][3].astype(float), 2 * change[3])


def test_the_table_may_hold_integers():
    """Out of range, the result is their extreme, because integers have no nan."""
    found = embedding(jnp.array([2, 5]), jnp.arange(3, dtype=jnp.int8))

    assert found.tolist() == [2, -128]


def test_row_numbers_of_32_bits_cost_nothing():
    """The program is that of JAX's own reading."""
    rows, weight = jnp.array([2, 0]), jnp.asarray(table(3))

    program = jax.make_jaxpr(embedding)(rows, weight)

    by_hand = jax.make_jaxpr(lambda rows, weight: jnp.take(weight, rows, axis=0, mode="fill"))
    assert str(program) == str(by_hand(rows, weight))
