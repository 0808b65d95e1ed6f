"""CRC-32, part by part.

Owns: how several threads compute one checksum together. It is the one of zlib, zip and PNG: any
tool can compare it.
"""

from __future__ import annotations

import functools as ft
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

THREADS = min(4, os.cpu_count() or 1)
"""What reads at the same time; with more of them, memory is what all wait for."""

_WORTH_A_THREAD = 1 << 20
"""To hand less to another thread takes longer than it saves."""
_GRAIN = 1 << 18
"""Parts are multiples of it, so that few powers of x are ever computed."""

_POLYNOMIAL = 0xEDB88320
"""Of CRC-32, the coefficient of the highest power in the lowest bit, as everywhere below."""
_ONE = 1 << 31


def by_parts(
    pool: ThreadPoolExecutor, checksum_of: Callable[[int, int], int], size: int
) -> Callable[[], int]:
    """Let several threads compute a checksum, each of a part.

    Args:
        pool: the threads.
        checksum_of: computes the checksum from one byte to another.
        size: of all, in bytes.

    Returns:
        What waits for it: called, it gives the checksum of all.
    """
    if size < _WORTH_A_THREAD:
        checksum = checksum_of(0, size)
        return lambda: checksum
    length = size // THREADS // _GRAIN * _GRAIN
    # The odd bytes go to the first part, whose length does not matter.
    starts = [0, *range(size - (THREADS - 1) * length, size, length)]
    parts = zip(starts, [*starts[1:], size], strict=True)
    first, *others = [pool.submit(checksum_of, start, stop) for start, stop in parts]

    def wait() -> int:
        checksum = first.result()
        for other in others:
            checksum = combined(checksum, other.result(), length)
        return checksum

    return wait


def combined(first: int, second: int, length: int) -> int:
    """The checksum of two parts that follow each other.

    Args:
        first: the checksum of the first part.
        second: the checksum of the second part.
        length: of the second part, in bytes.

    Returns:
        The checksum of both together.

    Examples:
        >>> import zlib
        >>> parts = zlib.crc32(b"a model "), zlib.crc32(b"is a value")
        >>> combined(*parts, length=10) == zlib.crc32(b"a model is a value")
        True
    """
    # A checksum is a remainder of polynomials over two elements. What stands before another part
    # is multiplied by the power of x that has as many bits as that part.
    for bit in range(length.bit_length()):
        if length >> bit & 1:
            first = _product(first, _power(bit))
    return first ^ second


@ft.cache
def _power(bit: int) -> int:
    """What so many bytes multiply by: two to the power of `bit`."""
    return _ONE >> 8 if bit == 0 else _product(_power(bit - 1), _power(bit - 1))


def _product(a: int, b: int) -> int:
    """What remains of the product of two polynomials."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
