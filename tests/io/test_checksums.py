"""The checksum of a whole is that of zlib, however it was computed."""

import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytreemod.io import checksums
from pytreemod.io.checksums import by_parts, combined


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_parts_give_the_checksum_of_the_whole(first, second):
    """For all lengths, none included."""
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(
        first + second
    )


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (1 << 21) + 12345])
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_threads_compute_the_checksum_of_the_whole(monkeypatch, size, threads):
    """The parts cover every byte once, whatever the size is a multiple of."""
    monkeypatch.setattr(checksums, "THREADS", threads)
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    parts = []

    def checksum_of(start, stop):
        parts.append((start, stop))
        return zlib.crc32(data[start:stop])

    with ThreadPoolExecutor(threads) as pool:
        assert by_parts(pool, checksum_of, size)() == zlib.crc32(data)
    parts.sort()
    assert [start for start, _ in parts] == [0, *[stop for _, stop in parts[:-1]]]
    assert parts[-1][1] == size
    assert len(parts) == (1 if size < 1 << 20 else threads)


def test_what_fails_in_a_thread_fails():
    """An error of one part is the error of all."""

    def checksum_of(start, stop):
        if stop == 1 << 21:
            raise OSError("the last part")
        return 0

    with ThreadPoolExecutor(2) as pool, pytest.raises(OSError, match="the last part"):
        by_parts(pool, checksum_of, 1 << 21)()
