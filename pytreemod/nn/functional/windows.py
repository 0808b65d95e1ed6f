"""Windows over spatial axes: padding, extent, and number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from jax import lax

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.field_kinds import as_integer, as_sequence, check_choice

Padding: TypeAlias = str | int | Sequence[int] | Sequence[tuple[int, int]]
"""`"SAME"`, `"SAME_LOWER"`, `"VALID"`, one amount, one per axis, or (low, high) per axis."""

Pads: TypeAlias = tuple[tuple[int, int], ...]
"""The padding below and above each spatial axis."""

NAMED_PADDINGS = ("SAME", "SAME_LOWER", "VALID")


def check_padding(where: str, padding: Any, dims: int, *, words: bool) -> str | Pads:
    """Accept every way to write a padding.

    Args:
        where: names the argument in the error.
        padding: the user's value.
        dims: number of spatial axes.
        words: whether `"SAME"`, `"SAME_LOWER"` and `"VALID"` are accepted.

    Returns:
        One of the words in upper case, or (low, high) for each axis.

    Raises:
        ArgumentError: if none of these, or a negative amount.

    Examples:
        >>> check_padding("Conv2d(padding)", (1, 2), 2, words=True)
        ((1, 1), (2, 2))
    """
    if words and isinstance(padding, str):
        return check_choice(where, padding, NAMED_PADDINGS)
    pads = _pads(padding, dims)
    if pads is None:
        expected = f"an integer >= 0, {dims} of them, or {dims} pairs (low, high)"
        raise ArgumentError(where, expected, describe(padding))
    return pads


def _pads(padding: Any, dims: int) -> Pads | None:
    """Return (low, high) for each axis, or None if `padding` is invalid."""
    amounts = as_sequence([padding] * dims if as_integer(padding) is not None else padding)
    if amounts is None or len(amounts) != dims:
        return None
    pairs: list[tuple[int, int]] = []
    for amount in amounts:
        pair = as_sequence(amount) or (amount, amount)
        low, high = map(as_integer, pair) if len(pair) == 2 else (None, None)
        # JAX would cut off a negative amount; here it is more likely a mistake.
        if low is None or high is None or low < 0 or high < 0:
            return None
        pairs.append((low, high))
    return tuple(pairs)


def extents(kernel_size: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """Return how many positions a dilated kernel spans on each axis.

    Args:
        kernel_size: taps on each axis.
        dilation: distance between taps on each axis.

    Returns:
        One int for each axis.

    Examples:
        >>> extents((3, 3), (1, 2))
        (3, 5)
    """
    return tuple((k - 1) * d + 1 for k, d in zip(kernel_size, dilation, strict=True))


def resolve_padding(
    padding: str | Pads, spatial: Sequence[int], window: Sequence[int], stride: Sequence[int]
) -> Pads:
    """Return the amounts of `"SAME"`, `"SAME_LOWER"` and `"VALID"` for the given sizes.

    Args:
        padding: one of these words, or (low, high) for each axis.
        spatial: sizes of the spatial axes.
        window: extent of the window on each axis, dilation included.
        stride: step on each axis.

    Returns:
        (low, high) for each axis.

    Examples:
        >>> resolve_padding("SAME", (5, 5), (3, 2), (1, 1))
        ((1, 1), (0, 1))
    """
    if not isinstance(padding, str):
        return padding
    # By JAX's own rule, so that a word means the same as in `lax`.
    return tuple((low, high) for low, high in lax.padtype_to_pads(spatial, window, stride, padding))


def cover(pads: Pads, spatial: Sequence[int], window: Sequence[int], stride: Sequence[int]) -> Pads:
    """Enlarge the padding at the end, so that the last, overhanging window counts, too.

    A window that would start beyond the input and its lower padding does not count.

    Args:
        pads: (low, high) for each axis.
        spatial: sizes of the spatial axes.
        window: extent of the window on each axis.
        stride: step on each axis.

    Returns:
        (low, high) for each axis.

    Examples:
        >>> cover(((0, 0),), (7,), (2,), (2,))
        ((0, 1),)

    Source:
        PyTorch's rule for `ceil_mode`.
    """
    grown: list[tuple[int, int]] = []
    for (low, high), size, extent, step in zip(pads, spatial, window, stride, strict=True):
        total = low + size + high
        last_start = -(-(total - extent) // step) * step
        # Such a window has only padding: its maximum would be -inf.
        if last_start >= low + size:
            last_start -= step
        grown.append((low, high + max(last_start + extent - total, 0)))
    return tuple(grown)
