"""`dot_product_attention` and its two halves."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.errors import ArgumentError
from pytreemod.nn.functional import (
    attention_mask,
    attention_weights,
    dot_product_attention,
    weighted_values,
)
from tests.helpers.meshes import EXPLICIT, lies, on
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


def sequences(*lead, heads=2, q_seq=3, kv_seq=5, size=4, v_size=3):
    """Queries, keys and values."""
    shapes = ((q_seq, heads, size), (kv_seq, heads, size), (kv_seq, heads, v_size))
    return [jnp.asarray(wave(*lead, *shape, phase=i)) for i, shape in enumerate(shapes)]


MASKS = {
    "none": None,
    "one for all": (3, 5),
    "for each head": (2, 3, 5),
    "for each example": (4, 1, 3, 5),
}


def mask_of(shape):
    """One that leaves each query something to see."""
    return None if shape is None else np.asarray(wave(*shape) > -1) | np.eye(3, 5, dtype=bool)


def of_torch(torch, given, mask):
    """The same by PyTorch, which has heads before positions; and the arguments to differentiate."""
    tensors = [torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in given]
    query, key, value = (x.transpose(-2, -3) for x in tensors)
    allowed = None if mask is None else torch.tensor(mask)
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed)
    return found.transpose(-2, -3), tensors


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.sampled
def test_attention_is_pytorchs(torch, mask):
    """Outputs and gradients of scaled_dot_product_attention, in double precision there."""
    given, mask = sequences(4), mask_of(MASKS[mask])
    found, pull = jax.vjp(lambda *given: dot_product_attention(*given, mask), *given)
    expected, tensors = of_torch(torch, given, mask)
    expected.backward(torch.tensor(wave(*found.shape)).double())

    assert_close(found, expected)
    for mine, other in zip(pull(jnp.asarray(wave(*found.shape))), tensors, strict=True):
        assert_close(mine, other.grad)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(jnp.bfloat16, 2e-2), (jnp.float16, 3e-3)], ids=label
)
def test_short_floats_are_computed_in_float32(torch, dtype, tolerance):
    """The result is off by its own rounding, and by that of the weights, also in a long sum."""
    given = [x.astype(dtype) for x in sequences(kv_seq=600)]
    expected, _ = of_torch(torch, given, None)
    found = dot_product_attention(*given)

    assert found.dtype == dtype
    assert_close(found.astype("f4"), expected.detach().float(), rtol=tolerance, atol=tolerance)
    sums = attention_weights(*given[:2]).astype("f4").sum(-1)
    assert_close(sums, np.ones((2, 3)), rtol=2 * tolerance)


def test_large_products_do_not_overflow():
    """In float16 a product of 70000 overflows; in float32 it does not."""
    query = jnp.full((1, 1, 4), 150, jnp.float16)
    key = jnp.asarray([[[150] * 4], [[0] * 4]], jnp.float16)

    assert attention_weights(query, key).tolist() == [[[1, 0]]]


def test_attention_is_the_formula_of_its_paper():
    """softmax(q k^T / sqrt(d)) v, by NumPy in double precision, one head after the other."""
    given = sequences(2, heads=3)
    query, key, value = (np.asarray(x, "f8") for x in given)
    expected = np.empty((2, 3, 3, 3))
    for i, head in itertools.product(range(2), range(3)):
        products = query[i, :, head] @ key[i, :, head].T / np.sqrt(4)
        powers = np.exp(products - products.max(1, keepdims=True))
        expected[i, :, head] = powers / powers.sum(1, keepdims=True) @ value[i, :, head]

    assert_close(dot_product_attention(*given), expected)


def test_a_query_that_may_see_nothing_sees_all_alike():
    """And nothing is nan, the gradient neither."""
    given, mask = sequences(), jnp.zeros((3, 5), bool)
    found, pull = jax.vjp(lambda *given: dot_product_attention(*given, mask), *given)

    assert_close(found, jnp.broadcast_to(given[2].mean(0), (3, 2, 3)))
    assert all(np.isfinite(grad).all() for grad in pull(found))


def test_what_is_masked_makes_no_difference():
    """To the last bit, in the outputs and in the gradient."""
    query, key, value = sequences()
    mask = jnp.asarray(mask_of((3, 5))).at[:, -1].set(False)

    def total(value, key):
        return dot_product_attention(query, key, value, mask).sum()

    other = jax.grad(total, (0, 1))(value.at[-1].add(9), key.at[-1].add(9))
    for mine, theirs in zip(jax.grad(total, (0, 1))(value, key), other, strict=True):
        assert mine.tolist() == theirs.tolist()
        assert not np.any(mine[-1])


def test_dropout_is_of_the_weights():
    """The function gets weights that sum to one, and the result is a sum with its output."""
    query, key, value = sequences()
    shapes = []

    def first_only(weights):
        shapes.append(weights.shape)
        return jnp.zeros_like(weights).at[..., 0].set(1)

    found = dot_product_attention(query, key, value, dropout=first_only)

    assert shapes == [(2, 3, 5)]
    assert_close(found, jnp.broadcast_to(value[0], (3, 2, 3)))
    assert_close(weighted_values(jnp.ones((2, 1, 5)), value)[0], value.sum(0))


# ---- groups of heads, windows, bias, and JAX's own function

SMALL = [  # heads, heads of keys, masked, causal, window, biased
    (4, 2, False, True, None, False),
    (4, 1, True, False, 2, True),
    (2, 2, True, True, 3, True),
]
WIDE = list(
    itertools.product((4,), (1, 2, 4), (False, True), (False, True), (None, 1, 3), (False, True))
)


def grouped(kv_heads, heads=4, dtype=jnp.float32):
    """A batch of queries, keys and values of equal sizes, as JAX's function wants them."""
    shapes = ((2, 3, heads, 4), (2, 5, kv_heads, 4), (2, 5, kv_heads, 4))
    return [jnp.asarray(wave(*shape, phase=i)).astype(dtype) for i, shape in enumerate(shapes)]


