"""What a State knows about its entries, all but their values: names and kinds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pytreemod.tree.paths import PathName


class Entry(NamedTuple):
    """What is known about the entry of one token."""

    marker: Any
    """What the token is recognized by."""

    name: PathName
    """The token's path in the model that the State was made with."""

    kind: type
    """The token's class."""


class Register:
    """The entries of a State, in order.

    States that follow from one another share one, so that comparing two of them costs nothing,
    and neither does hashing one a second time.
    """

    __slots__ = ("by_marker", "entries", "hash")

    def __init__(self, entries: Iterable[Entry]):
        self.entries = tuple(entries)
        self.by_marker = {entry.marker: entry for entry in self.entries}
        self.hash: int | None = None

    def __getitem__(self, marker: Any) -> Entry:
        return self.by_marker[marker]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __contains__(self, marker: Any) -> bool:
        return marker in self.by_marker

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Register) and self.entries == other.entries

    def __hash__(self) -> int:
        if self.hash is None:
            self.hash = hash(self.entries)
        return self.hash

    def __reduce__(self) -> Any:
        # The hash of a string differs from process to process.
        return Register, (self.entries,)

    def __repr__(self) -> str:
        return f"<tokens {', '.join(entry.name for entry in self.entries)}>"

    def only(self, wanted: Iterable[Any]) -> Register:
        """The entries with these markers, in the order of this register."""
        markers = set(wanted)
        return Register(entry for entry in self.entries if entry.marker in markers)

    def of_kind(self, kind: type) -> list[Any]:
        """The markers of the entries whose tokens are of a class."""
        return [entry.marker for entry in self.entries if issubclass(entry.kind, kind)]
