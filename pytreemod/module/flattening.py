"""How a Module class is a pytree: in which ways its fields divide, flattening, unflattening.

A `Layout` is one way in which the fields of an instance divide into data and configuration, for
configuration values of given types: most classes have few, but a field that holds a function in
one instance and a Module in another gives two.

Flattening runs for every node of every tree in every call of a transform. An instance never
changes, so what flattening it gives is kept with it, and JAX reads that in C, as the attribute
`__flat__`; no Python runs but for the first time. Unflattening keeps the same pair, and nothing
else: the fields are filled in from it when one is read (see `tree.pending`), which most of the
trees that JAX puts together never see. For `class Linear` with data `weight`, `bias` and
configuration `n`, an instance's dict has

    when it was built               weight, bias, n, <private>: layout
    and then flattened              the same, and __flat__: ((weight, bias), (layout, n))
    when it was unflattened         __flat__
    and then read                   __flat__, weight, bias, <private>, n

What an instance has that is no field (roles that it was given, ties, rules around its methods) is
configuration, too: the *notes* of its layout, which is its own then (a `NotedLayout`).

A field for which the class has a default is there from the start: Python would take the default for
the instance's own value, and not ask. It takes 30 to 60 ns for each.

Together they cost 1.5 times what they cost for dicts, which JAX takes apart in C++; with functions
written out field by field, in the place of what is kept, they cost 2.4 times. To switch it off, let
`Flattened` keep nothing, and no layout wait. `benchmarks/flattening.py` measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from pytreemod.module.division import Held
from pytreemod.tree.kinds import are_one, are_pairwise_one
from pytreemod.tree.pending import FLAT, PRIVATE, AbstractSource, fill_in
from pytreemod.typing import class_of, jtu


class Configuration(tuple[Any, ...]):
    """Auxiliary data, equal if a program that was traced for one serves for the other.

    The values of types for which `==` tells that are in a plain tuple, which Python compares in C.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Configuration) and are_pairwise_one(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        # The spellings of a dtype are one, and have different hashes.
        return hash(self[0])


class Layout(AbstractSource):
    """One division of a class's fields, for configuration of given kinds.

    Stands first in the auxiliary data of a flattened instance, where it is compared by identity;
    and there it is the source of an instance that JAX has made of such data.

    Args:
        cls: the class.
        data: the fields that are children.
        config: those that are not, and `extra`.
        kinds: of the values of configuration: their types if `==` tells all, `Held`, or None.
        extra: attributes that are no fields: what `module_update_wrapper` adds.
        may_wait: whether something in the class would fill in a field that is read.
        shown: the fields that the class has an attribute for, such as a default: Python would take
            that for the instance's own.
    """

    __slots__ = (
        "__weakref__",
        "cls",
        "config",
        "data",
        "early_config",
        "early_data",
        "extra",
        "held",
        "is_bare",
        "keys",
        "layout",
        "names",
        "pack",
        "size",
        "waits",
    )

    # As a `Private` has them: a finished record may have nothing but its layout.
    source = snapshot = None
    is_derivative = False
    notes: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        cls: type,
        data: tuple[str, ...],
        config: tuple[str, ...],
        kinds: tuple[Any, ...],
        extra: tuple[str, ...],
        may_wait: bool,
        shown: tuple[str, ...],
    ):
        self.layout = self  # As a `Private` has it.
        self.cls, self.data, self.config, self.extra = cls, data, config, extra
        self.keys: tuple[Any, ...] = tuple([jtu.GetAttrKey(name) for name in data])
        # All that an instance's dict has of what was flattened, in the order of that.
        self.names = (*data, PRIVATE, *config)
        self.size = len(self.names)
        self.held = frozenset(n for n, kind in zip(config, kinds, strict=True) if kind is Held)
        self.pack: Any = Configuration if None in kinds else tuple
        # Nothing stands in the class for what a wrapper has from its function; and what is held is
        # each instance's own from the start.
        self.waits = may_wait and not self.held and not extra
        # What is there from the start even so, and where it stands in the children, or in the
        # auxiliary data behind the layout.
        self.early_data = tuple((n, at) for at, n in enumerate(data) if n in shown)
        self.early_config = tuple((n, at) for at, n in enumerate(config, 1) if n in shown)
        self.is_bare = self.waits and not self.early_data and not self.early_config

    def with_notes(self, notes: Mapping[str, Any]) -> Layout:
        """The layout of an instance that has these notes; this one if there are none."""
        return NotedLayout(self, notes) if notes else self

    def flatten(self, fields: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The children and the auxiliary data of an instance with these fields.

        **Law.** `layout.values(*layout.flatten(fields))` are the fields, and the layout; but for
        what is held, which is copied on both ways.
        """
        children = tuple([fields[name] for name in self.data])
        config = [fields[name] for name in self.config]
        if self.held:
            pairs = zip(self.config, config, strict=True)
            config = [Held(value) if name in self.held else value for name, value in pairs]
        return children, self.pack((self, *config))

    def values(self, children: Iterable[Any], aux: tuple[Any, ...]) -> dict[str, Any]:
        """The fields of an instance that was flattened to this, and its layout."""
        # `aux` begins with the layout.
        fields = dict(zip(self.names, (*children, *aux), strict=True))
        for name in self.held:
            fields[name] = fields[name].give()
        return fields

    def read(self, node: Any, name: str) -> None:
        """Fill in all fields of an instance: one costs as much."""
        self.fill_in(node)

    def fill_in(self, node: Any) -> None:
        """Fill in the fields of an instance that has nothing but what it was made of."""
        fields = node.__stored__
        values = self.values(*fields[FLAT])
        del values[PRIVATE]
        # What another thread has just filled in are the same objects: nothing that is held waits.
        fields.update(values)
        # Last, for who finds it without a source takes the record for complete.
        own = fields.setdefault(PRIVATE, self)
        if own is not self:
            own.source = None

    def __repr__(self) -> str:
        return self.cls.__qualname__


class NotedLayout(Layout):
    """A layout with notes. Two are equal if both are, as configuration is compared.

    Args:
        plain: the layout without notes.
        notes: by their names, which are no identifiers.
    """

    __slots__ = ("notes", "plain")

    def __init__(self, plain: Layout, notes: Mapping[str, Any]):
        for name in _COPIED:
            setattr(self, name, getattr(plain, name))
        self.plain, self.notes = plain, notes

    def with_notes(self, notes: Mapping[str, Any]) -> Layout:  # noqa: D102
        return self.plain.with_notes(notes)

    # Not a reference to itself, which would keep each of them until garbage is collected.
    layout = property(lambda self: self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NotedLayout) or self.plain is not other.plain:
            return False
        return self.notes.keys() == other.notes.keys() and all(
            are_one(note, other.notes[name]) for name, note in self.notes.items()
        )

    def __hash__(self) -> int:
        return hash(self.plain)

    def __repr__(self) -> str:
        return f"{self.plain!r} with {self.notes}"


_COPIED = tuple(name for name in Layout.__slots__ if name not in ("__weakref__", "layout"))


def layout_in(fields: dict[str, Any]) -> Layout | None:
    """The layout in an instance's dict; None if it is being built, or all of it is pending."""
    own = fields.get(PRIVATE)
    if own is None:
        flat = fields.get(FLAT)
        return None if flat is None else flat[1][0]
    return own.layout


def note_of(node: Any, name: str, default: Any = ()) -> Any:
    """What a record has under a name of ours, other than its fields."""
    layout = layout_in(node.__stored__)
    return default if layout is None else layout.notes.get(name, default)


class Flattened:
    """Stands in Module classes for `__flat__`: what flattening an instance gives, the first time.

    It is kept with the instance, where Python finds it before it comes here.
    """

    __slots__ = ()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        fields = instance.__stored__
        own = fields.get(PRIVATE)
        if own is None:
            # It was put together by hand, and may have other fields the next time.
            return class_of(instance).__record__.decide(fields).flatten(fields)
        if own.source is not None:
            fill_in(instance)
            return instance.__flat__
        layout = own.layout
        flat = layout.flatten(fields)
        # The user may change what is held, and then flattening gives something else.
        if not layout.held:
            fields[FLAT] = flat
        return flat


_new: Callable[..., Any] = object.__new__


def register(cls: Any) -> None:
    """Register a Module class with JAX."""
    # Python calls `object.__new__` with a tuple, which is the same each time.
    only = (cls,)
    set_fields = cls.__stored__.__set__

    def unflatten(aux: Any, children: Any) -> Any:
        made = _new(*only)
        if aux[0].is_bare:
            # Past `__setattr__`, and into the dict that Python has for it: to set the attribute by
            # `object.__setattr__`, or to give it a dict of ours, takes a tenth longer. The price
            # is that dict, 64 bytes, which any look at a field would cost as well.
            made.__stored__[FLAT] = children, aux
            return made
        layout = aux[0]
        if layout.waits:
            fields = made.__stored__
            fields[FLAT] = children, aux
            for name, at in layout.early_config:
                fields[name] = aux[at]
            for name, at in layout.early_data:
                fields[name] = children[at]
            return made
        fields = layout.values(children, aux)
        if not layout.held:  # As in `Flattened`.
            fields[FLAT] = children, aux
        set_fields(made, fields)
        return made

    jtu.register_pytree_with_keys(cls, _flatten_with_keys, unflatten, attrgetter(FLAT))


def _flatten_with_keys(node: Any) -> Any:
    children, aux = node.__flat__
    return tuple(zip(aux[0].keys, children, strict=True)), aux