def visible(masked, causal, window):
    """Where 3 queries may see 5 keys, one by one."""
    allowed = np.ones((3, 5), bool) if not masked else mask_of((3, 5))
    for q, k in itertools.product(range(3), range(5)):
        too_far = window is not None and abs(q - k) >= window
        if too_far or (causal and k > q):
            allowed[q, k] = False
    return allowed


def check_case(torch, case, dtype, implementation, tolerance):
    """Compare outputs and gradients with PyTorch in double precision, with explicit positions."""
    heads, kv_heads, masked, causal, window, biased = case
    given = grouped(kv_heads, heads, dtype)
    bias = jnp.asarray(wave(heads, 3, 5)) if biased else None
    mask = jnp.asarray(mask_of((3, 5))) if masked else None
    options = {"is_causal": causal, "window": window, "implementation": implementation}
    found, pull = jax.vjp(lambda *x: dot_product_attention(*x, mask, bias=bias, **options), *given)
    cotangent = wave(*found.shape)

    tensors = [torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in given]
    added = torch.zeros(1, heads, 3, 5).double() + (
        torch.tensor(wave(heads, 3, 5)) if biased else 0
    )
    added = added.masked_fill(torch.tensor(~visible(masked, causal, window)), float("-inf"))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in tensors), added, enable_gqa=heads != kv_heads
    ).transpose(1, 2)
    expected.backward(torch.tensor(cotangent).double())

    assert found.dtype == dtype
    assert_close(found.astype("f4"), expected.detach().float(), rtol=tolerance, atol=tolerance)
    # The backward pass of JAX's own function promotes.
    with jax.numpy_dtype_promotion("standard"):
        grads = pull(jnp.asarray(cotangent).astype(dtype))
    for mine, other in zip(grads, tensors, strict=True):
        mine, other = mine.astype("f4"), other.grad.float()
        assert_close(mine, other, rtol=4 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.slow
def test_groups_windows_and_bias_are_pytorchs(torch, case, implementation):
    """Masked, causal, within a window: by PyTorch's function with a mask and a bias."""
    check_case(torch, case, jnp.float32, implementation, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [
        (None, jnp.float32, 2e-5),
        (None, jnp.bfloat16, 4e-2),
        (None, jnp.float16, 5e-3),
        # Of JAX's own function a CPU has no products of float16.
        ("xla", jnp.float32, 2e-5),
        ("xla", jnp.bfloat16, 4e-2),
    ],
    ids=label,
)
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_every_combination_is_pytorchs(torch, case, implementation, dtype, tolerance):
    """The same over the whole grid, in all dtypes."""
    check_case(torch, case, dtype, implementation, tolerance)


def test_groups_are_keys_that_are_repeated():
    """Neighbouring heads of queries share a head of keys; by NumPy, head by head."""
    query, key, value = (np.asarray(x, "f8") for x in grouped(2))
    expected = np.empty((2, 3, 4, 4))
    for i, head in itertools.product(range(2), range(4)):
        products = query[i, :, head] @ key[i, :, head // 2].T / np.sqrt(4)
        powers = np.exp(products - products.max(1, keepdims=True))
        expected[i, :, head] = powers / powers.sum(1, keepdims=True) @ value[i, :, head // 2]

    assert_close(dot_product_attention(*grouped(2)), expected)


def test_a_window_counts_the_own_place():
    """A window of one is that position alone; a window that is not causal extends both ways."""
    x = jnp.arange(4)
    causal = attention_mask(x, x, is_causal=True, window=2)

    assert attention_mask(x, x, window=1).tolist() == np.eye(4, dtype=bool).tolist()
    assert attention_mask(x, x, window=2).tolist() == (causal | causal.T).tolist()
    assert attention_mask(x[:2] + 2, x, is_causal=True).astype(int).tolist() == [
        [1, 1, 1, 0],
        [1, 1, 1, 1],
    ]


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.uint32])
@pytest.mark.sampled
def test_places_may_be_of_any_integers(dtype):
    """Differences to earlier positions are negative: in unsigned integers, nothing was visible."""
    x = jnp.array([0, 100, 101, 127])
    expected = attention_mask(x, x, is_causal=True, window=2)

    found = attention_mask(x.astype(dtype), x.astype(dtype), is_causal=True, window=2)
    # From -100 to 100 it is farther than an int8 has numbers.
    far = attention_mask(jnp.array([-100], jnp.int8), jnp.array([100], jnp.int8), window=100)

    assert found.tolist() == expected.tolist()
    assert found.sum() == 5
    assert not far.any()


@pytest.mark.slow
def test_what_jaxs_function_cannot_do_is_done_by_the_formula():
    """Dropout, and values of another size than keys."""
    query, key, value = grouped(2)
    doubled = dot_product_attention(
        query, key, value, implementation="xla", dropout=lambda weights: 2 * weights
    )

    assert_close(doubled, 2 * dot_product_attention(query, key, value))
    short = dot_product_attention(query, key, value[..., :3], implementation="xla")
    assert_close(short, dot_product_attention(query, key, value)[..., :3])


def test_heads_that_do_not_divide_are_refused():
    """By either way."""
    query, key, value = grouped(3)
    for implementation in (None, "xla"):
        with pytest.raises(ArgumentError, match=r"^attention: .* divides the 4 query heads, got 3"):
            dot_product_attention(query, key, value, implementation=implementation)


@pytest.mark.parametrize("kv_at", [("data",), ("data", None, "model")])
def test_the_queries_decide_how_heads_are_split(kv_at):
    """JAX's function gets all arrays split as the queries; the result is that of one device."""
    given = sequences(4, v_size=4)
    split = [jax.device_put(given[0], on("data", None, "model", mesh=EXPLICIT))]
    split += [jax.device_put(x, on(*kv_at, mesh=EXPLICIT)) for x in given[1:]]
    call = jax.jit(lambda *given: dot_product_attention(*given, implementation="xla"))
    found = call(*split)

    assert lies(found) == ("data", None, "model")
    assert_close(found, call(*given))
