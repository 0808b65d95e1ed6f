"""The header of a file: the names, dtypes and positions of its arrays.

Owns: the format of safetensors, and the additions of this library to its metadata. The format is:
eight bytes with the length of the header, the header in JSON, the arrays one after another without
gaps. The additions are a checksum of the header, one of each array, and the dtypes of arrays that
are written as bytes.

Some dtypes have no code in the format, or a code without a dtype in NumPy, for which
`safetensors.numpy` would refuse the complete file. These are written as bytes (`U8`), with one more
axis if an element has several. Everything in a header is checked before it is used.
"""

from __future__ import annotations

import functools as ft
import json
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, TypeGuard, cast

import jax.numpy as jnp
import numpy as np

from pytreemod.errors import FileError, describe
from pytreemod.io.access import shown

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
"""Codes that other tools write, and that earlier versions of this library wrote."""
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
"""An element of each fills entire bytes in NumPy, however few bits it has."""


# NumPy needs several microseconds for a name.
@ft.cache
def _name_of(dtype: Any) -> str:
    return dtype.name


def can_be_written(dtype: Any) -> bool:
    """Whether a file can have arrays of a dtype: numbers with the same meaning everywhere."""
    return _name_of(dtype) in _CODES or _name_of(dtype) in _AS_BYTES


def code_of(dtype: Any) -> str:
    """Return the code of a dtype in files; the code of bytes if it has none."""
    return _CODES.get(_name_of(dtype), BYTES)


def has_code(dtype: Any) -> bool:
    """Whether a dtype has a code."""
    return _name_of(dtype) in _CODES


def recorded_dtype(name: str) -> np.dtype[Any] | None:
    """Return the dtype of a recorded name; None if it is invalid, or this JAX is too old for it."""
    return _dtype_called(name) if name in _AS_BYTES else None


def _dtype_called(name: str) -> np.dtype[Any] | None:
    # jax.numpy has all of them, NumPy only its own.
    scalar = getattr(jnp, name, None)
    return None if scalar is None else np.dtype(scalar)


_CODED = {code: _dtype_called(name) for name, code in (_CODES | _READ_ONLY).items()}
DTYPES = {code: dtype for code, dtype in _CODED.items() if dtype is not None}
"""The dtype of each code. An old JAX lacks some."""


METADATA = "__metadata__"
LENGTH = 8
"""How many bytes encode the length of the header."""
LONGEST = 100_000_000
"""The largest header in bytes, as in safetensors."""
ALIGNMENT = 64
"""The arrays begin at a multiple of it, and those of large elements come first. In a memory-mapped
file, each array is then aligned to its elements."""

OWN = "pytreemod.container."
"""Metadata keys with this prefix belong to this file, and are hidden from all others."""
_HEADER, _ARRAYS, _DTYPES, _VERSION = (
    OWN + key for key in ("header-crc32", "array-checksums", "dtypes", "version")
)
_OPENING = f'{{"{METADATA}":{{"{_HEADER}":"'.encode()
"""The prefix of each of our headers, in every version; the header's own checksum follows."""
_DIGITS = 8
_SEAL = slice(LENGTH + len(_OPENING), LENGTH + len(_OPENING) + _DIGITS)
_BETWEEN = f'","{_ARRAYS}":"'.encode()

_MOST_AXES = 64
_MOST_BYTES = 2**63 - 1


