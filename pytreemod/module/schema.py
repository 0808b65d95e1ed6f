"""The schema of a Module class: everything that follows from its body.

A `Schema` has the fields of one class with all data that construction, flattening and surgery need.
It is computed once when the class is made, and caches the layouts of instances.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax

from pytreemod.module.constraining import take_in_change
from pytreemod.module.division import (
    EXACT,
    Held,
    hides_arrays,
    holds_nothing,
    is_clear_data,
    is_configuration,
    lasts,
    may_hide_arrays,
    warn_of_arrays,
)
from pytreemod.module.fields import CONSTRAINT, CONVERTER, ROLE, STATIC, AbstractConstraint
from pytreemod.module.flattening import Layout, layout_in, note_of
from pytreemod.module.reading import Reading, is_computed, refuse_untied, traits_of
from pytreemod.module.variants import Trait, make_variant
from pytreemod.tree.nodes import DEFAULT_ROLE, AbstractRecord, GivenRoles
from pytreemod.tree.pending import FLAT, PRIVATE, AbstractSource, Private, fill_in, is_private
from pytreemod.tree.renewing import EDITABLE
from pytreemod.tree.stored_fields import stored
from pytreemod.typing import class_of

# The note of roles of an instance (see `roles`).
ROLES = "<roles>"
# The note of names of axes of an instance (see `naming_axes`).
AXES = "<axes>"

_KEPT_BY_TYPE = 64
_SCALARS = (type(None), bool, int, float, complex)


def _kind_in_layout(value: Any) -> Any:
    kind = class_of(value)
    return Held if Held.suits(value) else kind if kind in EXACT else None


class PickledSchema(NamedTuple):
    """The data of a class's schema in a pickle by value."""

    fields: dict[str, dataclasses.Field[Any]]
    # The class's own fields that refer to functions: if copied with the class, these would
    # differ from those in its instances.
    defaults: dict[str, Any]
    overridden: dict[str, Any]
    custom_init: bool
    refusal: str | None
    can_wait: bool
    shown: tuple[str, ...]


