"""The State from which a substate was taken, so that `update` knows which values each changed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from threading import Lock
from typing import Any


class History:
    """Shared by States that were made from one another by `set`, `next_key` and so on.

    Values are compared by identity: the same object means unchanged. Transforms return new objects
    for all values, so a State that a transform returns starts a new history.
    """

    __slots__ = ("__weakref__", "above", "lent", "taken")

    def __init__(self, above: tuple[weakref.ref[History], ...] = ()) -> None:
        # Of the State that a substate was taken from, and of the outermost. Weakly: each of a
        # long row of substates would keep all before it.
        self.above = above
        # The values that a substate has replaced, and that were not put back yet.
        self.lent: set[Any] = set()
        # By the history of each substate, weakly: its values live only as long as both are in use.
        # Most histories have no substates.
        self.taken: weakref.WeakKeyDictionary[History, dict[Any, Any]] | None = None

    def branch(self, values: dict[Any, Any]) -> History:
        """Return the history of a substate that takes these values."""
        own: weakref.ref[History] = weakref.ref(self)
        made = History((own, *self.above[-1:]) if self.above else (own,))
        if self.taken is None:
            with start_lock:
                self.taken = weakref.WeakKeyDictionary() if self.taken is None else self.taken
        self.taken[made] = values
        return made

    def note_used(self, values: Iterable[Any]) -> None:
        """Note that values of a State of this history were replaced."""
        for reference in self.above:
            history = reference()
            if history is not None:
                history.lent.update(values)

    def taken_by(self, branch: History | None) -> dict[Any, Any] | None:
        """The values that a substate took from here; None if it took none, or it is unknown."""
        return None if branch is None or self.taken is None else self.taken.get(branch)


start_lock = Lock()
"""Held at the first use of a history, or of its table: two threads must not make two."""
