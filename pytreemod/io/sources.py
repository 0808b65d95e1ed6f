"""Reads what the numbers of a leaf are made of: arrays, stacked, joined, cut and converted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

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

PartSource: TypeAlias = Unstacked | Sliced
"""What is a part of another source."""


class SourceReader:
    """Reads sources.

    Args:
        read_array: gives a whole array, by its name.
        read_part: gives a part of an array, by its name. If None, the array is read, and stays for
            the next part: parts of one array are to be asked for one after the other.

    Examples:
        >>> read = SourceReader({"whole": np.arange(4)}.__getitem__)
        >>> read(Stacked((Sliced("whole", 0, 2, 4), Sliced("whole", 0, 0, 2)), 0))
        array([[2, 3],
               [0, 1]])
    """

    def __init__(
        self,
        read_array: Callable[[str], Any],
        read_part: Callable[[str, PartSource], Any] | None = None,
    ):
        self._read_array, self._read_part = read_array, read_part
        self._wholes: dict[Source, Any] = {}

    def __call__(self, source: Source) -> Any:
        """The array that a source is; nothing else has its memory, unless `read_part` has.

        Args:
            source: of a leaf.
        """
        wholes = self._wholes
        if wholes and first_name(source) != first_name(next(iter(wholes))):
            wholes.clear()
        return self._read_array(source) if isinstance(source, str) else self._read(source)

    def _read(self, source: Source) -> Any:
        if isinstance(source, str):
            return self._read_array(source)
        if isinstance(source, Stacked):
            return self._stacked(source)
        if isinstance(source, Joined):
            return np.concatenate([self._read(part) for part in source.parts], source.axis)
        if isinstance(source, Converted):
            return source.make(None if source.value is None else self._read(source.value))
        if self._read_part is not None:
            whole = source.whole
            is_array = isinstance(whole, str)
            return (
                self._read_part(whole, source) if is_array else part_of(self._read(whole), source)
            )
        if source.whole not in self._wholes:
            self._wholes[source.whole] = self._read(source.whole)
        # A copy, or the whole would stay with each part.
        return np.array(part_of(self._wholes[source.whole], source))

    def _stacked(self, source: Stacked) -> Any:
        parts, axis = source
        first: Any = self._read(parts[0])
        made: Any = np.empty((*first.shape[:axis], len(parts), *first.shape[axis:]), first.dtype)
        for i, part in enumerate(parts):
            made[(*[slice(None)] * axis, i)] = self._read(part) if i else first
        return made


def part_of(whole: Any, source: PartSource) -> Any:
    """What a source takes of a whole.

    Args:
        whole: the array.
        source: says which part.

    Examples:
        >>> part_of(np.arange(4).reshape(2, 2), Unstacked("whole", 1, 0))
        array([0, 2])
    """
    is_one = isinstance(source, Unstacked)
    place = source.at if is_one else slice(source.start, source.stop)
    return whole[(*[slice(None)] * source.axis, place)]
