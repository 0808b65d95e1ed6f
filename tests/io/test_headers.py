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
    check_length,
    new_header,
    parse_header,
    seal_header,
)

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


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "an empty file"),
        (b"{}", "something else, or a part of one"),
        (
            b"PK\x03\x04" + bytes(100),
            r"a zip archive, such as PyTorch and NumPy write\.\n.*:\n +pm\.from_torch",
        ),
        (b"\x80\x05\x95" + bytes(100), "a pickle"),
        (b"\x93NUMPY" + bytes(100), r"a file of NumPy's, .*\n.*\n +pm\.tree_deser"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "a file in the format HDF5"),
        (b"just a text, and no model at all", "something else"),
        (bytes(8), "something else"),
        (bytes(100), "something else"),
        (b"\xff" * 100, "something else"),
        ((200_000_000).to_bytes(8, "little") + b"{}", "something else"),
        ((2).to_bytes(8, "little") + b"[]", "something else"),
        ((2).to_bytes(8, "little") + b" {}", "something else"),
        ((3).to_bytes(8, "little") + b"{}", "something else, or a part of one"),
    ],
)
def test_what_is_no_such_file_is_told_by_its_first_bytes(content, kind):
    """Before there is memory for any header."""
    text = f"my.file: expected a file in the format of safetensors, got {kind}"
    with pytest.raises(FileError, match=text):
        check_length("my.file", content[:9], len(content))


def test_a_header_is_no_longer_than_safetensors_allows():
    """Though the file might be that long."""
    head = (100_000_001).to_bytes(8, "little") + b"{"
    with pytest.raises(FileError, match="in the format of safetensors"):
        check_length("my.file", head, 10**9)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}}",
        '{"a"}',
        "{'a': 1}",
        '{"a": NaN}',
        '{"a": Infinity}',
        '{"a": 1} {"b": 2}',
        b'{"\xff": 1}',
        '{"a\n": 1}',
        '{"\\ud800": {}}',
        '{"__metadata__": {"a": "\\udc00"}}',
        '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"a": ' * 100_000 + "1" + "}" * 100_000,
        '{"a": ' + "1" * 5000 + "}",
    ],
)
def test_what_is_no_json_is_refused(text):
    """Nor is what Python alone takes for JSON, or what no stack is deep enough for."""
    with pytest.raises(FileError, match=r"my\.file: expected a header in JSON, got"):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"w": {}, "w": {}}',
        '{"w": {"dtype": "F32", "dtype": "I32", "shape": [], "data_offsets": [0, 4]}}',
        '{"__metadata__": {"w": "1", "w": "2"}}',
        '{"__metadata__": {}, "__metadata__": {"w": "2"}}',
    ],
)
def test_a_name_comes_once(text):
    """Or two readers would read two things."""
    with pytest.raises(FileError, match=r"my.file: expected each name once, got one that.*\n  at "):
        parse(text, data=4)


@pytest.mark.parametrize("metadata", [None, [], 1, {"a": 1}, {"a": None}, {"a": {"b": "c"}}])
def test_metadata_are_texts(metadata):
    """As the format says."""
    with pytest.raises(FileError, match="expected texts by their names as __metadata__"):
        parse({METADATA: metadata})


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (None, "dtype, shape and data_offsets, got None"),
        ([], r"dtype, shape and data_offsets, got \[\]"),
        ({"dtype": "F32", "shape": [2]}, "dtype, shape and data_offsets"),
        ({**entry(), "strides": [1]}, "dtype, shape and data_offsets"),
        (entry("float32"), "the code of a dtype, such as F32, got 'float32'"),
        (entry("f32"), "the code of a dtype"),
        (entry(["F32"]), "the code of a dtype"),
        (entry(None), "the code of a dtype"),
        (entry("F4"), "the code of a dtype"),
        (entry(shape=2), "a shape, got 2"),
        (entry(shape="2"), "a shape, got '2'"),
        (entry(shape=[-2]), "a shape"),
        (entry(shape=[-1, -2]), "a shape"),
        (entry(shape=[2.0]), "a shape"),
        (entry(shape=[True, 2]), "a shape"),
        (entry(shape=[[2]]), "a shape"),
        (entry(shape=[2**64, 0]), "a shape"),
        (entry(shape=[10**4000, 0]), "a shape"),
        (entry(shape=[1] * 66 + [2]), "a shape, got"),
        (entry(shape=[1] * 64 + [2]), "a shape that an array can have"),
        (entry(shape=[2**40, 2**40, 0], offsets=[0, 0]), "a shape that an array can have"),
        (entry(offsets=[0]), "where it begins and ends"),
        (entry(offsets=[0, 8, 16]), "where it begins and ends"),
        (entry(offsets=[-8, 0]), "where it begins and ends"),
        (entry(offsets=[0.0, 8.0]), "where it begins and ends"),
        (entry(offsets=[False, 8]), "where it begins and ends"),
        (entry(offsets=[0, 10**4000]), "where it begins and ends"),
        (entry(offsets=[8, 0]), r"the bytes of F32 of shape \[2\], got -8"),
        (entry(offsets=[0, 9]), r"the bytes of F32 of shape \[2\], got 9"),
        (entry(shape=[2**62, 4]), "the bytes of F32"),
        (entry(shape=[2**63 - 1] * 64), "the bytes of F32"),
        (entry(shape=[3]), "the bytes of F32"),
        (entry(shape=[]), "the bytes of F32"),
        (entry(offsets=[8, 16]), "arrays that follow each other, got a hole before one"),
    ],
)
def test_an_array_that_cannot_be_is_named(wrong, expected):
    """Its name, what it should be, and what it is."""
    with pytest.raises(FileError, match=rf"^my.file: expected {expected}[^\n]*\n  at layers.w$"):
        parse({"layers.w": wrong}, data=8)


