"""Records whose fields are worked out when they are first read.

Records are immutable, so one may be handed out before it is filled in: nobody can see the
difference, and much of the time nobody looks. The model that a jitted step returns goes straight
into the next call; it keeps its flat list of arrays, and its hundreds of nodes are built only if
somebody reads a field. So are the records that JAX makes, node by node: each keeps what it was made
of, which is also what flattening it gives. `tree_at` uses the same door for the proxies it shows
to `where`.

A class takes part by a [`Waiting`][pytreemod.tree.pending.Waiting] for each field; reading a field
takes 12 to 15 ns longer with one (3 to 5 without). They are in the class, and not in a
`__getattr__`, because `isinstance(model, Protocol)` looks for the fields there, without asking the
instance.

A record's dict, with its source, is `__stored__`; what a user reads as its `__dict__` is another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from pytreemod.typing import class_of

# Where a record's dict has its private object: its layout, or a `Private`. No identifier, so that
# no field can bear the name.
PRIVATE = "<private>"
# Where it has what flattening it gives: `(children, aux)`. First in `aux` is its layout, which is
# the source of all fields, and has the `keys` of the children. An identifier that no field bears,
# for JAX reads it as an attribute.
FLAT = "__flat__"
# And what Python's machinery assigns to instances without asking.
ORIGINAL_CLASS = "__orig_class__"


def is_private(name: str) -> bool:
    """Whether a name in a record's dict is none of its attributes."""
    return name.startswith("<") or name in (FLAT, ORIGINAL_CLASS)


class AbstractSource(ABC):
    """Where the fields of a pending record come from."""

    __slots__ = ()

    @abstractmethod
    def read(self, node: Any, name: str) -> None:
        """Put at least the field `name`, if there is one, into `node.__stored__`."""

    @abstractmethod
    def fill_in(self, node: Any) -> None:
        """Put all fields into `node.__stored__`, with what else makes it a finished record."""


class Private:
    """What a record has beside its fields, where that is more than its layout.

    A layout has the same attributes, so that a record that is finished needs no object of its own.

    Attributes:
        layout: how its fields divide.
        source: where fields come from that are not in its dict yet; None if all are.
        snapshot: its arrays as one flat list, once somebody asked (see `tree.snapshots`).
        is_derivative: whether it came from a transform that differentiates.
    """

    __slots__ = ("is_derivative", "layout", "snapshot", "source")

    def __init__(self, layout: Any, source: AbstractSource | None = None):
        self.layout, self.source = layout, source
        self.snapshot: Any = None
        self.is_derivative = False


def private_of(node: Any) -> Private:
    """The private object of a finished record, to be written to."""
    fields = node.__stored__
    own = fields.get(PRIVATE)
    if own is None:
        # Of another thread, if that has just filled it in.
        layout = fields[FLAT][1][0]
        own = fields.setdefault(PRIVATE, Private(layout, layout))
    if class_of(own) is not Private:
        fields[PRIVATE] = own = Private(own)
    return own


class Waiting:
    """Stands in a class for a field, and fills a pending instance in when the field is read.

    It has no `__set__`, so that Python prefers what is in an instance's dict.
    """

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is not None:
            fields = instance.__stored__
            source = source_of(fields)
            if source is not None:
                source.read(instance, self.name)
            # Looked up even if nothing was pending: another thread may have just filled it in.
            if self.name in fields:
                return fields[self.name]
        return self.without(instance, owner, owner.__mro__)

    def without(self, instance: Any, owner: type, bases: Iterable[type]) -> Any:
        """What Python would find in these bases if nothing stood here.

        Raises:
            AttributeError: nothing.
        """
        for base in bases:
            kept: Any = vars(base).get(self.name, self)
            if not isinstance(kept, Waiting):
                is_bound = hasattr(class_of(kept), "__get__")
                return kept.__get__(instance, owner) if is_bound else kept
        raise self.missing(instance, owner)

    def missing(self, instance: Any, owner: type) -> AttributeError:
        """The error for an attribute that is not there, as Python says it."""
        what = f"type object {owner.__name__!r}"
        if instance is not None:
            what = f"{owner.__name__!r} object"
        at: Any = owner if instance is None else instance
        return AttributeError(f"{what} has no attribute {self.name!r}", name=self.name, obj=at)


def has_attribute(cls: type, name: str) -> bool:
    """Whether Python finds something in a class, other than what waits for an instance's field."""
    return any(has_own_attribute(base, name) for base in cls.__mro__)


def has_own_attribute(cls: type, name: str) -> bool:
    """Whether the body of a class has something, other than what waits for an instance's field."""
    return name in vars(cls) and not isinstance(vars(cls)[name], Waiting)


def open_to_waiting(cls: type, names: Iterable[str]) -> None:
    """Let instances of `cls` be pending, and whoever looks at the class find their fields.

    Args:
        cls: the class of a record.
        names: its fields that the class has no attribute for.
    """
    for name in names:
        # What waits and reads otherwise stays.
        if name not in vars(cls):
            # Past the metaclass, which would take it for a new value of the class.
            type.__setattr__(cls, name, Waiting(name))


def source_of(fields: dict[str, Any]) -> AbstractSource | None:
    """Where the fields of a record come from that are not in its dict; None if it has them all."""
    own = fields.get(PRIVATE)
    if own is not None:
        return own.source
    flat = fields.get(FLAT)
    return None if flat is None else flat[1][0]


def is_being_built(node: Any) -> bool:
    """Whether a record's fields may still be assigned."""
    return node.__stored__.keys().isdisjoint((FLAT, PRIVATE))


def fill_in(node: Any) -> None:
    """Fill `node` in now, if it is pending."""
    source = source_of(node.__stored__)
    if source is not None:
        source.fill_in(node)
