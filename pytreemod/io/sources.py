"""Reads the sources of the numbers of a leaf: arrays, stacked, joined, cut and converted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
"""A part of another source."""


class SourceReader:
    """Reads sources.

    Args:
        read_array: returns a complete array, by its name.
        read_part: returns a part of an array, by its name. If None, the array is read, and cached
            for the next part: request the parts of one array in sequence.

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
        self._groups: dict[int, list[Stacked]] = {}
        self._ready: dict[int, Any] = {}

    def expect(self, sources: Sequence[Source | None]) -> None:
        """Announce the sources that will be read.

        Stacks of parts of the same arrays, such as the thirds of packed matrices, are then read in
        one pass, and at most one such array is in memory.

        Args:
            sources: the sources of leaves.
        """
        # (Without a call for each.)
        if Stacked not in map(type, sources):
            return
        groups: dict[tuple[str, int], list[Stacked]] = {}
        for source in sources:
            if isinstance(source, Stacked) and _is_cut(source.parts[0]):
                groups.setdefault((first_name(source), len(source.parts)), []).append(source)
        self._groups = {id(source): group for group in groups.values() for source in group}

    def __call__(self, source: Source) -> Any:
        """Return the array of a source; only `read_part` may share its memory.

        Args:
            source: the source of a leaf.
        """
        wholes = self._wholes
        if wholes and first_name(source) != first_name(next(iter(wholes))):
            wholes.clear()
        if isinstance(source, str):
            return self._read_array(source)
        if id(source) in self._groups:
            if id(source) not in self._ready:
                group = self._groups[id(source)]
                self._ready.update(zip(map(id, group), self._stacked(group), strict=True))
            return self._ready.pop(id(source))
        return self._read(source)

    def _read(self, source: Source) -> Any:
        if isinstance(source, str):
            return self._read_array(source)
        if isinstance(source, Stacked):
            return self._stacked([source])[0]
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
        # A copy, because a view would keep the complete array alive.
        return np.array(part_of(self._wholes[source.whole], source))

    def _stacked(self, sources: Sequence[Stacked]) -> list[Any]:
        """Read stacks with as many parts: the first of each, then the second, and so on."""
        made: list[Any] = []
        for i in range(len(sources[0].parts)):
            for j, (parts, axis) in enumerate(sources):
                part: Any = self(parts[i])
                if not i:
                    shape = (*part.shape[:axis], len(parts), *part.shape[axis:])
                    made.append(np.empty(shape, part.dtype))
                made[j][(*[slice(None)] * axis, i)] = part
        return made


def _is_cut(source: Source | None) -> bool:
    while isinstance(source, Converted):
        source = source.value
    return isinstance(source, Sliced)


def part_of(whole: Any, source: PartSource) -> Any:
    """Return the part of an array that a source describes.

    Args:
        whole: the array.
        source: describes the part.

    Examples:
        >>> part_of(np.arange(4).reshape(2, 2), Unstacked("whole", 1, 0, 2))
        array([0, 2])
    """
    is_one = isinstance(source, Unstacked)
    place = source.at if is_one else slice(source.start, source.stop)
    return whole[(*[slice(None)] * source.axis, place)]