@pytest.mark.parametrize(
    ("second", "data", "problem"),
    [
        (entry(offsets=(4, 12)), 12, "arrays that follow each other, got one inside of another"),
        (entry(offsets=(0, 8)), 8, "arrays that follow each other, got one inside of another"),
        (entry(offsets=(12, 20)), 20, "arrays that follow each other, got a hole before one"),
        (entry(offsets=(8, 16)), 15, r"a file of \d+ bytes, got \d+: a part of it"),
        (entry(offsets=(8, 16)), 17, r"a file of \d+ bytes, got \d+: and more behind it"),
    ],
)
def test_arrays_fill_the_file_one_after_the_other(second, data, problem):
    """No byte belongs to two arrays, or to none."""
    with pytest.raises(FileError, match=f"my.file: expected {problem}"):
        parse({"a": entry(), "b": second}, data=data)


def test_names_that_could_do_harm_are_shown_as_texts():
    """They are never anything but names."""
    entries, _ = parse({"../../etc/passwd": entry()}, data=8)
    assert [*entries] == ["../../etc/passwd"]
    with pytest.raises(FileError, match=r"  at '\\x1b\[2Jw\\n'$"):
        parse({"\x1b[2Jw\n": entry("F5")}, data=8)
    with pytest.raises(FileError, match=r"  at 'a{50,60}\.\.\.$"):
        parse({"a" * 100_000: entry("F5")}, data=8)


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


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (own_key("version", "2"), "a file of version 1, got version '2'"),
        (without("version"), "checksums in the order in which pytreemod writes them"),
        (without("dtypes"), "checksums in the order"),
        (without("array-checksums"), "checksums in the order"),
        (without("header-crc32"), "checksums in the order"),
        (own_key("more", "1"), "checksums in the order"),
        (own_key("array-checksums", ""), "2 checksums of arrays"),
        (own_key("array-checksums", "0" * 15), "2 checksums of arrays"),
        (own_key("array-checksums", "0x00_00 +00000-0"), "2 checksums of arrays"),
        (own_key("array-checksums", "0" * 24), "2 checksums of arrays"),
        (own_key("dtypes", "[]"), "a record of dtypes in JSON"),
        (own_key("dtypes", "{"), "a record of dtypes in JSON"),
        (own_key("dtypes", '{"c":"complex128","c":"int4"}'), "each name once"),
        (own_key("dtypes", '{"d":"complex128"}'), "dtypes of arrays that it holds"),
        (own_key("dtypes", '{"c":"float32"}'), "a dtype that this JAX has, got 'float32'"),
        (own_key("dtypes", '{"c":"object"}'), "a dtype that this JAX has, got 'object'"),
        (own_key("dtypes", '{"c":1}'), "a dtype that this JAX has, got 1"),
        (own_key("dtypes", '{"w":"complex128"}'), "bytes of complex128, got F32"),
        (own_key("dtypes", '{"w":"int4"}'), "bytes of int4, got F32"),
    ],
)
def test_our_own_keys_are_checked_like_all_others(change, problem):
    """Who changes a file may compute a checksum, too."""
    with pytest.raises(FileError, match=f"my.file: expected {problem}"):
        reparse(change)


def test_bytes_of_a_dtype_without_a_code_may_be_read_as_bytes():
    """Without its record an array is what it is for other tools."""
    entries, _ = reparse(own_key("dtypes", "{}"))

    assert (entries["c"].dtype, entries["c"].shape) == (np.dtype("uint8"), (1, 16))


def test_who_rewrites_a_file_and_keeps_its_metadata_is_told():
    """The checksums are no longer those of what is in it; the text says what to leave out."""
    header, size = sealed()
    content = json.loads(header[LENGTH:])
    content[METADATA] = dict(reversed(content[METADATA].items()))
    text = header_of(json.dumps(content))

    with pytest.raises(FileError, match=r"metadata\.items\(\) if not k\.startswith\('pytreemod\."):
        parse_header("my.file", text, len(text) + size - len(header))


def test_many_doubled_names_are_found_at_once():
    """Not by comparing each with all others."""
    text = "{" + ",".join([f'"a":1,"b{i}":1' for i in range(20_000)]) + "}"
    with pytest.raises(FileError, match=r"each name once, got one that comes twice.\n  at a$"):
        parse(text)


def test_a_large_header_is_read_as_fast_as_it_is_written():
    """Ten thousand arrays; deep recursion is not needed for it."""
    arrays = [(f"layers[{i}].weight", F32, (1,)) for i in range(10_000)]
    limit = sys.getrecursionlimit()
    header, size = sealed(arrays)

    entries, _ = parse_header("my.file", header, size)

    assert len(entries) == 10_000
    assert sys.getrecursionlimit() == limit