class FileEntry(NamedTuple):
    """One array of a file, as described by the header."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    """The offset of its bytes in the file."""
    stop: int
    checksum: int | None
    """The checksum of its bytes (see `pytreemod.io.headers`), if the file has one."""


class FileHeader(NamedTuple):
    """The parsed header of a file."""

    entries: dict[str, FileEntry]
    """By name, in the order of the call that wrote the file."""
    metadata: dict[str, str]


_Described = Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]]


def new_header(
    arrays: _Described, metadata: Mapping[str, str]
) -> tuple[bytearray, list[tuple[int, int]]]:
    """Return a header without its checksums.

    Args:
        arrays: name, dtype and shape of each.
        metadata: additional strings by name.

    Returns:
        The header, with length and padding, and where in the file each array begins and ends.
    """
    places = _places(arrays)
    own = {
        _HEADER: "0" * _DIGITS,
        _ARRAYS: "0" * _DIGITS * len(arrays),
        _VERSION: "1",
        _DTYPES: _as_json({name: dtype.name for name, dtype, _ in arrays if not has_code(dtype)}),
    }
    content: dict[str, Any] = {METADATA: {**own, **metadata}}
    for (name, dtype, shape), place in zip(arrays, places, strict=True):
        stored = shape if has_code(dtype) else _shape_of_bytes(shape, dtype)
        content[name] = {"dtype": code_of(dtype), "shape": stored, "data_offsets": place}
    text = _as_json(content).encode()
    # The format allows spaces after the JSON, for this purpose.
    text += b" " * (-(LENGTH + len(text)) % ALIGNMENT)
    header = bytearray(len(text).to_bytes(LENGTH, "little") + text)
    return header, [(len(header) + start, len(header) + stop) for start, stop in places]


def _as_json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def _places(arrays: _Described) -> list[tuple[int, int]]:
    """Return the range of each array in the data: those of large elements come first."""
    places = [(0, 0)] * len(arrays)
    end = 0
    for i in sorted(range(len(arrays)), key=lambda i: -arrays[i][1].itemsize):
        _, dtype, shape = arrays[i]
        begin, end = end, end + prod(shape) * dtype.itemsize
        places[i] = begin, end
    return places


def _shape_of_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Return the shape of an array as bytes: an element of several bytes adds an axis."""
    return shape if dtype.itemsize == 1 else (*shape, dtype.itemsize)


def seal_header(header: bytearray, checksums: Sequence[int]) -> None:
    """Write the checksums into a header, its own checksum last.

    Args:
        header: the result of `new_header`.
        checksums: those of the arrays.
    """
    begin = _SEAL.stop + len(_BETWEEN)
    digits = "".join(f"{checksum:0{_DIGITS}x}" for checksum in checksums).encode()
    header[begin : begin + len(digits)] = digits
    # Computed with zeros in its own position: a reader restores these to compute it again.
    header[_SEAL] = f"{zlib.crc32(header):0{_DIGITS}x}".encode()


def check_length(path: str, head: bytes, size: int) -> int:
    """Return the length of the header, including the length itself.

    Args:
        path: the path of the file, for errors.
        head: the first bytes of the file, at least eight, or all of them.
        size: the size of the complete file, in bytes.

    Returns:
        A number of bytes, at most the size of the file.

    Raises:
        FileError: if the file has another format.
    """
    length = int.from_bytes(head[:LENGTH], "little")
    is_possible = size >= LENGTH and length <= min(LONGEST, size - LENGTH)
    if not is_possible or head[LENGTH : LENGTH + 1] != b"{":
        what = "not a complete file in the format of safetensors" if size else "an empty file"
        raise FileError(f"{shown(path)} is {what}")
    return LENGTH + length


def parse_header(path: str, header: bytes, size: int) -> FileHeader:
    """Parse a header, and check all of it.

    Args:
        path: the path of the file, for errors.
        header: the bytes before the arrays, including the length.
        size: the size of the complete file, in bytes.

    Returns:
        The contents, which are consistent.

    Raises:
        FileError: if it is damaged, or describes an impossible file.
    """
    is_own = header.startswith(_OPENING, LENGTH)
    if is_own:
        _check_seal(path, header)
    content = parse_json(path, header[LENGTH:], "a header in JSON")
    metadata = _parse_metadata(path, content.pop(METADATA, {}))
    own = {key: metadata.pop(key) for key in [*metadata] if key.startswith(OWN)}
    checksums: list[int | None] = [None] * len(content)
    records: dict[str, Any] = {}
    if own:
        _check_own(path, own, is_own)
        checksums = _parse_checksums(path, own[_ARRAYS], len(content))
        records = parse_json(path, own[_DTYPES].encode(), "a record of dtypes in JSON")
    entries: dict[str, FileEntry] = {}
    for (name, entry), checksum in zip(content.items(), checksums, strict=True):
        dtype, shape, start, stop = _parse_entry(path, name, entry, records.pop(name, None))
        start, stop = len(header) + start, len(header) + stop
        entries[name] = FileEntry(name, dtype, shape, start, stop, checksum)
    if records:
        raise damaged(path, "dtypes of arrays in the file", "dtypes of other arrays", [*records])
    _check_extent(path, entries, len(header), size)
    return FileHeader(entries, metadata)


