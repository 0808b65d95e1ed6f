"""CRC-32, part by part.

Owns: how the checksum of a whole follows from those of its parts, so that several threads can
compute it together. It is the one of zlib, zip and PNG: any tool can compare it.
"""

from __future__ import annotations

import functools as ft

_POLYNOMIAL = 0xEDB88320
"""Of CRC-32, the coefficient of the highest power in the lowest bit, as everywhere below."""
_ONE = 1 << 31


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
        >>> combined(zlib.crc32(b"a model "), zlib.crc32(b"is a value"), 10) == zlib.crc32(
        ...     b"a model is a value"
        ... )
        True
    """
    # A checksum is a remainder of polynomials over two elements: what stands before another part
    # counts as often as the power that the part's bits raise it to.
    return _product(first, _power(length)) ^ second


@ft.lru_cache(maxsize=64)
def _power(length: int) -> int:
    """Which power of x so many bytes raise to."""
    power, factor = _ONE, 1 << (31 - 8)
    while length:
        if length & 1:
            power = _product(power, factor)
        factor = _product(factor, factor)
        length >>= 1
    return power


def _product(a: int, b: int) -> int:
    """Of two polynomials: what remains of it."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
