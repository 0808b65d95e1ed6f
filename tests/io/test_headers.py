"""A header is believed only where it can be true."""

import contextlib
import tempfile
from pathlib import Path

import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import FileError
from tests.goldens import refusals
from tests.io.files import METADATA, OWN, header_of, write_changed, write_plain

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


def others(header):
    """As another tool writes the file again: with our own keys last."""
    own = {key: header[METADATA].pop(key) for key in [*header[METADATA]] if key.startswith(OWN)}
    header[METADATA] |= own


def test_a_header_may_be_changed_with_its_checksum():
    """Or else the cases here would show nothing."""
    assert reparse(lambda header: None)["w"].tolist() == [0, 1]
    with pytest.raises(FileError, match="in pytreemod's order, got a changed header"):
        reparse(others)


def test_a_plain_header_is_read_without_checksums():
    """As other tools write it; it may have neither arrays nor texts."""
    read = parse({METADATA: {"format": "pt"}, "w": entry()}, data=8)

    assert (read["w"].dtype, read["w"].shape) == (np.float32, (2,))
    assert parse("{}") == {}


def test_names_that_could_do_harm_are_shown_as_texts():
    """They are never anything but names."""
    assert [*parse({"../../etc/passwd": entry()}, data=8)] == ["../../etc/passwd"]


def test_every_flipped_bit_of_a_header_is_noticed(tmp_path):
    """In the length, in a key, in a name, in a checksum, in the padding."""
    path = tmp_path / "my.file"
    pm.save(path, TWO)
    content = path.read_bytes()
    for position in range(8 + int.from_bytes(content[:8], "little")):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position * 5 % 8
        path.write_bytes(flipped)
        with pytest.raises(FileError, match=r"my\.file: expected"):
            pm.load(path)


def test_bytes_of_a_dtype_without_a_code_may_be_read_as_bytes(tmp_path):
    """Without its record an array is the same as for other tools."""
    pm.save(tmp_path / "f", TWO)
    write_changed(tmp_path / "f", own_key("dtypes", "{}"))
    like = {"w": TWO["w"], "c": np.zeros((1, 16), np.uint8)}

    assert pm.load(tmp_path / "f", like)["c"].tobytes() == TWO["c"].tobytes()


def test_a_large_header_is_read_as_fast_as_it_is_written(tmp_path):
    """Ten thousand arrays; it needs no deep recursion."""
    pm.save(tmp_path / "f", [np.ones(1, np.float32)] * 10_000)

    assert len(header_of(tmp_path / "f")) == 10_001
    assert len(pm.load(tmp_path / "f")) == 10_000


test_refusals = refusals(globals())
