"""What is known of a Module class once its body has been read.

A `Schema` holds the fields of one class with all that construction, flattening and surgery ask of
them, worked out once when the class is made. A `Layout` is one way in which the fields of an
instance divide into data and configuration: nearly every class has only one, but a field that
holds a function in one instance and a Module in another gives two.
"""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from pytreemod.module.division import is_configuration, refuse_arrays
from pytreemod.module.fields import CONVERTER, ROLE, STATIC
from pytreemod.tree.nodes import DEFAULT_ROLE, AbstractRecord
from pytreemod.tree.pending import PENDING, AbstractSource, open_to_waiting, settle

# Where an instance's dict keeps its layout. No identifier, so that no field can bear the name.
LAYOUT = "<layout>"

_SCALARS = (type(None), bool, int, float, complex)


class Layout:
    """One division of a class's fields into data and configuration, with its code."""

    __slots__ = ("cls", "config", "data", "flatten", "flatten_with_keys", "unflatten")

    flatten: Callable[[Any], Any]
    flatten_with_keys: Callable[[Any], Any]
    unflatten: Callable[[Any, Any], Any]

    def __init__(self, cls: type, data: tuple[str, ...], config: tuple[str, ...]):
        self.cls, self.data, self.config = cls, data, config

    def __repr__(self) -> str:
        return self.cls.__qualname__


class Schema(AbstractRecord):
    """The fields of one Module class."""

    def __init__(
        self,
        cls: type,
        write_layout: Callable[[Layout], None],
        make: Callable[[type, dict[str, Any]], Any],
    ):
        fields = dataclasses.fields(cls)
        self.cls = cls
        self.fields = {f.name: f for f in fields}
        self.static = frozenset(f.name for f in fields if f.metadata.get(STATIC))
        self.converters = {f.name: f.metadata[CONVERTER] for f in fields if CONVERTER in f.metadata}
        self.roles = {f.name: f.metadata[ROLE] for f in fields if ROLE in f.metadata}
        self.refusal: str | None = None
        self.custom_init = False
        self.checks: tuple[Callable[[Any], Any], ...] = ()
        self.can_wait = False
        self.shown: tuple[str, ...] = ()
        self._is_open = False
        self.finish: Callable[[Any], None] = lambda node: None
        self._write_layout = write_layout
        self._make = make
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._lock = threading.Lock()
        self.layout = self.layout_for({*self.fields}, {*self.static})

    def layout_for(self, present: set[str], config: set[str] | frozenset[str]) -> Layout:
        """The one layout with these fields, of which some are configuration.

        A name that is no field is configuration: what `module_update_wrapper` adds.
        """
        data = tuple(n for n in self.fields if n in present and n not in config)
        rest = tuple(n for n in self.fields if n in present and n in config)
        rest += tuple(sorted(present - {*self.fields}))
        key = (*data, "", *rest)
        with self._lock:
            layout = self._layouts.get(key)
            if layout is None:
                layout = Layout(self.cls, data, rest)
                self._write_layout(layout)
                self._layouts[key] = layout
        return layout

    def decide(self, values: dict[str, Any]) -> Layout:
        """The layout that an instance with these values gets when it is built."""
        present = {name for name in self.fields if name in values}
        auto = {n for n in present if n not in self.static and is_configuration(values[n])}
        return self.layout_for(present, auto | self.static)

    def split(self, node: Any) -> Layout:
        """The layout of an instance; decided by its values if it was put together by hand."""
        layout = node.__dict__.get(LAYOUT)
        if layout is None:
            settle(node)
            layout = node.__dict__.get(LAYOUT)
        return self.decide(node.__dict__) if layout is None else layout

    def names(self, node: Any) -> tuple[str, ...]:
        """All fields of `node` that are set, in order."""
        layout = self.split(node)
        present = {*layout.data, *layout.config}
        return tuple(name for name in self.fields if name in present)

    def data_names(self, node: Any) -> tuple[str, ...]:
        """The fields of `node` that are children of the pytree."""
        return self.split(node).data

    def role(self, name: str) -> str:
        """The role that the field was declared with."""
        return self.roles.get(name, DEFAULT_ROLE)

    def rebuild(self, node: Any, changes: dict[str, Any], decide: bool = False) -> Any:
        """A copy of `node` with some fields exchanged; see `AbstractRecord.rebuild`.

        With `decide`, the new values are judged as at construction; without, a string or a class
        in the place of data stays data (a tree of labels for an optimizer has such leaves).
        """
        layout = self.split(node)
        values = {n: getattr(node, n) for n in (*layout.data, *layout.config)}
        moved = {
            n
            for n, new in changes.items()
            if n in self.fields
            and n not in self.static
            and (decide or not isinstance(new, (str, type)))
            and is_configuration(new) != (n in layout.config)
        }
        values.update(changes)
        if moved or len(values) > len(layout.data) + len(layout.config):
            layout = self.layout_for({*values}, ({*layout.config} ^ moved) | self.static)
        for name, new in changes.items():
            if name in layout.config:
                refuse_arrays(self.cls, name, new)
        values[LAYOUT] = layout
        return self._make(self.cls, values)

    def is_finished(self, node: Any) -> bool:
        """Whether `node` can change no more."""
        return LAYOUT in node.__dict__

    def early(self, node: Any) -> dict[str, Any] | None:
        """What a pending copy of `node` must hold from the start; see `AbstractRecord.early`.

        Python asks `__getattr__` only where the class itself has no attribute of that name, as it
        has for a field with a default: such a value must be there already.
        """
        if not self.can_wait:
            return None
        config = self.split(node).config
        early = {n: getattr(node, n) for n in self.shown if n in self.names(node)}
        if any(n not in config and type(v) not in _SCALARS for n, v in early.items()):
            return None
        self._open()
        return early

    def _open(self) -> None:
        if not self._is_open:
            open_to_waiting(self.cls)
            self._is_open = True

    def shadow(self, node: Any, source: AbstractSource) -> Any:
        """A stand-in whose fields come from `source`; see `AbstractRecord.shadow`."""
        made = self._make(self.cls, {PENDING: source, LAYOUT: self.split(node)})
        if not self.can_wait:
            source.settle(made)
            return made
        self._open()
        for name in self.shown:
            source.read(made, name)
        return made
