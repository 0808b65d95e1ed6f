"""How dtypes are named in files.

Owns: the codes of the safetensors format. A dtype for which it has none, or for whose code NumPy
has no dtype (`safetensors.numpy` would refuse the whole file), is written as bytes (`U8`), with one
more axis if an element has several, and its name is recorded beside.
"""

from __future__ import annotations

import functools as ft
from typing import Any

import jax.numpy as jnp
import numpy as np

BYTES = "U8"

_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}
_READ_ONLY = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""Codes that other tools write, as earlier versions of this library did."""
_AS_BYTES = (
    *_READ_ONLY,
    "complex128",
    "int4",
    "uint4",
    "int2",
    "uint2",
    "int1",
    "uint1",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
)
"""An element of each takes whole bytes in NumPy, however few bits it has."""


# A name takes NumPy several microseconds.
@ft.cache
def _name_of(dtype: Any) -> str:
    return dtype.name


def can_be_written(dtype: Any) -> bool:
    """Whether a file can hold arrays of a dtype: numbers that mean the same everywhere."""
    return _name_of(dtype) in _CODES or _name_of(dtype) in _AS_BYTES


def code_of(dtype: Any) -> str:
    """The code that a dtype is written with; that of bytes where it has none of its own."""
    return _CODES.get(_name_of(dtype), BYTES)


def has_code(dtype: Any) -> bool:
    """Whether a dtype is written with a code of its own."""
    return _name_of(dtype) in _CODES


def recorded_dtype(name: str) -> np.dtype[Any] | None:
    """The dtype that a record names; None if this is no such name, or JAX is too old for it."""
    return _dtype_called(name) if name in _AS_BYTES else None


def _dtype_called(name: str) -> np.dtype[Any] | None:
    # jax.numpy has all of them, and NumPy only its own.
    scalar = getattr(jnp, name, None)
    return None if scalar is None else np.dtype(scalar)


_CODED = {code: _dtype_called(name) for name, code in (_CODES | _READ_ONLY).items()}
DTYPES = {code: dtype for code, dtype in _CODED.items() if dtype is not None}
"""The dtype that each code stands for. An old JAX lacks some."""
