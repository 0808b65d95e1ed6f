"""Pickling and copying Modules, and their classes, where cloudpickle pickles these by value.

A pickle of an instance has its class, its fields in their stored form, and its notes. A
pickle of an older version of the class becomes an instance of the present class.

A class of a script or a notebook is in no module that another process could import. cloudpickle
makes an empty class there, memorizes it, and fills it attribute by attribute, because a method may
refer to its own class. So the empty class has a schema without fields. It is read again when the
schema of the pickled class arrives (`fill`); instances that arrive earlier wait for that.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
from types import FunctionType
from typing import Any

from pytreemod.module.construction import all_of, fill_restored, put_together, refuse_version
from pytreemod.module.division import is_configuration
from pytreemod.module.fields import declares
from pytreemod.module.methods import Method
from pytreemod.module.records import make_record, set_fields
from pytreemod.module.references import Reference, referred, referring, share_functions
from pytreemod.module.schema import PickledSchema, Schema
from pytreemod.tree.nodes import own_class
from pytreemod.tree.pending import PRIVATE, is_private
from pytreemod.tree.stored_fields import reading_stored, stored
from pytreemod.typing import class_of

# ---- classes


def _reduce_schema(schema: Schema) -> Any:
    fields: dict[str, Any] = vars(schema.cls)["__dataclass_fields__"]
    own = {n: referring(f.default) for n, f in fields.items() if declares(schema.cls, n)}
    defaults = {name: value for name, value in own.items() if class_of(value) is Reference}
    rest = (schema.overridden, schema.custom_init, schema.refusal, schema.can_wait, schema.shown)
    return PickledSchema, (fields, defaults, *rest)


copyreg.pickle(Schema, _reduce_schema)  # pyright: ignore[reportArgumentType]


def is_skeleton(namespace: dict[str, Any]) -> bool:
    """Whether cloudpickle made a class; a class statement defines a `__qualname__`, too."""
    return {"__module__"} == namespace.keys() - {"__orig_bases__"}


def is_own(name: str, value: Any) -> bool:
    """Whether a class makes an attribute itself, and so does not take it from a pickled class."""
    if name in ("__record__", "__dataclass_fields__"):
        return True
    # A wrapper of such a function copies its marks, but is not one.
    is_plain = class_of(value) is FunctionType and not hasattr(value, "__wrapped__")
    return is_plain and hasattr(value, "is_written")


def fill(schema: Schema, pickled: PickledSchema) -> None:
    """Read the fields of an empty class; cloudpickle sets its methods."""
    cls, fields = schema.cls, pickled.fields
    for name, field in fields.items():
        owner = next((b for b in cls.__mro__[1:] if declares(b, name)), None)
        if owner is not None and not declares(cls, name) and name not in pickled.overridden:
            # The field of a base, which may be another object than the pickled copy.
            fields[name] = vars(owner)["__dataclass_fields__"][name]
            continue
        for option in ("default", "default_factory", "kw_only"):
            # The mark for a missing value is recognized by identity, which a pickle does not
            # preserve.
            if class_of(getattr(field, option)) is class_of(dataclasses.MISSING):
                setattr(field, option, dataclasses.MISSING)
    for name, default in pickled.defaults.items():
        fields[name].default = default
    type.__setattr__(cls, "__dataclass_fields__", fields)
    schema.read(pickled.overridden)
    schema.custom_init, schema.refusal = pickled.custom_init, pickled.refusal
    schema.can_wait, schema.shown = pickled.can_wait, pickled.shown
    for name, declared in schema.fields.items():
        found: Any = vars(cls).get(name)
        is_default = class_of(found) is Method and found.__wrapped__ is declared.default
        if is_default or name in pickled.defaults:
            # It arrived when it was not yet known to be a value, or as a copy.
            type.__setattr__(cls, name, declared.default)
    for node, values, config in schema.early_instances or ():
        attributes, notes = schema.apart(values)
        set_fields(node, {**attributes, PRIVATE: schema.layout_for(attributes, config, notes)})
    schema.early_instances = None


# ---- instances


def reduced(self: Any) -> Any:
    """Return the result of a Module's `__reduce__`."""
    cls: Any = own_class(self)
    layout, values = class_of(self).__record__.split(self), all_of(self)
    if not _has_own_state(class_of(self)):
        unset = tuple(name for name in cls.__record__.fields if name not in values)
        return restore, (cls, referring(values), (*layout.config, *unset))
    # Computed and tied values are pickled in their stored form.
    with reading_stored():
        state: Any = values if cls.__getstate__ is _DEFAULT_GETTER else self.__getstate__()
    if class_of(state) is dict:
        # Python's own getter returns the whole dict.
        state = {name: value for name, value in state.items() if not is_private(name)}
    return restore_state, (cls, referring(state), referring(dict(layout.notes)))


