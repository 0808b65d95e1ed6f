"""Reads what the numbers of a leaf are made of: arrays, stacked, joined, cut and converted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pytreemod.io.tables import (
    Converted,
    Joined,
    Sliced,
    Source,
    Stacked,
    Unstacked,
    first_name,
)


def reader_of(read_array: Callable[[str], Any]) -> Callable[[Source], Any]:
    """What reads an array. Of one that is taken apart, the whole is kept for the next part.

    Args:
        read_array: reads a whole array, by its name in the file.

    Returns:
        A function from a source to an array of its own.

    Examples:
        >>> from pytreemod.io.tables import Sliced
        >>> read = reader_of({"whole": np.arange(4)}.__getitem__)
        >>> read(Stacked((Sliced("whole", 0, 2, 4), Sliced("whole", 0, 0, 2)), 0))
        array([[2, 3],
               [0, 1]])
    """
    kept: dict[Source, Any] = {}

    def read_part(source: Source) -> Any:
        if isinstance(source, str):
            return read_array(source)
        if isinstance(source, Stacked):
            return _stacked(read_part, source)
        if isinstance(source, Joined):
            return np.concatenate([read_part(part) for part in source.parts], source.axis)
        if isinstance(source, Converted):
            return source.make(None if source.value is None else read_part(source.value))
        if source.whole not in kept:
            kept[source.whole] = read_part(source.whole)
        # A copy, or the whole would stay with each part.
        return np.array(part_of(kept[source.whole], source))

    def read(source: Source) -> Any:
        if kept and first_name(source) != first_name(next(iter(kept))):
            kept.clear()
        return read_array(source) if isinstance(source, str) else read_part(source)

    return read


def part_of(whole: Any, source: Unstacked | Sliced) -> Any:
    """What is taken of a whole.

    Args:
        whole: the array.
        source: says which part.
    """
    is_one = isinstance(source, Unstacked)
    place = source.at if is_one else slice(source.start, source.stop)
    return whole[(*[slice(None)] * source.axis, place)]


def _stacked(read: Callable[[Source], Any], source: Stacked) -> Any:
    parts, axis = source
    first: Any = read(parts[0])
    made: Any = np.empty((*first.shape[:axis], len(parts), *first.shape[axis:]), first.dtype)
    for i, part in enumerate(parts):
        made[(*[slice(None)] * axis, i)] = read(part) if i else first
    return made
