"""How a Module class is a pytree: dividing its fields, flattening, unflattening.

A `Layout` is one way in which the fields of an instance divide into data and configuration, for
configuration values of given types. Most classes have few, but a field with a function in
one instance and a Module in another gives two.

Flattening runs for every node of every tree in every call of a transform. An instance never
changes, so the result of flattening is cached with it. JAX reads the cache in C, as the attribute
`__flat__`; Python runs only the first time. Unflattening stores the same pair and nothing
else. The fields are filled in from it when one is read (see `tree.pending`), which never happens
to most of the trees that JAX builds. For `class Linear` with data `weight`, `bias` and
configuration `n`, an instance's dict has

    when it was built               weight, bias, n, <private>: layout
    and then flattened              the same, and __flat__: ((weight, bias), (layout, n))
    when it was unflattened         __flat__
    and then read                   __flat__, weight, bias, <private>, n

Attributes of an instance that are not fields (its roles, ties, call rules) are configuration, too:
the *notes* of its layout, which belongs to this instance alone (a `NotedLayout`).

A field for which the class has a default is set from the start: Python would read the default
instead of asking for the instance's value. It takes 30 to 60 ns for each.

Flattening and unflattening take 1.5 times as long as for dicts, which JAX takes apart in C++. With
functions generated field by field, instead of the cache, they take 2.4 times as long. To switch it
off, let `Flattened` store nothing, and no layout wait. `benchmarks/flattening.py` measures it.
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
    """Auxiliary data, equal if a program that was traced for one is valid for the other.

    Values of types for which `==` suffices are in a plain tuple, which Python compares in C.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Configuration) and are_pairwise_one(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        # The spellings of a dtype are one value, but have different hashes.
        return hash(self[0])


class Layout(AbstractSource):
    """One division of a class's fields, for configuration of given kinds.

    It is the first item in the auxiliary data of a flattened instance, and is compared by identity.
    From there it is also the source of the fields of an instance that JAX makes.

    Args:
        cls: the class.
        data: the fields that are children.
        config: those that are not, and `extra`.
        kinds: of the values of configuration: their types if `==` suffices, `Held`, or None.
        extra: attributes that are not fields: those that `module_update_wrapper` adds.
        may_wait: whether the class can fill in a field when it is read.
        shown: the fields for which the class has an attribute, such as a default: Python would read
            that instead of the instance's.
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

    # As for `Private`: a finished record may have nothing but its layout.
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
        self.layout = self  # As for `Private`.
        self.cls, self.data, self.config, self.extra = cls, data, config, extra
        self.keys: tuple[Any, ...] = tuple([jtu.GetAttrKey(name) for name in data])
        # The entries of an instance's dict in the order of its flattened values.
        self.names = (*data, PRIVATE, *config)
        self.size = len(self.names)
        self.held = frozenset(n for n, kind in zip(config, kinds, strict=True) if kind is Held)
        self.pack: Any = Configuration if None in kinds else tuple
        # The class has no `Waiting` for attributes that a wrapper copies from its function, and
        # each instance has its own held values from the start.
        self.waits = may_wait and not self.held and not extra
        # Fields that are set from the start nevertheless, and their positions in the children, or
        # in the auxiliary data after the layout.
        self.early_data = tuple((n, at) for at, n in enumerate(data) if n in shown)
        self.early_config = tuple((n, at) for at, n in enumerate(config, 1) if n in shown)
        self.is_bare = self.waits and not self.early_data and not self.early_config

    def with_notes(self, notes: Mapping[str, Any]) -> Layout:
        """Return the layout of an instance with these notes; this layout if there are none."""
        return NotedLayout(self, notes) if notes else self

    def flatten(self, fields: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the children and the auxiliary data of an instance with these fields.

        **Law.** `layout.values(*layout.flatten(fields))` are the fields, and the layout. Held
        values are copied both ways.
        """
        children = tuple([fields[name] for name in self.data])
        config = [fields[name] for name in self.config]
        if self.held:
            pairs = zip(self.config, config, strict=True)
            config = [Held(value) if name in self.held else value for name, value in pairs]
        return children, self.pack((self, *config))

    def values(self, children: Iterable[Any], aux: tuple[Any, ...]) -> dict[str, Any]:
        """Return the fields of the instance that was flattened to these values, and its layout."""
        # `aux` begins with the layout.
        fields = dict(zip(self.names, (*children, *aux), strict=True))
        for name in self.held:
            fields[name] = fields[name].give()
        return fields

    def read(self, node: Any, name: str) -> None:
        """Fill in all fields of an instance: a single one costs as much."""
        self.fill_in(node)

    def fill_in(self, node: Any) -> None:
        """Fill in the fields of an instance that has nothing but its flattened values."""
        fields = node.__stored__
        values = self.values(*fields[FLAT])
        del values[PRIVATE]
        # Another thread may have filled in the same objects: held values never wait.
        fields.update(values)
        # Last, because a record without a source must be complete.
        own = fields.setdefault(PRIVATE, self)
        if own is not self:
            own.source = None

    def __repr__(self) -> str:
        return self.cls.__qualname__


class NotedLayout(Layout):
    """A layout with notes. Two are equal if the layouts and the notes are.

    Args:
        plain: the layout without notes.
        notes: by their names, which are not identifiers.
    """

    __slots__ = ("notes", "plain")

    def __init__(self, plain: Layout, notes: Mapping[str, Any]):
        for name in _COPIED:
            setattr(self, name, getattr(plain, name))
        self.plain, self.notes = plain, notes

    def with_notes(self, notes: Mapping[str, Any]) -> Layout:  # noqa: D102
        return self.plain.with_notes(notes)

    # Not a reference to itself, which would keep it alive until the garbage collector runs.
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
    """The layout in an instance's dict; None if the instance is being built or is pending."""
    own = fields.get(PRIVATE)
    if own is None:
        flat = fields.get(FLAT)
        return None if flat is None else flat[1][0]
    return own.layout


def note_of(node: Any, name: str, default: Any = ()) -> Any:
    """Return an entry of a record that is not a field, under one of the library's names."""
    layout = layout_in(node.__stored__)
    return default if layout is None else layout.notes.get(name, default)


class Flattened:
    """The class attribute `__flat__` of Modules: flattens an instance the first time.

    The result is cached with the instance, where Python finds it first from then on.
    """

    __slots__ = ()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        fields = instance.__stored__
        own = fields.get(PRIVATE)
        if own is None:
            # It was built by hand, and may have other fields the next time.
            return class_of(instance).__record__.decide(fields).flatten(fields)
        if own.source is not None:
            fill_in(instance)
            return instance.__flat__
        layout = own.layout
        flat = layout.flatten(fields)
        # The user may change a held value, and then flattening gives another result.
        if not layout.held:
            fields[FLAT] = flat
        return flat


_new: Callable[..., Any] = object.__new__


def register(cls: Any) -> None:
    """Register a Module class with JAX."""
    # Python calls `object.__new__` with a tuple; this is always the same one.
    only = (cls,)
    set_fields = cls.__stored__.__set__

    def unflatten(aux: Any, children: Any) -> Any:
        made = _new(*only)
        if aux[0].is_bare:
            # Bypass `__setattr__`, and write into the dict that Python makes: setting the attribute
            # by `object.__setattr__`, or setting a new dict, takes a tenth longer. The price is
            # that dict, 64 bytes, which reading any field would cost as well.
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
        if not layout.held:  # As for `Flattened`.
            fields[FLAT] = children, aux
        set_fields(made, fields)
        return made

    jtu.register_pytree_with_keys(cls, _flatten_with_keys, unflatten, attrgetter(FLAT))


def _flatten_with_keys(node: Any) -> Any:
    children, aux = node.__flat__
    return tuple(zip(aux[0].keys, children, strict=True)), aux
