"""Dtypes and broadcasting of the formulas."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pytreemod.nn.functional.promotion import (
    computing_dtype,
    countable,
    narrow,
    place,
    promote,
    wide_dtype,
    widen,
    with_shared,
)
from tests.goldens import refusals
from tests.labels import label


def test_promote_leaves_arrays_of_one_dtype_alone():
    """No operation is added where nothing has to change."""
    x, y = jnp.ones(2), jnp.ones(3)

    promoted = promote(x, y, None)

    assert promoted[0] is x
    assert promoted[1] is y
    assert promoted[2] is None


def test_promote_follows_the_promotion_that_is_set():
    """Mixed dtypes meet by JAX's rules, and are refused where promotion is strict."""
    half, single = jnp.ones(2, jnp.bfloat16), jnp.ones(2)

    with jax.numpy_dtype_promotion("standard"):
        assert [x.dtype.name for x in promote(half, single)] == ["float32", "float32"]
    with (
        jax.numpy_dtype_promotion("strict"),
        pytest.raises(ValueError, match="no available implicit dtype promotion"),
    ):
        promote(half, single)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (jnp.bfloat16, "float32"),
        (jnp.float16, "float32"),
        (jnp.float32, "float32"),
        (jnp.int8, "float32"),
    ],
    ids=label,
)
def test_statistics_are_computed_in_single_precision_or_better(dtype, expected):
    """Narrow floats and integers are widened."""
    assert jnp.dtype(computing_dtype(jnp.dtype(dtype))).name == expected


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (jnp.bfloat16, "float32"),
        (jnp.float16, "float32"),
        (jnp.float8_e4m3fn, "float32"),
        (jnp.float32, "float32"),
        (jnp.complex64, "complex64"),
        (jnp.int8, "int8"),
        (jnp.bool_, "bool"),
    ],
    ids=label,
)
def test_sums_of_floats_are_computed_in_single_precision_or_better(dtype, expected):
    """Only narrow floats are widened; a round trip returns to the dtype."""
    x = jnp.ones(2).astype(dtype)

    wide = widen(x)

    assert jnp.dtype(wide_dtype(jnp.dtype(dtype))).name == wide.dtype.name == expected
    assert (wide is x) == (wide.dtype == x.dtype)
    assert narrow(wide, x).dtype == x.dtype
    assert wide_dtype(np.dtype("f8")) == np.float64


def test_a_result_of_integers_stays_as_it_is():
    """A mean of integers is not an integer."""
    half = jnp.array(0.5)

    assert narrow(half, jnp.array(1)) is half


def test_place_puts_an_array_along_the_axes_named():
    """The array goes to the named axes; a wrong shape is refused."""
    like = jnp.zeros((2, 3, 4))

    assert (place(jnp.arange(3), like, 1) == jnp.arange(3.0)[None, :, None]).all()
    with pytest.raises(TypeError, match="operand dimension sizes must"):
        place(jnp.arange(3), like, 0)


@pytest.mark.parametrize("mapped", [False, True], ids=["as a batch", "mapped"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=label)
def test_the_gradient_of_what_examples_share_is_added_up_in_single_precision(dtype, mapped):
    """A sum of ones would stop at 256, or at 2048; under vmap, the sum is over the map."""
    x, values = jnp.zeros((64, 64, 2, 3), dtype), jnp.ones(2, dtype)

    def total(values):
        call = ft.partial(with_shared, lax.add, values=values, axis=0 if mapped else 2)
        out = (jax.vmap(jax.vmap(call)) if mapped else call)(x)
        assert out.dtype == dtype
        return jnp.sum(out, dtype=jnp.float32)

    assert jax.jit(jax.grad(total))(values).tolist() == [64 * 64 * 3] * 2


def test_what_nobody_shares_changes_nothing():
    """None, for an absent bias, is unchanged; and wide numbers are not converted."""
    x = jnp.zeros((2, 3))
    program = jax.make_jaxpr(lambda x, b: with_shared(lax.add, x, b, 1))(x, jnp.ones(3))

    assert with_shared(lax.add, x, None, 0) is x
    names = [equation.primitive.name for equation in program.eqns]
    assert names == ["broadcast_in_dim", "add"]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_one_can_count_on_and_subtract(dtype):
    """From the greatest and the least number of a dtype; an overflow gives the greatest."""
    ends = np.iinfo(dtype)
    found = countable(jnp.array([ends.min, ends.max], dtype))

    assert jnp.issubdtype(found.dtype, jnp.signedinteger)
    assert found.tolist() == [ends.min, min(ends.max, 2**31 - 1)]
    assert countable(found) is found


def test_one_cannot_count_with_floats():
    """They are unchanged."""
    x = jnp.ones(2, jnp.bfloat16)
    assert countable(x) is x


test_refusals = refusals(globals())
