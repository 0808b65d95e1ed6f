"""Immutable instances: a Module before it is a dataclass or a pytree.

Owns how fields are stored (in the instance's dict, beside its layout), which entries `vars(model)`
shows, and the effect of an assignment, before and after the instance is finished.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from typing import Any, NoReturn, cast

from pytreemod.errors import FieldError, FrozenError, nearest
from pytreemod.module.flattening import Flattened
from pytreemod.module.methods import BoundMethod
from pytreemod.module.overriding import is_bound, refuse_overridden
from pytreemod.module.schema import Schema
from pytreemod.tree.nodes import record_of
from pytreemod.tree.pending import (
    FLAT,
    ORIGINAL_CLASS,
    PRIVATE,
    fill_in,
    is_being_built,
    is_private,
)
from pytreemod.tree.predicates import is_array_like
from pytreemod.tree.stored_fields import stored
from pytreemod.typing import class_of


class _HasDict:
    """Its subclasses have a dict, which only this class exposes under its usual name."""


class FieldsDict:
    """The `__dict__` of Module classes: shows the fields, and no other entries.

    Python finds attributes in the dict itself, and the library uses `__stored__`, so no call
    pays for it. Not a `property`, which cloudpickle takes for a part of the user's class.
    """

    __slots__ = ()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        if is_being_built(instance):
            return instance.__stored__
        fill_in(instance)
        return _Shown(instance)

    def __set__(self, instance: Any, values: dict[str, Any]) -> None:
        if not is_being_built(instance):
            refuse_assignment(instance, "__dict__", values)
        set_fields(instance, values)


class Record(_HasDict):
    """Base of Modules: assignable while it is being built, immutable from then on."""

    # No annotation, because the type hints of a Module class would include it.
    __record__ = cast(Schema, None)
    # The instance's own dict, with its layout and the other entries beside the fields.
    __stored__ = vars(_HasDict)["__dict__"]
    __dict__ = cast(dict[str, Any], FieldsDict())
    __flat__ = cast(Any, Flattened())

    def __setattr__(self, name: str, value: Any) -> None:
        values = self.__stored__
        if FLAT in values or PRIVATE in values:
            if name == ORIGINAL_CLASS:
                values[name] = value
                return
            refuse_assignment(self, name, value)
        if name not in self.__record__.fields and name != ORIGINAL_CLASS:
            if name in self.__record__.overridden:
                _assign_overridden(self, name, value)
                return
            if name == "__dict__":
                set_fields(self, value)
                return
            refuse_undeclared(self, name, value)
        if type(value) in _MAY_HOLD_SELF or isinstance(value, Record):
            refuse_itself(self, name, value)
        values[name] = value

    def __delattr__(self, name: str) -> None:
        if is_being_built(self):
            object.__delattr__(self, name)
            return
        _refuse_deletion(self, name)


set_fields = vars(_HasDict)["__dict__"].__set__
"""Gives a record its dict: `set_fields(record, {...})`, bypassing `__setattr__`."""

_new: Callable[[type], Any] = object.__new__


class _Shown(dict[str, Any]):
    """The fields of a finished record, with the values that reading gives; they cannot be changed.

    Under a name that is not a field, values are stored with the instance, where Python finds them
    as its attributes: so `functools.cached_property` works. Copies do not have them.
    """

    __slots__ = ("_node",)

    def __init__(self, node: Any):
        values: dict[str, Any] = node.__stored__
        # In order.
        fields: dict[str, Any] = class_of(node).__record__.fields
        # Listed immediately, because another thread may be filling it in.
        names = [*fields, *list(values)]
        shown = {n: values[n] for n in names if n in values and not is_private(n)}
        if class_of(node).__record__.reads_otherwise:
            shown |= {n: getattr(node, n) for n in fields if n in shown}
        super().__init__(shown)
        self._node = node

    def __setitem__(self, name: str, value: Any) -> None:
        if name in class_of(self._node).__record__.fields or is_private(name):
            refuse_assignment(self._node, name, value)
        self._node.__stored__[name] = value
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        if name in class_of(self._node).__record__.fields:
            _refuse_deletion(self._node, name)
        super().__delitem__(name)
        del self._node.__stored__[name]

    # By the two methods above, which `dict` itself would not call.
    update, setdefault = MutableMapping[str, Any].update, MutableMapping[str, Any].setdefault
    popitem, clear = MutableMapping[str, Any].popitem, MutableMapping[str, Any].clear
    pop = MutableMapping[str, Any].pop  # pyright: ignore[reportAssignmentType]  (as `dict.pop`)

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def add_fields(node: Any, values: dict[str, Any]) -> None:
    """Give a record that is being built more fields; those that are set are preserved.

    Raises:
        FrozenError: if it is finished, or pending.
    """
    if not is_being_built(node):
        _refuse_finished(node)
    node.__stored__.update(values)


def write_setattr(schema: Schema) -> None:
    """Give a class whose own `__init__` assigns to its fields its own `__setattr__`.

    It accepts the most common assignment in one test without a look-up: to a field, of a value that
    contains nothing, while the instance is being built. The next class decides about the rest, and
    about instances of subclasses, which may have a `__setattr__` in between. It saves a quarter of
    the time of building such an instance (1.5 us instead of 2.0, for five fields). To switch it
    off, let this function return immediately.

    Called while the class is made: replacing it later, while other threads are calling it, crashes
    Python 3.11.
    """
    cls = schema.cls
    if _setattr_owner(cls) is not Record:
        return
    names, kinds = frozenset(schema.fields), schema.simple_types

    def __setattr__(self: Any, name: str, value: Any) -> None:
        values = self.__stored__
        is_own = type(self) is cls and FLAT not in values and PRIVATE not in values
        kind = class_of(value)
        is_simple = kind in kinds or (kind is tuple and kinds.issuperset(map(type, value)))
        if is_own and name in names and is_simple:
            values[name] = value
        else:
            super(cls, self).__setattr__(name, value)

    __setattr__.is_written = True  # pyright: ignore[reportFunctionMemberAccess]  (a mark of ours)
    schema.written_setattr = __setattr__
    type.__setattr__(cls, "__setattr__", __setattr__)


def _setattr_owner(cls: type) -> type:
    """Return the class that would provide `__setattr__`, apart from the ones generated here."""
    return next(base for base in cls.__mro__ if _has_own_setattr(base))


def _has_own_setattr(cls: type) -> bool:
    own, schema = vars(cls).get("__setattr__"), vars(cls).get("__record__")
    return own is not None and own is not getattr(schema, "written_setattr", None)


class ClassValue:
    """An attribute that replaces a field of an existing class.

    Python finds it before it calls `__getattr__`, which fills a pending instance in, so it does
    that itself.
    """

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any):
        self.name, self.value = name, value

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        found = self if instance is None else stored(instance, self.name, self)
        if found is not self:
            return found
        value = self.value
        return value.__get__(instance, owner) if is_bound(value) else value


def make_record(cls: type, values: dict[str, Any]) -> Any:
    """Return an instance of `cls` with this dict; no other code runs."""
    made = _new(cls)
    set_fields(made, values)
    return made


def _refuse_deletion(node: Any, name: str) -> NoReturn:
    cls = type(node).__qualname__
    raise FrozenError(
        f"cannot delete {cls}.{name}: Modules are immutable",
        hint=f"model = model.replace({name}=None)",
    )


def refuse_assignment(node: Any, name: str, value: Any) -> None:
    """Raise the error for an assignment to a finished Module."""
    cls, fields = type(node).__qualname__, class_of(node).__record__.fields
    if _is_in_init(node):
        _refuse_finished(node, f" (cannot assign to field {name!r})")
    if name != "__dict__" and name not in fields:
        refuse_undeclared(node, name, value)
    raise FrozenError(
        f"cannot assign to {cls}.{name}: Modules are immutable",
        hint=f"model = model.replace({'**values' if name == '__dict__' else f'{name}=...'})",
    )


def _declaration(name: str, value: Any) -> str:
    kind = "jax.Array" if is_array_like(value) or value is None else type(value).__name__
    if type(value) in (bool, int, float, str):
        kind = f"{type(value).__name__} = pm.field(static=True)"
    return f"{name}: {kind}  # in the class body"


def _is_in_init(node: Any) -> bool:
    """Whether the assignment is in an `__init__` that is called for this instance."""
    frame: Any = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  (public in effect)
    while frame is not None and frame.f_code.co_name == "__setattr__":
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "__init__" or not frame.f_code.co_varnames:
        return False
    return frame.f_locals.get(frame.f_code.co_varnames[0]) is node


def refuse_undeclared(node: Any, name: str, value: Any) -> None:
    """Raise the error for an attribute that no field declares."""
    cls = type(node).__qualname__
    known = class_of(node).__record__.fields
    raise FrozenError(
        f"cannot assign to {cls}.{name}: the class declares no such field{nearest(name, known)}",
        hint=_declaration(name, value),
    )


def _assign_overridden(node: Any, name: str, value: Any) -> None:
    """Pass an assignment on to the attribute that replaces the field, if that accepts any."""
    found = class_of(node).__record__.overridden[name]
    takes = found.fset is not None if isinstance(found, property) else hasattr(found, "__set__")
    if not takes:
        refuse_overridden(class_of(node), name, found, value)
    object.__setattr__(node, name, value)


_MAY_HOLD_SELF = (BoundMethod, list, tuple, dict)


def refuse_itself(node: Any, name: str, value: Any) -> None:
    """Refuse a field's value that contains the instance itself, such as its own bound method.

    Checks the value and its direct contents: deeper down, the instance could only be inside another
    Module, which was checked when it was built.

    Raises:
        FieldError: if the instance would contain itself.
    """
    within: Any = value  # Type checkers would narrow `value` to containers of unknown items.
    inside: list[Any]
    if class_of(value) is BoundMethod or value is node:
        inside = [value]
    elif isinstance(value, dict):
        inside = list(within.values())
    elif isinstance(value, (list, tuple)):
        inside = list(within)
    elif record_of(value) is not None:
        fill_in(within)
        inside = list(within.__stored__.values())
    else:
        # A transformed function. Nodes of other kinds are not opened: building never flattens.
        inside = [getattr(value, "__wrapped__", None)]
    for found in inside:
        if found is node:
            _refuse_own(node, name, "the instance")
        if class_of(found) is BoundMethod and found.__self__ is node:
            _refuse_own(node, name, f"its own method {found.__name__!r}")


def _refuse_own(node: Any, name: str, what: str) -> None:
    cls = type(node).__qualname__
    raise FieldError(
        f"{cls}.{name}",
        "a value that does not contain the instance itself",
        f"{what}. Cannot assign methods in __init__",
        hint=[
            "a tree cannot contain itself; write a method instead:",
            f"def {name}(self, *args): ...",
        ],
    )


def _refuse_finished(node: Any, what: str = "") -> NoReturn:
    cls = type(node).__qualname__
    raise FrozenError(
        f"{cls}.__init__",
        "an instance that is being built",
        f"a finished instance, which is immutable{what}",
        hint=[
            "create another; a transform of __init__ gets a copy, so transform the class:",
            f"model = {type(node).__name__}(...)",
            f"model = pm.filter_jit({type(node).__name__})(...)",
            f"models = pm.filter_vmap({type(node).__name__})(...)",
        ],
    )
