"""Records whose fields are filled in when they are first read.

Records are immutable, so one may be returned before it is filled in: the difference cannot be
seen, and often no field is ever read. The model that a jitted step returns goes straight into the
next call. It stores its flat list of arrays; its hundreds of nodes are built only if a field is
read. The same is true of the records that JAX makes, node by node: each stores its children, which
flattening returns again. `tree_at` uses the same mechanism for the proxies that it passes to
`where`.

A class takes part by a [`Waiting`][pytreemod.tree.pending.Waiting] for each field; reading a field
takes 12 to 15 ns longer with one (3 to 5 without). They are in the class, and not in a
`__getattr__`, because `isinstance(model, Protocol)` looks for the fields there, without asking the
instance.

A record's own dict, with its source, is `__stored__`; the `__dict__` that a user reads is another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from pytreemod.typing import class_of

# The key in a record's dict for its private object: its layout, or a `Private`. Not an identifier,
# so that no field can have this name.
PRIVATE = "<private>"
# The key for the result of flattening: `(children, aux)`. First in `aux` is the layout, which is
# the source of all fields, and has the `keys` of the children. An identifier that no field has,
# because JAX reads it as an attribute.
FLAT = "__flat__"
# The attribute that Python itself assigns to instances of generic classes.
ORIGINAL_CLASS = "__orig_class__"


def is_private(name: str) -> bool:
    """Whether a name in a record's dict is not one of its attributes."""
    return name.startswith("<") or name in (FLAT, ORIGINAL_CLASS)


class AbstractSource(ABC):
    """The source of the fields of a pending record."""

    __slots__ = ()

    @abstractmethod
    def read(self, node: Any, name: str) -> None:
        """Put at least the field `name`, if it exists, into `node.__stored__`."""

    @abstractmethod
    def fill_in(self, node: Any) -> None:
        """Put all fields into `node.__stored__`, and everything else that a finished record has."""


class Private:
    """Data of a record beside its fields, if it has more than its layout.

    A layout has the same attributes, so that a finished record needs no object of its own.

    Attributes:
        layout: how its fields divide.
        source: where missing fields are read from; None if there are none.
        snapshot: its arrays as one flat list, once requested (see `tree.snapshots`).
        is_derivative: whether a transform that differentiates returned it.
    """

    __slots__ = ("is_derivative", "layout", "snapshot", "source")

    def __init__(self, layout: Any, source: AbstractSource | None = None):
        self.layout, self.source = layout, source
        self.snapshot: Any = None
        self.is_derivative = False


def private_of(node: Any) -> Private:
    """Return the private object of a finished record, for writing."""
    fields = node.__stored__
    own = fields.get(PRIVATE)
    if own is None:
        # If another thread has just filled it in.
        layout = fields[FLAT][1][0]
        own = fields.setdefault(PRIVATE, Private(layout, layout))
    if class_of(own) is not Private:
        fields[PRIVATE] = own = Private(own)
    return own


class Waiting:
    """A class attribute for a field: fills a pending instance in when the field is read.

    It has no `__set__`, so that Python prefers the entry in an instance's dict.
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
            # Look even if nothing was pending: another thread may have just filled it in.
            if self.name in fields:
                return fields[self.name]
        # What Python would find without this object.
        bases: Iterable[type] = owner.__mro__
        for base in bases:
            original: Any = vars(base).get(self.name, self)
            if not isinstance(original, Waiting):
                is_bound = hasattr(class_of(original), "__get__")
                return original.__get__(instance, owner) if is_bound else original
        what = f"type object {owner.__name__!r}"
        if instance is not None:
            what = f"{owner.__name__!r} object"
        at: Any = owner if instance is None else instance
        raise AttributeError(f"{what} has no attribute {self.name!r}", name=self.name, obj=at)


def has_attribute(cls: type, name: str) -> bool:
    """Whether Python finds an attribute in a class, other than a `Waiting`."""
    return any(has_own_attribute(base, name) for base in cls.__mro__)


def has_own_attribute(cls: type, name: str) -> bool:
    """Whether the body of a class has an attribute, other than a `Waiting`."""
    return name in vars(cls) and not isinstance(vars(cls)[name], Waiting)


def open_to_waiting(cls: type, names: Iterable[str]) -> None:
    """Let instances of `cls` be pending, with their fields visible in the class.

    Args:
        cls: the class of a record.
        names: the fields for which the class has no attribute.
    """
    for name in names:
        # Keep an attribute that is there, such as a special `Waiting`.
        if name not in vars(cls):
            # Bypass the metaclass, which would take it for a new class attribute.
            type.__setattr__(cls, name, Waiting(name))


def source_of(fields: dict[str, Any]) -> AbstractSource | None:
    """Return where the missing fields of a record are read from; None if it has them all."""
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
