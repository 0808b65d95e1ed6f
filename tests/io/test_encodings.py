"""Every dtype that JAX has comes back from a file."""

import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.io.encodings import (
    BYTES,
    can_be_written,
    code_of,
    dtype_coded,
    has_code,
    recorded_dtype,
)

ALL = [
    name
    for name in dir(jnp)
    if name.rstrip("0123456789") in ("int", "uint", "float", "bfloat", "complex")
    or name.startswith(("float8", "float6", "float4"))
]
NAMES = [n for n in [*ALL, "bool"] if isinstance(getattr(jnp, n), type(jnp.int8))]


def test_there_are_dtypes_to_test():
    """The list is read off JAX, so that a new dtype is not forgotten."""
    assert {"bool", "bfloat16", "int4", "float8_e4m3b11fnuz", "complex128", "uint64"} <= {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_dtype_is_told_by_its_code_or_by_its_record(name):
    """By one of the two, and not by both."""
    dtype = np.dtype(getattr(jnp, name))

    assert can_be_written(dtype)
    if has_code(dtype):
        assert dtype_coded(code_of(dtype)) == dtype
        assert recorded_dtype(name) is None
    else:
        assert code_of(dtype) == BYTES
        assert recorded_dtype(name) == dtype


@pytest.mark.parametrize(
    "dtype", ["O", "U3", "S3", "V8", "M8[ns]", "m8[s]", np.dtype([("a", "f4")]), np.longdouble]
)
def test_what_is_no_number_that_means_the_same_everywhere_cannot_be_written(dtype):
    """An extended float has another layout on another machine."""
    assert not can_be_written(np.dtype(dtype))


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "f32", "", "object", "float32"])
def test_a_code_of_no_array_is_none(code):
    """Packed elements among them, of which two share a byte."""
    assert dtype_coded(code) is None


@pytest.mark.parametrize("name", ["float32", "object", "O", "nosuch", ""])
def test_a_record_names_only_what_is_written_as_bytes(name):
    """What a file says is looked up in a table, never in NumPy."""
    assert recorded_dtype(name) is None


def test_a_dtype_that_this_jax_does_not_have_is_none(monkeypatch):
    """An older JAX reads what it can, and says what it cannot."""
    monkeypatch.delattr(jnp, "float4_e2m1fn")
    monkeypatch.delattr(jnp, "float8_e8m0fnu")

    assert recorded_dtype("float4_e2m1fn") is None
    assert recorded_dtype("float8_e8m0fnu") is None
    assert dtype_coded("F8_E8M0") is None
