"""Which State a substate was taken from, so that `update` knows what each of them changed."""

from __future__ import annotations

from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary


class History:
    """What States have in common that were made from one another by `set`, `next_key` and so on.

    Values are compared by identity: the same object means unchanged. Transforms return new objects
    for all values, so a State that a transform returns starts a history of its own.
    """

    __slots__ = ("__weakref__", "taken")

    def __init__(self) -> None:
        # By the history of each substate, weakly: its values live only as long as both are in use.
        # Most substates have none of their own.
        self.taken: WeakKeyDictionary[History, dict[Any, Any]] | None = None

    def branch(self, values: dict[Any, Any]) -> History:
        """The history of a substate that takes these values."""
        made = History()
        if self.taken is None:
            with beginning:
                self.taken = WeakKeyDictionary() if self.taken is None else self.taken
        self.taken[made] = values
        return made

    def taken_by(self, branch: History | None) -> dict[Any, Any] | None:
        """What a substate took from here; None if it took nothing, or it cannot be known."""
        return None if branch is None or self.taken is None else self.taken.get(branch)


beginning = Lock()
"""For the first use of a history, or of its table: two threads must not make two."""
