"""A State's description of its values: their tokens, and the names of these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pytreemod.tree.paths import PathName


class Row(NamedTuple):
    """The description of one token, without its value."""

    marker: Any
    """The object that identifies the token."""

    name: PathName
    """The token's path in the model that the State was made with."""

    kind: type
    """The token's class."""

    ranks: tuple[int, ...] = ()
    """The number of axes of each leaf of its value when it was made; () if that is not checked."""

    layers: tuple[int, ...] = ()
    """Which components of the path are fields of layers, whose values have an axis for them."""


class Rows:
    """The rows of a State, in order.

    States that follow from one another share one object, so that comparing two of them costs
    nothing, and neither does hashing one a second time.
    """

    __slots__ = ("by_marker", "hash", "rows")

    def __init__(self, rows: Iterable[Row]):
        self.rows = tuple(rows)
        self.by_marker = {row.marker: row for row in self.rows}
        self.hash: int | None = None

    def __getitem__(self, marker: Any) -> Row:
        return self.by_marker[marker]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __contains__(self, marker: Any) -> bool:
        return marker in self.by_marker

    def __eq__(self, other: object) -> bool:
        # Nearly always: States that follow from one another share theirs.
        if self is other:
            return True
        return isinstance(other, Rows) and self.rows == other.rows

    def __hash__(self) -> int:
        if self.hash is None:
            self.hash = hash(self.rows)
        return self.hash

    def __reduce__(self) -> Any:
        # The hash of a string differs from process to process.
        return Rows, (self.rows,)

    def __repr__(self) -> str:
        return f"<tokens {', '.join(row.name for row in self.rows)}>"

    def only(self, wanted: Iterable[Any]) -> Rows:
        """Return the rows with these markers, in this order."""
        markers = set(wanted)
        return Rows(row for row in self.rows if row.marker in markers)

    def of_kind(self, kind: type) -> list[Any]:
        """Return the markers of the rows whose tokens are of a class."""
        return [row.marker for row in self.rows if issubclass(row.kind, kind)]


# Pickles of version 0.1 use this name.
Register = Rows
