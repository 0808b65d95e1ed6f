"""The checksum of a file is the same for ever, and what damages a file changes it."""

import random
import struct
import zlib

import numpy as np
import pytest

from pytreemod.io.checksums import BLOCK_BYTES, checksum_after

ROW = 8192


def checksum(data):
    """Of all bytes, block by block."""
    value = 0
    for start in range(0, len(data), BLOCK_BYTES):
        value = checksum_after(value, memoryview(data)[start : start + BLOCK_BYTES])
    return value


def written_out(data):
    """The same in plain Python, as the documentation says it."""
    value = 0
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        count = len(block) // ROW
        rows = [struct.unpack_from("<1024Q", block, i * ROW) for i in range(count)]
        sums = [sum(column) for column in zip(*rows)] + [sum(row) for row in rows]
        for total in sums:
            value = zlib.crc32(struct.pack("<Q", total % 2**64), value)
        value = zlib.crc32(block[count * ROW :], value)
    return value


SIZES = [0, 1, 9, ROW - 1, ROW, ROW + 1, 5 * ROW + 13, BLOCK_BYTES, BLOCK_BYTES + ROW + 5]


@pytest.mark.parametrize("size", SIZES)
def test_it_is_what_the_documentation_says(size):
    """Whatever the size is a multiple of."""
    data = random.Random(size).randbytes(size)

    assert checksum(data) == written_out(data)


def test_it_never_changes():
    """Files last longer than versions of this library."""
    data = (np.arange(400_000, dtype="<u4") * 2_654_435_761).tobytes()

    assert checksum(data) == 0xD5168E96
    assert checksum(b"123456789") == 0xCBF43926


def test_it_does_not_matter_where_the_bytes_are_in_memory():
    """An array may begin at any address."""
    data = random.Random(0).randbytes(3 * ROW)

    assert {checksum(memoryview(bytes(i) + data)[i:]) for i in range(8)} == {checksum(data)}


def changed(data, rng):
    """What disks, cables and programs do to a file."""
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


def test_damage_is_noticed():
    """Flipped bits, two of them at the same place of two words, holes, pages that have changed
    places, bytes that have moved."""
    rng = random.Random(0)
    data = rng.randbytes(40 * ROW + 100)
    right = checksum(data)
    for _ in range(300):
        wrong = changed(data, rng)
        assert wrong == data or checksum(wrong) != right


@pytest.mark.parametrize("distance", [1, 1024, 1024 * 7, 1025])
def test_words_that_cancel_are_noticed(distance):
    """In a row, in a column, or in neither, one word grows by what another shrinks by."""
    words = np.arange(1024 * 16, dtype="<u8")
    right = checksum(words.tobytes())
    words[5] += 1
    words[5 + distance] -= 1

    assert checksum(words.tobytes()) != right


def test_blocks_that_have_changed_places_are_noticed():
    """Each has its place in the whole."""
    data = random.Random(0).randbytes(2 * BLOCK_BYTES)

    assert checksum(data) != checksum(data[BLOCK_BYTES:] + data[:BLOCK_BYTES])