class Schema(AbstractRecord):
    """The fields of one Module class.

    Args:
        cls: the class.
        make: makes an instance with a given dict.
        overridden: the attributes that replace fields of bases (see `overriding`).
    """

    def __init__(
        self,
        cls: type,
        make: Callable[[type, dict[str, Any]], Any],
        overridden: dict[str, Any] | None = None,
    ):
        self.cls = cls
        self._make = make
        # For a variant: the schema of its original class. It cannot be called.
        own: Any = vars(cls).get("__passes_for__", cls)
        self.original: Schema = self if own is cls else own.__record__
        self.refusal: str | None = None if own is cls else "made for instances"
        self.reads_otherwise = issubclass(cls, Reading)
        self._variants: dict[frozenset[Trait], Schema] = {}
        self.custom_init = False
        self.computes, self.is_hole = hasattr(cls, "__computes__"), hasattr(cls, "__is_hole__")
        self.written_setattr: Callable[..., None] | None = None
        self.checks: tuple[Callable[[Any], Any], ...] = ()
        self.can_wait = False
        self.shown: tuple[str, ...] = ()
        # For a class that is still empty (see `pickling`): the instances that arrived before it.
        self.early_instances: list[tuple[Any, dict[str, Any], Iterable[str]]] | None = None
        # The function that makes an instance and calls `__init__`, and the one that finishes it
        # then.
        self.build: Callable[..., Any] = cls
        self.finish: Callable[[Any], Any] = lambda node: node
        self._lock = threading.RLock()
        self.read(overridden or {})

    def read(self, overridden: dict[str, Any]) -> None:
        """Compute everything that follows from the fields that `dataclasses` has collected."""
        self.overridden = overridden
        fields = [f for f in dataclasses.fields(self.cls) if f.name not in overridden]
        self.fields = {f.name: f for f in fields}
        self.static = frozenset(f.name for f in fields if f.metadata.get(STATIC))
        self.converters = {f.name: f.metadata[CONVERTER] for f in fields if CONVERTER in f.metadata}
        self.roles = {f.name: f.metadata[ROLE] for f in fields if ROLE in f.metadata}
        # By its class, because the word in the metadata may be another library's.
        declared = {f.name: f.metadata.get(CONSTRAINT) for f in fields}
        self.constraints = {n: c for n, c in declared.items() if isinstance(c, AbstractConstraint)}
        self._layouts: dict[Any, Layout] = {}
        # The layouts of instances by the types of all fields, with the names of configuration
        # that may contain arrays, and a function there that contains none. Finishing an instance
        # looks here first, at a twentieth of the cost (0.3 us instead of 6). The table only has
        # permanent objects.
        self.layouts_by_type: dict[tuple[type, ...], tuple[Layout, tuple[Any, ...]]] = {}
        # Types of field values that may be assigned without a check.
        self.simple_types: set[type] = set()
        if self.original is not self:
            # A variant passes for its class: `dataclasses` finds no other fields.
            own = vars(self.original.cls)["__dataclass_fields__"]
            type.__setattr__(self.cls, "__dataclass_fields__", own)

    def apart(self, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the attributes of an instance and its notes, which a pickle has in one dict."""
        notes = {n for n in values if is_private(n) and n not in self.fields}
        attributes = {n: value for n, value in values.items() if n not in notes}
        return attributes, {n: values[n] for n in notes}

    def layout_for(
        self, values: dict[str, Any], config: Iterable[str], notes: Mapping[str, Any] = Layout.notes
    ) -> Layout:
        """Return the unique layout for these values, given the names of configuration.

        A name that is not a field is configuration: `module_update_wrapper` adds such names.
        """
        data = tuple(n for n in self.fields if n in values and n not in config)
        rest = tuple(n for n in self.fields if n in values and n in config)
        extra = tuple(sorted(n for n in values if n not in self.fields and not is_private(n)))
        rest += extra
        key = (data, rest, tuple(_kind_in_layout(values[n]) for n in rest))
        with self._lock:
            layout = self._layouts.get(key)
            if layout is None:
                self._layouts[key] = layout = Layout(
                    self.cls, *key, extra, self.can_wait, self.shown
                )
                if layout.held:
                    EDITABLE[self.cls] = True
        return layout.with_notes(notes)

    def decide(self, values: dict[str, Any], notes: Mapping[str, Any] = Layout.notes) -> Layout:
        """Return the layout that an instance with these values gets when it is built."""
        fields = {n: values[n] for n in self.fields if n in values}
        auto = {n for n, v in fields.items() if n not in self.static and is_configuration(v)}
        return self.layout_for(fields, auto | self.static, notes)

    def for_values(self, values: dict[str, Any]) -> Schema:
        """The schema of the class of an instance with these values: the class, or a variant."""
        original, traits = self.original, frozenset(traits_of(values))
        if not traits:
            return original
        with original._lock:
            if traits not in original._variants:
                original._variants[traits] = make_variant(original.cls, traits).__record__
            return original._variants[traits]

    def note_types(self, layout: Layout, values: dict[str, Any]) -> None:
        """Record that instances with values of such types have this layout.

        Called when the values have passed all tests.
        """
        self.simple_types.update(class_of(v) for v in values.values() if holds_nothing(v))
        if layout.extra or layout.notes or self.computes:
            return  # Each instance has its own.
        config = [values[name] for name in layout.config]
        if any(map(hides_arrays, config)) or not all(map(lasts, map(class_of, config))):
            return
        if not all(is_clear_data(values[n]) for n in layout.data):
            return
        if len(self.layouts_by_type) >= _KEPT_BY_TYPE:
            self.layouts_by_type.clear()
        asked = [(name, values[name]) for name in layout.config if may_hide_arrays(values[name])]
        asked = tuple([(name, value if lasts(value) else None) for name, value in asked])
        self.layouts_by_type[tuple(class_of(values[n]) for n in self.fields)] = layout, asked

    def split(self, node: Any) -> Layout:
        """Return the layout of an instance; decided by its values if it was built by hand."""
        layout = layout_in(node.__stored__)
        if layout is None:
            fill_in(node)
            layout = layout_in(node.__stored__)
        return self.decide(node.__stored__) if layout is None else layout

    def names(self, node: Any) -> tuple[str, ...]:
        """Return all fields of `node` that are set, in order."""
        layout = self.split(node)
        return (*filter({*layout.data, *layout.config}.__contains__, self.fields),)

    def data_names(self, node: Any) -> tuple[str, ...]:
        """Return the fields of `node` that are children of the pytree."""
        return self.split(node).data

    def role(self, name: str) -> str:
        """Return the role that the field declares."""
        return self.roles.get(name, DEFAULT_ROLE)

    def given_roles(self, node: Any) -> GivenRoles:
        """Return the roles given to paths in `node`; see `AbstractRecord.given_roles`."""
        return note_of(node, ROLES)

    def rebuild(
        self, node: Any, changes: dict[str, Any], is_given: bool = False, decide: bool = False
    ) -> Any:
        """Copy `node` with some fields replaced; see `AbstractRecord.rebuild`.

        With `decide`, the new values are judged as at construction. Without it, a string or a class
        instead of data remains data (a tree of labels for an optimizer has such leaves).
        """
        layout = self.split(node)
        fill_in(node)
        fields = node.__stored__
        if is_given and self.constraints:
            changes = self._constrained(fields, changes, decide)
        # Surgery calls this for every node that it changes, mostly with new arrays for old ones. So
        # the dict is copied as a whole (0.1 us, instead of 0.35 name by name), and an array is
        # checked first: it never becomes configuration, and is not a computed leaf (0.1 us, instead
        # of 0.6).
        if len(fields) == layout.size + (FLAT in fields) and PRIVATE in fields:
            values = {**fields, **changes}
            values.pop(FLAT, None)
        else:
            # The other entries belong to this instance alone: its snapshot, cached properties.
            values = {name: fields[name] for name in (*layout.data, *layout.config)}
            values.update(changes)
        schema, computes, is_same = self, self.reads_otherwise, True
        for name, new in changes.items():
            if name in layout.data:
                if isinstance(new, jax.Array):
                    continue
                is_same = is_same and not self._is_moved(layout, name, new, decide)
            else:
                is_same = False
            computes = computes or is_computed(new)
        if not is_same:
            layout = self._layout_after(layout, values, changes, decide)
        if computes:
            refuse_untied(node, changes)
            schema = self.for_values({**values, **layout.notes})
            layout = schema.layout_for(values, layout.config, layout.notes)
        values[PRIVATE] = layout
        return self._make(schema.cls, values)

    def renewed(self, node: Any, changes: dict[str, Any]) -> Any:
        """Copy `node` with new lists and dicts; see `AbstractRecord.renewed`."""
        layout = self.split(node)
        if not changes and not layout.held:
            return node
        changes |= {name: Held(stored(node, name)).give() for name in layout.held}
        values = {name: stored(node, name) for name in (*layout.data, *layout.config)}
        return self._make(self.cls, {**values, **changes, PRIVATE: layout})

    def _constrained(
        self, values: dict[str, Any], changes: dict[str, Any], decide: bool
    ) -> dict[str, Any]:
        """New values in their stored form, where fields are constrained."""
        made = dict(changes)
        for name in changes.keys() & self.constraints.keys():
            where = f"{self.cls.__qualname__}.{name}"
            old, new = values.get(name), changes[name]
            constraint = self.constraints[name]
            made[name] = take_in_change(constraint, old, new, where, is_built=decide)
        return made

    def _is_moved(self, layout: Layout, name: str, new: Any, decide: bool) -> bool:
        """Whether a new value is configuration where the old one was data, or vice versa."""
        if is_configuration(new) == (name in layout.config):
            return False
        return decide or not isinstance(new, (str, type))

    def _layout_after(
        self, layout: Layout, values: dict[str, Any], changes: dict[str, Any], decide: bool
    ) -> Layout:
        """Return the layout of an instance in which more has changed than leaves of its data."""
        free = [n for n in changes if n in self.fields and n not in self.static]
        moved = {n for n in free if self._is_moved(layout, n, changes[n], decide)}
        found = self.layout_for(values, ({*layout.config} ^ moved) | self.static, layout.notes)
        for name, new in changes.items():
            if name in found.config:
                warn_of_arrays(self.cls, name, new)
        return found

    def is_finished(self, node: Any) -> bool:
        """Whether `node` can no longer change."""
        layout = layout_in(node.__stored__)
        return layout is not None and not layout.held

    def early(self, node: Any) -> dict[str, Any] | None:
        """The values that a pending copy of `node` needs at once; see `AbstractRecord.early`.

        Where the class has an attribute of a field's name, such as a default, Python would
        read that: such a value must be set from the start.
        """
        if not self.can_wait:
            return None
        layout = self.split(node)
        config = layout.config
        early = {n: stored(node, n) for n in self.shown if n in self.names(node)}
        if any(n not in config and type(v) not in _SCALARS for n, v in early.items()):
            return None
        # The class has no `Waiting` for these: they are not fields.
        extra = {n: stored(node, n) for n in layout.extra}
        return {PRIVATE: layout, **extra, **early}

    def proxy(self, node: Any, source: AbstractSource) -> Any:
        """Return a proxy whose fields come from `source`; see `AbstractRecord.proxy`."""
        layout = self.split(node)
        values: dict[str, Any] = {PRIVATE: Private(layout, source)}
        # Values that are not fields cannot be requested: they must be set when the proxy is
        # flattened.
        for name in layout.extra:
            values[name] = stored(node, name)
        made = self._make(self.cls, values)
        if not self.can_wait:
            source.fill_in(made)
            return made
        for name in self.shown:
            source.read(made, name)
        return made
