"""A header is believed only where it can be true."""

import json
import sys

import numpy as np
import pytest

from pytreemod.errors import FileError
from pytreemod.io.headers import (
    ALIGNMENT,
    LENGTH,
    METADATA,
    OWN,
    new_header,
    parse_header,
    seal_header,
)
from tests.goldens import refusals

F32, I8, C128 = np.dtype("float32"), np.dtype("int8"), np.dtype("complex128")
TWO = (("w", F32, (2,)), ("c", C128, (1,)))


def header_of(text):
    """The bytes before the arrays."""
    text = text if isinstance(text, bytes) else text.encode()
    return len(text).to_bytes(LENGTH, "little") + text


def parse(content, data=0):
    """What a header says that no library of ours has written."""
    header = header_of(content if isinstance(content, str | bytes) else json.dumps(content))
    return parse_header("my.file", header, len(header) + data)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    """One array, as a header tells it."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def sealed(arrays=TWO, metadata=None):
    """A header of ours, and the size of its file."""
    header, places = new_header([*arrays], metadata or {"author": "me"})
    seal_header(header, range(len(places)))
    return bytes(header), max(stop for _, stop in places)


def test_a_header_comes_back():
    """Names, dtypes and shapes in the order in which they were given; the texts, and nothing of
    what the library itself keeps there."""
    arrays = [("b", I8, (3,)), ("a", F32, ()), ("", C128, (2, 0)), ("x", F32, (4,))]
    header, places = new_header(arrays, {"ключ": "значение"})
    seal_header(header, [1, 2, 3, 2**32 - 1])

    entries, metadata = parse_header("my.file", bytes(header), max(stop for _, stop in places))

    assert [(e.name, e.dtype, e.shape) for e in entries.values()] == arrays
    assert [*entries] == [name for name, _, _ in arrays]
    assert [(e.start, e.stop) for e in entries.values()] == places
    assert [e.checksum for e in entries.values()] == [1, 2, 3, 2**32 - 1]
    assert metadata == {"ключ": "значение"}


def test_arrays_lie_at_addresses_that_fit_their_elements():
    """The data begins at a multiple of 64, and no array of small elements is before one of large
    ones."""
    dtypes = [np.dtype(d) for d in ("int8", "float64", "bool", "float16", "complex128", "int32")]
    _, places = new_header([(d.name, d, (3,)) for d in dtypes], {})

    assert min(places)[0] % ALIGNMENT == 0
    assert all(start % d.itemsize == 0 for (start, _), d in zip(places, dtypes))


def test_a_plain_header_comes_back_without_checksums():
    """As other tools write it."""
    entries, metadata = parse({METADATA: {"format": "pt"}, "w": entry()}, data=8)

    assert metadata == {"format": "pt"}
    assert entries["w"][1:3] == (F32, (2,))
    assert entries["w"].checksum is None


def test_a_file_may_hold_nothing():
    """Neither arrays nor texts."""
    header, _ = new_header([], {})
    seal_header(header, [])

    assert parse("{}") == ({}, {})
    assert parse_header("my.file", bytes(header), len(header)) == ({}, {})


def test_names_that_could_do_harm_are_shown_as_texts():
    """They are never anything but names."""
    entries, _ = parse({"../../etc/passwd": entry()}, data=8)
    assert [*entries] == ["../../etc/passwd"]


def test_every_flipped_bit_of_a_header_is_noticed():
    """In the length, in a key, in a name, in a checksum, in the padding."""
    header, size = sealed()
    for position in range(len(header)):
        for bit in range(8):
            flipped = bytearray(header)
            flipped[position] ^= 1 << bit
            with pytest.raises(FileError, match=r"my\.file: expected"):
                parse_header("my.file", bytes(flipped), size)


def reparse(change, arrays=TWO):
    """A header of ours in which somebody has changed something, and the checksum with it."""
    header, size = sealed(arrays)
    content = json.loads(header[LENGTH:])
    change(content)
    has_seal = f"{OWN}header-crc32" in content[METADATA]
    if has_seal:
        content[METADATA][f"{OWN}header-crc32"] = "0" * 8
    text = bytearray(header_of(json.dumps(content, separators=(",", ":"), ensure_ascii=False)))
    if has_seal:
        seal_header(text, [])
    return parse_header("my.file", bytes(text), len(text) + size - len(header))


def own_key(key, value):
    """Changes one of our own keys."""

    def change(content):
        content[METADATA][OWN + key] = value

    return change


def without(key):
    """Leaves one of our own keys out."""

    def change(content):
        del content[METADATA][OWN + key]

    return change


def test_bytes_of_a_dtype_without_a_code_may_be_read_as_bytes():
    """Without its record an array is what it is for other tools."""
    entries, _ = reparse(own_key("dtypes", "{}"))

    assert (entries["c"].dtype, entries["c"].shape) == (np.dtype("uint8"), (1, 16))


def test_a_large_header_is_read_as_fast_as_it_is_written():
    """Ten thousand arrays; deep recursion is not needed for it."""
    arrays = [(f"layers[{i}].weight", F32, (1,)) for i in range(10_000)]
    limit = sys.getrecursionlimit()
    header, size = sealed(arrays)

    entries, _ = parse_header("my.file", header, size)

    assert len(entries) == 10_000
    assert sys.getrecursionlimit() == limit


test_refusals = refusals(globals())
