"""The header of a file: what arrays it holds, and where.

Owns: the format of safetensors (eight bytes with the length of the header, the header in JSON, the
arrays one after the other without holes), and what this library adds to it in its metadata: a
checksum of the header, one of each array, and the dtypes for which the format has no code. Nothing
that a header says is believed before it was checked.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pytreemod.errors import FileError, describe, explain
from pytreemod.io.encodings import BYTES, code_of, dtype_of, has_code, recorded_dtype

METADATA = "__metadata__"
LENGTH = 8
LONGEST = 100_000_000
"""Bytes of a header: what safetensors allows."""
ALIGNMENT = 64
"""The arrays begin at a multiple of it, and those of large elements come first: whoever maps the
file finds each at an address that fits its elements."""

OWN = "pytreemod.container."
"""Keys of the metadata that begin so belong to this file, and nobody else sees them."""
_HEADER, _ARRAYS, _DTYPES, _VERSION = (
    OWN + key for key in ("header-crc32", "array-crc32", "dtypes", "version")
)
_OPENING = f'{{"{METADATA}":{{"{_HEADER}":"'.encode()
"""How each of our headers begins, in every version; the header's own checksum follows."""
_DIGITS = 8
_SEAL = slice(LENGTH + len(_OPENING), LENGTH + len(_OPENING) + _DIGITS)
_BETWEEN = f'","{_ARRAYS}":"'.encode()

_MOST_AXES = 64
_MOST_BYTES = 2**63 - 1


class FileEntry(NamedTuple):
    """One array of a file, as the header tells it."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    """Where its bytes begin in the file."""
    stop: int
    checksum: int | None
    """The CRC-32 of its bytes, if the file has one."""


class FileHeader(NamedTuple):
    """What a file says of itself."""

    entries: dict[str, FileEntry]
    """By name, in the order in which they were given when it was written."""
    metadata: dict[str, str]


def new_header(
    arrays: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytearray, list[int]]:
    """A header whose checksums are still to come.

    Args:
        arrays: name, dtype and shape of each.
        metadata: what the file is to say besides.

    Returns:
        The header, length and padding included, and where in the file each array begins.
    """
    positions = _positions(arrays)
    unnamed = {name: dtype.name for name, dtype, _ in arrays if not has_code(dtype)}
    own = {
        _HEADER: "0" * _DIGITS,
        _ARRAYS: "0" * _DIGITS * len(arrays),
        _VERSION: "1",
        _DTYPES: _as_json(unnamed),
    }
    content: dict[str, Any] = {METADATA: {**own, **metadata}}
    for (name, dtype, shape), start in zip(arrays, positions, strict=True):
        stop = start + prod(shape) * dtype.itemsize
        content[name] = {
            "dtype": code_of(dtype),
            "shape": shape if has_code(dtype) else _shape_of_bytes(shape, dtype),
            "data_offsets": (start, stop),
        }
    text = _as_json(content).encode()
    text += b" " * (-(LENGTH + len(text)) % ALIGNMENT)
    header = bytearray(len(text).to_bytes(LENGTH, "little") + text)
    return header, [len(header) + start for start in positions]


def _as_json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def _positions(arrays: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]]) -> list[int]:
    """Where in the data each array begins: those of large elements first."""
    positions = [0] * len(arrays)
    end = 0
    for i in sorted(range(len(arrays)), key=lambda i: -arrays[i][1].itemsize):
        _, dtype, shape = arrays[i]
        positions[i] = end
        end += prod(shape) * dtype.itemsize
    return positions


def _shape_of_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """The shape of the bytes of an array: an element that has several of them is an axis."""
    return shape if dtype.itemsize == 1 else (*shape, dtype.itemsize)


def seal_header(header: bytearray, checksums: Sequence[int]) -> None:
    """Put the checksums into a header, the one of the header itself last.

    Args:
        header: what `new_header` made.
        checksums: of each array.
    """
    begin = _SEAL.stop + len(_BETWEEN)
    digits = "".join(f"{checksum:0{_DIGITS}x}" for checksum in checksums).encode()
    header[begin : begin + len(digits)] = digits
    header[_SEAL] = f"{zlib.crc32(header):0{_DIGITS}x}".encode()


def parse_header(path: str, header: bytes, size: int) -> FileHeader:
    """Read a header, believing nothing.

    Args:
        path: of the file, for the errors.
        header: the bytes before the arrays, the length included.
        size: of the whole file, in bytes.

    Returns:
        What it says, all of it possible.

    Raises:
        FileError: it is damaged, or describes what cannot be.
    """
    is_own = header.startswith(_OPENING, LENGTH)
    if is_own:
        _check_seal(path, header)
    content = _parse_json(path, header[LENGTH:], "a header in JSON")
    metadata = _parse_metadata(path, content.pop(METADATA, {}))
    own = {key: metadata.pop(key) for key in [*metadata] if key.startswith(OWN)}
    if own and not is_own:
        raise _damaged(path, "a header that begins with its checksum", "one that does not")
    checksums: list[int | None] = [None] * len(content)
    records: dict[str, Any] = {}
    if own:
        checksums, records = _parse_own(path, own, len(content))
    entries: dict[str, FileEntry] = {}
    for (name, entry), checksum in zip(content.items(), checksums, strict=True):
        dtype, shape, start, stop = _parse_entry(path, name, entry, records.pop(name, None))
        start, stop = len(header) + start, len(header) + stop
        entries[name] = FileEntry(name, dtype, shape, start, stop, checksum)
    if records:
        raise _damaged(path, "the dtypes of arrays that it holds", "others", places=[*records])
    _check_extent(path, entries, len(header), size)
    return FileHeader(entries, metadata)


def _damaged(path: str, expected: str, got: str, places: Sequence[str] = ()) -> FileError:
    return FileError(explain(path, expected, got, places=[describe(place) for place in places]))


def _check_seal(path: str, header: bytes) -> None:
    unsealed = bytearray(header)
    unsealed[_SEAL] = b"0" * _DIGITS
    if header[_SEAL] != f"{zlib.crc32(unsealed):0{_DIGITS}x}".encode():
        raise _damaged(path, "a header that fits its checksum", "one that was changed or damaged")


def _parse_json(path: str, text: bytes, expected: str) -> dict[str, Any]:
    """An object in JSON, without NaN, and without two values of one name."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            names = [name for name, _ in pairs]
            twice = [name for name in content if names.count(name) > 1]
            raise _damaged(path, "each name once", "one that comes twice", twice)
        return content

    def refuse(constant: str) -> None:
        raise _damaged(path, expected, constant)

    try:
        content = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refuse)
        # What JSON can escape but no text can have: half of a character.
        _as_json(content).encode()
    except FileError:
        raise
    except (ValueError, RecursionError) as error:
        raise _damaged(path, expected, "something else") from error
    if type(content) is not dict:
        raise _damaged(path, expected, f"a {type(content).__name__}")
    return content


