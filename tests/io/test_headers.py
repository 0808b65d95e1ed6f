"""A header is believed only where it can be true."""

import contextlib
import tempfile
from pathlib import Path

import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import FileError
from tests.io.files import METADATA, OWN, write_changed, write_plain

TWO = {"w": np.arange(2, dtype=np.float32), "c": np.array([1j])}


def opened(content):
    """The result of reading a file of these bytes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("my.file").write_bytes(content)
        return pm.load("my.file")


def parse(header, data=0):
    """The result of reading a file with a header that no library of ours has written."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_plain(Path("my.file"), header, bytes(data))
        return pm.load("my.file")


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    """One array in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def reparse(change):
    """The result of reading a file of ours with a changed header and its checksum."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        pm.save("my.file", TWO)
        write_changed(Path("my.file"), change)
        return pm.load("my.file")


def own_key(key, value):
    """Changes one of our own keys."""

    def change(header):
        header[METADATA][OWN + key] = value

    return change


def without(key):
    """Leaves one of our own keys out."""

    def change(header):
        del header[METADATA][OWN + key]

    return change


def test_a_plain_header_is_read_without_checksums():
    """As other tools write it; it may have neither arrays nor texts."""
    read = parse({METADATA: {"format": "pt"}, "w": entry()}, data=8)

    assert (read["w"].dtype, read["w"].shape) == (np.float32, (2,))
    assert parse("{}") == {}


def test_names_that_could_do_harm_are_shown_as_texts():
    """They are never anything but names."""
    assert [*parse({"../../etc/passwd": entry()}, data=8)] == ["../../etc/passwd"]


HUGE = (2**62, 4)
PLAIN = {
    "a gap": ({"a": entry(), "b": entry(offsets=(12, 20))}, 20),
    "too few bytes": ({"a": entry(), "b": entry(offsets=(8, 16))}, 15),
    "more bytes": ({"a": entry(), "b": entry(offsets=(8, 16))}, 17),
    "another size": ({"a": entry(shape=[3])}, 8),
    "a size that overflows": ({"a": entry(shape=HUGE)}, 8),
    "a negative size": ({"a": entry(shape=[-1, -2])}, 8),
    "an unknown dtype": ({"a": entry("F4")}, 8),
    "no extent": ({"a": {"dtype": "F32", "shape": [2]}}, 8),
    "one name twice": ('{"w": {}, "w": {}}', 4),
    "half a character": ('{"\\ud800": {}}', 0),
    "no JSON": ('{"a": NaN}', 0),
    "a deep one": ('{"a": ' + "[" * 100000 + "]" * 100000 + "}", 0),
}


@pytest.mark.parametrize(("header", "size"), PLAIN.values(), ids=PLAIN)
def test_a_header_that_cannot_be_true_is_refused(header, size):
    """Or other bytes would be read as numbers."""
    with pytest.raises(FileError, match=r"my\.file"):
        parse(header, data=size)


CHANGED = {
    "nothing": (lambda header: None, None),
    "a newer version": (own_key("version", "2"), "version"),
    "no checksums": (without("array-checksums"), "checksums"),
    "too few checksums": (own_key("array-checksums", "0" * 8), "checksums"),
    "a dtype of other bytes": (own_key("dtypes", '{"c":"float32"}'), "c"),
    "objects": (own_key("dtypes", '{"c":"object"}'), "object"),
    "dtypes of other arrays": (own_key("dtypes", '{"d":"complex128"}'), "d"),
}


@pytest.mark.parametrize(("change", "word"), CHANGED.values(), ids=CHANGED)
def test_what_is_ours_in_a_header_is_checked_even_if_its_checksum_is_right(change, word):
    """Anybody can compute one."""
    if word is None:
        assert reparse(change)["w"].tolist() == [0, 1]
    else:
        with pytest.raises(FileError, match=word):
            reparse(change)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", bytes(100), b"PK\x03\x04" + bytes(100), b"\xff" * 100, b"just a text, no model"],
)
def test_a_file_of_another_kind_is_refused(content):
    """However it begins."""
    with pytest.raises(FileError, match=r"my\.file"):
        opened(content)