def restore(cls: Any, values: dict[str, Any], config: tuple[str, ...]) -> Any:
    """Rebuild a pickled or copied instance.

    A pickle of an older version of the class gets the defaults of new fields.

    Args:
        cls: the class.
        values: of fields and notes, by name.
        config: the names of configuration; and of fields that were not set.

    Raises:
        FieldError: if the class has other fields now.
    """
    schema: Schema = cls.__record__
    values = dict(referred(values))
    if schema.early_instances is not None:
        node = make_record(cls, {})
        schema.early_instances.append((node, values, config))
        return node
    if hasattr(cls, "__setstate__"):
        # The class had no such method when this was pickled.
        return restore_state(cls, *schema.apart(values))
    given = {*values}
    fill_restored(schema, values, config)
    refuse_version(schema, values, config)
    # A field that was static then may be data now. A value that was data stays data: a tree of
    # labels has strings there.
    free = {name: values[name] for name in values.keys() - given | {*config} if name in values}
    moved = {name for name, value in free.items() if is_configuration(value)}
    return put_together(cls, values, schema.static | moved)


def restore_state(cls: Any, state: Any, notes: Any = None) -> Any:
    """Make an instance from a pickled state, by the class's own method, with the notes."""
    node = make_record(cls, {})
    _set_state(node, referred(state))
    if PRIVATE in node.__stored__:
        return node
    values, notes = node.__stored__, dict[str, Any](referred(notes) or ())
    fill_restored(cls.__record__, values)
    schema = cls.__record__.for_values({**values, **notes})
    values[PRIVATE] = schema.decide(values, notes)
    return node if schema.cls is cls else make_record(schema.cls, values)


def _set_state(node: Any, state: Any) -> None:
    if hasattr(node, "__setstate__"):
        node.__setstate__(state)
        return
    # As in Python, it may be two dicts, of which the second is for slots.
    parts: Any = state if class_of(state) is tuple else (state,)
    for values in parts:
        node.__stored__.update(values or {})


_DEFAULT_GETTER = object.__getstate__


def _has_own_state(cls: Any) -> bool:
    """Whether a user's class defines how it is pickled or restored."""
    return cls.__getstate__ is not _DEFAULT_GETTER or hasattr(cls, "__setstate__")


def deep_copied(node: Any, memo: dict[int, Any]) -> Any:
    """Return the result of a Module's `__deepcopy__`."""
    if _pickles_itself(class_of(node)):
        return _deep_copy_as_pickled(node, memo)
    # Configuration is shared: a copied jitted function would be another function.
    layout = class_of(node).__record__.split(node)
    shared = {n: stored(node, n) for n in layout.config if n not in layout.held}
    copied = {n: stored(node, n) for n in (*layout.data, *layout.held)}
    share_functions(copied, memo)
    return make_record(class_of(node), {PRIVATE: layout, **shared, **copy.deepcopy(copied, memo)})


def _pickles_itself(cls: Any) -> bool:
    is_custom = cls.__reduce__ is not reduced or cls.__reduce_ex__ is not object.__reduce_ex__
    # A variant is copied as the class that it is a variant of.
    return (is_custom and not hasattr(cls, "__passes_for__")) or _has_own_state(cls)


def _deep_copy_as_pickled(node: Any, memo: dict[int, Any]) -> Any:
    """Do as `copy.deepcopy` does for a class without `__deepcopy__`."""
    reduction: Any = node.__reduce_ex__(4)
    if isinstance(reduction, str):
        return node
    make: Any = reduction[0]
    arguments, state = reduction[1], reduction[2] if len(reduction) > 2 else None
    made = make(*copy.deepcopy(arguments, memo))
    memo[id(node)] = made
    if state is not None:
        _set_state(made, copy.deepcopy(state, memo))
    return made
