"""Records whose fields are worked out when they are first read.

Records are immutable, so one may be handed out before it is filled in: nobody can tell the
difference, and much of the time nobody looks. The model that a jitted step returns goes straight
into the next call; it keeps its flat list of arrays, and its hundreds of nodes are built only if
somebody reads a field. `tree_at` uses the same door for the stand-ins it shows to `where`.

A class takes part by a `__getattr__` that asks [`read`][pytreemod.tree.pending.read]. It gets one
when its first instance is handed out unfinished, not before: on Python 3.11 the interpreter reads
every attribute more slowly in a class that has a `__getattr__`, even one that is never called
(35 ns in place of 7; from 3.12 on it costs nothing).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

# Where a record's dict keeps its source. No identifier, so that no field can bear the name.
PENDING = "<pending>"


class AbstractSource(ABC):
    """Where the fields of a pending record come from."""

    __slots__ = ()

    @abstractmethod
    def read(self, node: Any, name: str) -> None:
        """Put at least the field `name`, if there is one, into `node.__dict__`."""

    @abstractmethod
    def settle(self, node: Any) -> None:
        """Put all fields into `node.__dict__`, with what else makes it a finished record."""


def read(node: Any, name: str, cls: type) -> Any:
    """The body of `__getattr__` of `cls`: fill a pending record in, then look again.

    Raises:
        AttributeError: there is no such attribute.
    """
    fields = node.__dict__
    source = fields.get(PENDING)
    if source is not None:
        source.read(node, name)
    # Looked up even if nothing was pending: another thread may have just filled the record in.
    if name in fields:
        return fields[name]
    # A base of the user's may answer for further names, as if this method were not here.
    order = type(node).__mro__
    for base in order[order.index(cls) + 1 :]:
        if "__getattr__" in vars(base):
            return vars(base)["__getattr__"](node, name)
    # For the error that Python itself raises.
    return object.__getattribute__(node, name)


def answers_alone(cls: Any) -> bool:
    """Whether nobody but `read` answers for attributes that instances of `cls` lack."""
    found = getattr(cls, "__getattr__", None)
    return found is None or hasattr(found, "is_reader")


def open_to_waiting(cls: type) -> None:
    """Let instances of `cls` be pending."""

    def __getattr__(self: Any, name: str) -> Any:
        return read(self, name, cls)

    __getattr__.is_reader = True  # pyright: ignore[reportFunctionMemberAccess]  (a mark of ours)
    # A class that is pickled by value leaves out what was written into it.
    __getattr__.is_written = True  # pyright: ignore[reportFunctionMemberAccess]  (a mark of ours)
    # Past the metaclass, which would make a method of ours of it.
    type.__setattr__(cls, "__getattr__", __getattr__)


def settle(node: Any) -> None:
    """Fill `node` in now, if it is pending."""
    source = node.__dict__.get(PENDING)
    if source is not None:
        source.settle(node)
