"""Which State follows from which, so that `update` can tell what happened on either side."""

from __future__ import annotations

from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary


class Lineage:
    """The States that follow from one another by `set`, `next_key` and the like.

    Values are compared by identity: what is still the same object was not changed. That says
    nothing once a State went through a transform, where all values are new objects. So what a
    transform returns begins a lineage of its own.
    """

    __slots__ = ("__weakref__", "taken")

    def __init__(self) -> None:
        # By the lineage of each substate. Weakly: neither what it took nor what this one held then
        # is kept alive for longer than both are in use. Most substates have none of their own.
        self.taken: WeakKeyDictionary[Lineage, dict[Any, Any]] | None = None

    def branch(self, values: dict[Any, Any]) -> Lineage:
        """The lineage of a substate that takes these values."""
        made = Lineage()
        if self.taken is None:
            with beginning:
                self.taken = WeakKeyDictionary() if self.taken is None else self.taken
        self.taken[made] = values
        return made

    def taken_by(self, branch: Lineage | None) -> dict[Any, Any] | None:
        """What a substate took from here; None if it took nothing, or it cannot be known."""
        return None if branch is None or self.taken is None else self.taken.get(branch)


beginning = Lock()
"""Held where a lineage begins, or branches for the first time: two threads must not do it twice."""
