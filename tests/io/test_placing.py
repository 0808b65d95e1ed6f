"""From numbers to leaves: the kind that the file tells, or that of the leaf of `like`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.errors import FileError
from pytreemod.io.placing import (
    as_dtype,
    as_in,
    as_told,
    check_widths,
    is_key,
    is_too_wide,
    keys_form,
)
from pytreemod.io.tables import Leaf
from tests.goldens import refusals
from tests.helpers.comparing import assert_same
from tests.helpers.trees import ramp

NUMBERS = np.asarray([0, 7], np.uint32)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"is": "jax"}, jnp.asarray(NUMBERS)),
        ({"is": "numpy"}, NUMBERS),
        ({"is": "key", "impl": "threefry2x32"}, jax.random.key(7)),
    ],
    ids=str,
)
def test_a_leaf_is_made_as_the_file_tells(form, expected):
    assert_same(as_told(NUMBERS, form, "load", "a"), expected)


def test_weak_types_are_made_where_python_has_such_numbers():
    for array in (np.float32(2.5), np.asarray([[1, 2]], np.int32), np.asarray([1j], np.complex64)):
        made = as_told(np.asarray(array), {"is": "jax", "weak": True}, "load", "a")
        assert made.weak_type
        assert made.dtype == array.dtype
        np.testing.assert_array_equal(made, array)
    half = as_told(np.asarray([1], np.float16), {"is": "jax", "weak": True}, "load", "a")
    assert half.dtype == np.float16


@pytest.mark.parametrize(
    "old",
    [ramp(2), np.ones(2, np.float32), jax.ShapeDtypeStruct((2,), jnp.float32)],
    ids=["jax", "numpy", "abstract"],
)
def test_a_leaf_is_of_the_kind_that_it_replaces(old):
    made = as_in(old, np.asarray([3.0, 4.0], np.float32), None, "load", "a")

    assert isinstance(made, np.ndarray) == isinstance(old, np.ndarray)
    assert not getattr(made, "weak_type", False)
    np.testing.assert_array_equal(made, [3, 4])


def test_numbers_and_scalars_replace_their_like():
    assert type(as_in(1.0, np.asarray(0.5), None, "load", "a")) is float
    assert type(as_in(np.float32(1), np.asarray(0.5, np.float32), None, "load", "a")) is np.float32
    assert as_in(jnp.asarray(1.0), np.asarray(0.5, np.float32), None, "load", "a").weak_type


def test_a_leaf_is_put_where_the_one_is_that_it_replaces():
    there = jax.device_put(ramp(2), jax.devices()[3])
    made = as_in(there, np.ones(2, np.float32), None, "load", "a")
    assert made.devices() == {jax.devices()[3]}
    key = jax.device_put(jax.random.key(0), jax.devices()[3])
    assert as_in(key, NUMBERS, "threefry2x32", "load", "a").devices() == {jax.devices()[3]}
    weak = jax.device_put(jnp.asarray(1.0), jax.devices()[3])
    made = as_in(weak, np.asarray(0.5, np.float32), None, "load", "a")
    assert (made.devices(), made.weak_type) == ({jax.devices()[3]}, True)
    # What was put nowhere stays free to go where it is needed.
    assert not as_in(ramp(2), np.ones(2, np.float32), None, "load", "a").committed


@pytest.mark.parametrize(
    ("numbers", "dtype", "other", "lost"),
    [
        ([300, 1], "int32", "int8", "300"),
        ([-1, 1], "int32", "uint32", "-1"),
        ([2**32 - 1, 1], "uint32", "int32", "4294967295"),
        ([-3, 1], "int8", "int4", None),
        ([-9, 1], "int8", "int4", "-9"),
        ([-1, 1], "int4", "uint4", "-1"),
        ([5, 1], "int4", "uint4", None),
        ([7e4, 1], "float32", "float16", "70000.0"),
        ([7e4, 1], "float32", "bfloat16", None),
        ([7e4, 1], "float32", "float8_e4m3fn", "70000.0"),
        ([np.inf, np.nan], "float32", "float16", None),
        ([1e300, 1], "complex128", "complex64", r"\(1e\+300\+0j\)"),
    ],
)
def test_a_cast_has_all_numbers_or_is_refused(numbers, dtype, other, lost):
    """A nearby number is one that is meant; infinity, or one that was wrapped around, is not."""
    array = np.asarray(numbers).astype(dtype)
    if lost is None:
        made = as_dtype(array, jnp.dtype(other), "load", "a")
        assert made.dtype == other
        np.testing.assert_allclose(made.astype(float), numbers, rtol=0.01)
    else:
        with pytest.raises(
            FileError, match=rf"load: expected numbers that {other} has, got {lost}\."
        ):
            as_dtype(array, jnp.dtype(other), "load", "a")


def test_the_form_of_keys_is_known_without_them():
    assert keys_form((5, 2), "threefry2x32").shape == (5,)
    assert keys_form((4,), "rbg").dtype == jax.random.key(0, impl="rbg").dtype
    assert keys_form((3,), "threefry2x32") is None
    assert keys_form((2,), "evil") is None
    assert is_key(jax.random.key(0))
    assert not is_key(NUMBERS)
    assert not is_key("a")


def test_wide_dtypes_are_refused_for_jax_alone():
    assert is_too_wide(np.dtype("float64"))
    assert not is_too_wide(np.dtype("float32"))
    wide = np.dtype("int64")
    check_widths({"a": Leaf({"is": "numpy"}, (), wide), "b": Leaf({"value": 3})}, "load")


test_refusals = refusals(globals())