def _parse_metadata(path: str, metadata: Any) -> dict[str, str]:
    if type(metadata) is not dict or not all(type(v) is str for v in metadata.values()):
        raise _damaged(path, f"texts by their names as {METADATA}", describe(metadata))
    return metadata


def _parse_own(
    path: str, own: Mapping[str, str], count: int
) -> tuple[list[int | None], dict[str, Any]]:
    """The checksums of the arrays, and the dtypes that the format has no code for."""
    if own.get(_VERSION, "1") != "1":
        raise FileError(
            explain(
                path,
                "a file of version 1",
                f"version {describe(own[_VERSION])}",
                cure=["a newer pytreemod has written it:", "pip install --upgrade pytreemod"],
            )
        )
    if {*own} != {_HEADER, _ARRAYS, _VERSION, _DTYPES}:
        raise _damaged(path, "all keys of this library", "some, or others", [*own])
    digits = own[_ARRAYS]
    if not re.fullmatch(rf"([0-9a-f]{{{_DIGITS}}}){{{count}}}", digits):
        raise _damaged(path, f"{count} checksums of arrays", describe(digits))
    checksums = [int(digits[i : i + _DIGITS], 16) for i in range(0, len(digits), _DIGITS)]
    return [*checksums], _parse_json(path, own[_DTYPES].encode(), "a record of dtypes in JSON")


def _parse_entry(
    path: str, name: str, entry: Any, record: Any
) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """Dtype, shape, and where in the data it begins and ends."""
    if type(entry) is not dict or {*entry} != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, "dtype, shape and data_offsets", describe(entry), [name])
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = dtype_of(code) if type(code) is str else None
    if dtype is None:
        raise _damaged(path, "the code of a dtype, such as F32", describe(code), [name])
    if not _are_counts(shape) or len(shape) > _MOST_AXES + 1:
        raise _damaged(path, "a shape", describe(shape), [name])
    if not _are_counts(offsets) or len(offsets) != 2:
        raise _damaged(path, "where it begins and ends", describe(offsets), [name])
    size = offsets[1] - offsets[0]
    if prod(shape) * dtype.itemsize != size:
        asked = f"{code} of shape {tuple(shape)}"
        raise _damaged(path, f"the bytes of {describe(asked)}", f"{size} bytes", [name])
    if record is not None:
        dtype, shape = _recorded(path, name, code, shape, record)
    if len(shape) > _MOST_AXES or prod(max(n, 1) for n in shape) * dtype.itemsize > _MOST_BYTES:
        raise _damaged(path, "a shape that an array can have", describe(shape), [name])
    return dtype, tuple(shape), offsets[0], offsets[1]


def _are_counts(values: Any) -> bool:
    # The type itself, for True is an int as well.
    return type(values) is list and all(type(value) is int and value >= 0 for value in values)


def _recorded(
    path: str, name: str, code: str, shape: list[int], record: Any
) -> tuple[np.dtype[Any], list[int]]:
    """Dtype and shape of an array that was written as bytes."""
    dtype = recorded_dtype(record) if type(record) is str else None
    if dtype is None:
        raise _damaged(path, "a dtype that this JAX has", describe(record), [name])
    inner = shape if dtype.itemsize == 1 else shape[:-1]
    if code != BYTES or [*_shape_of_bytes(tuple(inner), dtype)] != shape:
        raise _damaged(path, f"the bytes of {record}", f"{code} of shape {shape}", [name])
    return dtype, inner


def _check_extent(path: str, entries: Mapping[str, FileEntry], begin: int, size: int) -> None:
    """The arrays lie one after the other, from the header to the end of the file."""
    end = begin
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end:
            how = "after a hole" if entry.start > end else "inside of the one before"
            raise _damaged(path, "arrays without holes between them", f"one {how}", [entry.name])
        end = entry.stop
    if end != size:
        what = "a file that was cut off" if size < end else "more"
        raise _damaged(path, f"{end:,} bytes", f"{size:,}: {what}")
