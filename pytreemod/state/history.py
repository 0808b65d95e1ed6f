"""The State from which a substate was taken, so that `update` knows which values each changed."""

from __future__ import annotations

from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary


class History:
    """Shared by States that were made from one another by `set`, `next_key` and so on.

    Values are compared by identity: the same object means unchanged. Transforms return new objects
    for all values, so a State that a transform returns starts a new history.
    """

    __slots__ = ("__weakref__", "taken")

    def __init__(self) -> None:
        # By the history of each substate, weakly: its values live only as long as both are in use.
        # Most histories have no substates.
        self.taken: WeakKeyDictionary[History, dict[Any, Any]] | None = None

    def branch(self, values: dict[Any, Any]) -> History:
        """Return the history of a substate that takes these values."""
        made = History()
        if self.taken is None:
            with start_lock:
                self.taken = WeakKeyDictionary() if self.taken is None else self.taken
        self.taken[made] = values
        return made

    def taken_by(self, branch: History | None) -> dict[Any, Any] | None:
        """The values that a substate took from here; None if it took none, or it is unknown."""
        return None if branch is None or self.taken is None else self.taken.get(branch)


start_lock = Lock()
"""Held at the first use of a history, or of its table: two threads must not make two."""