def damaged(
    path: str, expected: str, got: str, places: Sequence[str] = (), hint: Sequence[str] = ()
) -> FileError:
    """Return the error for a damaged file.

    Args:
        path: the path of the file.
        expected: what would have been correct.
        got: what the file has.
        places: names of arrays.
        hint: a sentence, then lines of code.

    Returns:
        The error, to be raised.
    """
    return FileError(shown(path), expected, got, at=[shown(place) for place in places], hint=hint)


def _check_seal(path: str, header: bytes) -> None:
    unsealed = bytearray(header)
    unsealed[_SEAL] = b"0" * _DIGITS
    if header[_SEAL] != f"{zlib.crc32(unsealed):0{_DIGITS}x}".encode():
        raise damaged(path, "a header that fits its checksum", "one that was changed or damaged")


def parse_json(path: str, text: bytes, expected: str) -> dict[str, Any]:
    """Parse a JSON object without NaN and without repeated names.

    Args:
        path: the path of the file, for errors.
        text: the JSON.
        expected: what it should be, for errors.

    Returns:
        The object; its strings can be written again.

    Raises:
        FileError: if it is not such an object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = [name for name, count in counts.items() if count > 1]
            raise damaged(path, "each name once", "a name twice", twice)
        return content

    def refuse(constant: str) -> None:
        raise damaged(path, expected, constant)

    try:
        content = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refuse)
        # JSON can escape half of a character, which no valid string contains.
        _as_json(content).encode()
    except FileError:
        raise
    except (ValueError, RecursionError) as error:
        raise damaged(path, expected, "something else") from error
    if not _is_object(content):
        raise damaged(path, expected, describe(content))
    return content


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return type(value) is dict


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    # The exact type, because True is an int as well.
    if type(values) is not list or not {*map(type, cast("list[Any]", values))} <= {int}:
        return False
    counts = cast("list[int]", values)
    return min(counts, default=0) >= 0 and max(counts, default=0) <= _MOST_BYTES


def _parse_metadata(path: str, metadata: Any) -> dict[str, str]:
    if not _is_object(metadata) or not {*map(type, metadata.values())} <= {str}:
        raise damaged(path, f"a dict of strings as {METADATA}", describe(metadata))
    return metadata


def _check_own(path: str, own: Mapping[str, str], is_own: bool) -> None:
    """Check that our keys are complete, and in a header that this library wrote."""
    if is_own and own.get(_VERSION, "1") != "1":
        raise damaged(
            path,
            "a file of version 1",
            f"version {describe(own[_VERSION])}",
            hint=["a newer pytreemod has written it:", "pip install --upgrade pytreemod"],
        )
    if not is_own or {*own} != {_HEADER, _ARRAYS, _VERSION, _DTYPES}:
        raise damaged(
            path,
            "checksums in pytreemod's order",
            "a changed header",
            hint=[
                "a tool that changes a file and copies its metadata must leave out these keys:",
                f"{{k: v for k, v in metadata.items() if not k.startswith({OWN!r})}}",
            ],
        )


def _parse_checksums(path: str, digits: str, count: int) -> list[int | None]:
    if not re.fullmatch(rf"([0-9a-f]{{{_DIGITS}}}){{{count}}}", digits):
        raise damaged(path, f"{count} checksums of arrays", describe(digits))
    return [int(digits[i : i + _DIGITS], 16) for i in range(0, len(digits), _DIGITS)]


def _parse_entry(
    path: str, name: str, entry: Any, record: Any
) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """Return dtype, shape, and the range in the data."""
    if not _is_object(entry) or {*entry} != {"dtype", "shape", "data_offsets"}:
        raise damaged(path, "dtype, shape and data_offsets", describe(entry), [name])
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = DTYPES.get(code) if type(code) is str else None
    if dtype is None:
        raise damaged(path, "the code of a dtype, such as F32", describe(code), [name])
    # One axis more than arrays have, for bytes.
    if not _are_counts(shape) or len(shape) > _MOST_AXES + 1:
        raise damaged(path, "a shape", describe(shape), [name])
    if not _are_counts(offsets) or len(offsets) != 2:
        raise damaged(path, "two offsets, of its start and its end", describe(offsets), [name])
    begin, end = offsets
    if prod(shape) * dtype.itemsize != end - begin:
        expected = f"the bytes of {code} of shape {describe(shape)}"
        raise damaged(path, expected, f"{end - begin}", [name])
    if record is not None:
        dtype, shape = _recorded(path, name, code, shape, record)
    # Zeros do not count in the size, because NumPy ignores them when it checks a new array.
    if len(shape) > _MOST_AXES or prod(filter(None, shape)) * dtype.itemsize > _MOST_BYTES:
        raise damaged(path, "a shape that an array can have", describe(shape), [name])
    return dtype, tuple(shape), begin, end


def _recorded(
    path: str, name: str, code: str, shape: list[int], record: Any
) -> tuple[np.dtype[Any], list[int]]:
    """Return dtype and shape of an array that was written as bytes."""
    dtype = recorded_dtype(record) if type(record) is str else None
    if dtype is None:
        raise damaged(path, "a dtype that this JAX has", describe(record), [name])
    inner = shape if dtype.itemsize == 1 else shape[:-1]
    if code != BYTES or [*_shape_of_bytes(tuple(inner), dtype)] != shape:
        raise damaged(path, f"bytes of {record}", f"{code} of shape {describe(shape)}", [name])
    return dtype, inner


def _check_extent(path: str, entries: Mapping[str, FileEntry], begin: int, size: int) -> None:
    """Check that the arrays follow each other, from the header to the end of the file."""
    end = begin
    # No gap could hide data, and no overlap could let a small file claim much memory.
    for entry in sorted(entries.values(), key=attrgetter("start", "stop")):
        if entry.start != end:
            got = "a gap before one" if entry.start > end else "overlapping ones"
            raise damaged(path, "arrays that follow each other", got, [entry.name])
        end = entry.stop
    if end != size:
        what = "too short" if size < end else "too long"
        raise damaged(path, f"a file of {end:,} bytes", f"{size:,}: {what}")


# ---- checksums
#
# The checksum is as fast as memory, and never changes, because files last. The bytes are divided
# into blocks of 1 MiB. In a block, every 8 KiB are a row of 1024 words of eight bytes,
# little-endian. CRC-32 runs over the sums of the columns, then the sums of the rows, then the bytes
# that fill no row, from the first block to the last. A change in one row always changes the sums of
# columns. A change in one column always changes the sums of rows. An unnoticed change must cancel
# in both. CRC-32 of all bytes would take four times as long as reading them from the system's
# memory.

BLOCK_BYTES = 1 << 20
"""Bytes; a block that was just read is still in the cache of the CPU."""

_WORDS = 1024
_WORD = np.dtype("<u8")
_ROW = _WORDS * _WORD.itemsize


def checksum_after(before: int, block: memoryview) -> int:
    """Return the checksum after a further block.

    Args:
        before: the checksum so far; 0 at the start.
        block: the next bytes: `BLOCK_BYTES` of them, unless they are the last.

    Returns:
        A number of 32 bits.

    Examples:
        >>> checksum_after(0, memoryview(b"123456789")) == 0xCBF43926  # few bytes: CRC-32 itself
        True
    """
    rows = len(block) // _ROW
    if rows:
        # (Sums of unsigned numbers wrap around, as intended.)
        words = np.frombuffer(block, _WORD, rows * _WORDS).reshape(rows, _WORDS)
        before = zlib.crc32(np.add.reduce(words, 0).tobytes(), before)
        before = zlib.crc32(np.add.reduce(words, 1).tobytes(), before)
    return zlib.crc32(block[rows * _ROW :], before)
