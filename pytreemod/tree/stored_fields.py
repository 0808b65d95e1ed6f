"""The stored value of a record's field, and the value that reading it gives.

Mostly these are the same. But a field may store the inputs of a computation, or a tie to another
path (see `module.reading`). Then reading the attribute gives an array, while the tree contains
something else. Functions that walk over trees use the stored value: `stored` reads it by name, and
inside `reading_stored` attributes give it, for user code that selects nodes by attribute access.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from pytreemod.tree.pending import source_of

# Of this thread, or task: other threads read computed values meanwhile.
_stored_alone: ContextVar[bool] = ContextVar("_stored_alone", default=False)

is_reading_stored = _stored_alone.get
"""Whether attributes give the stored value."""


class reading_stored:
    """A context in which attributes give stored values: nothing is computed, no tie is followed.

    A class, because a generator would make surgery slower (1 us instead of 0.3).
    """

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = _stored_alone.set(True)

    def __exit__(self, *_: object) -> None:
        _stored_alone.reset(self._token)


def stored(node: Any, name: str, *default: Any) -> Any:
    """Return the stored value of a field, or of an entry beside the fields.

    Args:
        node: a record.
        name: of the field.
        *default: the value to return if there is no such field.
    """
    fields = node.__stored__
    if name not in fields:
        source = source_of(fields)
        if source is not None:
            source.read(node, name)
        for value in default:
            return fields.get(name, value)
    return fields[name]
