"""The checksum of a file never changes, and damage of a file changes it."""

import random
import struct
import zlib

import numpy as np
import pytest

import pytreemod as pm
from tests.io.files import METADATA, OWN, header_of

ROW = 8192
BLOCK = 1 << 20


@pytest.fixture
def checksum(tmp_path):
    """Of bytes, as the header of their file has it."""

    def checksum_in_file(data):
        pm.save(tmp_path / "f", {"x": np.frombuffer(data, np.uint8)})
        return int(header_of(tmp_path / "f")[METADATA][f"{OWN}array-checksums"], 16)

    return checksum_in_file


def written_out(data):
    """The same in plain Python, as the documentation says it."""
    value = 0
    for start in range(0, len(data), BLOCK):
        block = data[start : start + BLOCK]
        count = len(block) // ROW
        rows = [struct.unpack_from("<1024Q", block, i * ROW) for i in range(count)]
        sums = [sum(column) for column in zip(*rows)] + [sum(row) for row in rows]
        for total in sums:
            value = zlib.crc32(struct.pack("<Q", total % 2**64), value)
        value = zlib.crc32(block[count * ROW :], value)
    return value


SIZES = [0, 1, 9, ROW - 1, ROW, ROW + 1, 5 * ROW + 13, BLOCK, BLOCK + ROW + 5]


@pytest.mark.parametrize("size", SIZES)
def test_it_is_what_the_documentation_says(checksum, size):
    """Whatever the size is a multiple of."""
    data = random.Random(size).randbytes(size)

    assert checksum(data) == written_out(data)


def test_it_never_changes(checksum):
    """Files last longer than versions of this library."""
    data = (np.arange(400_000, dtype="<u4") * 2_654_435_761).tobytes()

    assert checksum(data) == 0xD5168E96
    assert checksum(b"123456789") == 0xCBF43926


def changed(data, rng):
    """Damage by disks, cables and programs."""
    data = bytearray(data)
    i, j = rng.sample(range(len(data) - 4096), 2)
    size = rng.choice([1, 8, 512, 4096])
    kind = rng.randrange(5)
    if kind == 0:
        data[i] ^= 1 << rng.randrange(8)
    elif kind == 1:
        for position in (i, j):
            data[position] ^= 1 << (i % 8)
    elif kind == 2:
        data[i : i + size] = bytes(size)
    elif kind == 3:
        i, j = i // 4096 * 4096, (j // 4096 * 4096 + 4096 * (i // 4096 == j // 4096)) % len(data)
        data[i : i + size], data[j : j + size] = data[j : j + size], data[i : i + size]
    else:
        data[i : i + size + 1] = data[i + 1 : i + size + 1] + data[i : i + 1]
    return bytes(data)


def test_damage_is_noticed(checksum):
    """Flipped bits, also in the same position of two words; holes, swapped pages, shifted bytes."""
    rng = random.Random(0)
    data = rng.randbytes(40 * ROW + 100)
    right = checksum(data)
    for _ in range(100):
        wrong = changed(data, rng)
        assert wrong == data or checksum(wrong) != right


@pytest.mark.parametrize("distance", [1, 1024, 1024 * 7, 1025])
def test_words_that_cancel_are_noticed(checksum, distance):
    """In a row, in a column, or in neither, one word grows as much as another shrinks."""
    words = np.arange(1024 * 16, dtype="<u8")
    right = checksum(words.tobytes())
    words[5] += 1
    words[5 + distance] -= 1

    assert checksum(words.tobytes()) != right


def test_blocks_that_have_changed_places_are_noticed(checksum):
    """The checksum depends on the position of each."""
    data = random.Random(0).randbytes(2 * BLOCK)

    assert checksum(data) != checksum(data[BLOCK:] + data[:BLOCK])
