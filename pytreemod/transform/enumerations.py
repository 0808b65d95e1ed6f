"""`Enumeration`: enumerations whose items go through transforms, for results and error codes."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, describe, warn
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.transform.runtime_checks import branched_error_if
from pytreemod.tree.predicates import is_array
from pytreemod.typing import PyTree, Tracer, is_instance

_RESERVED = ("promote", "where", "mro", "_names", "_messages")


class EnumerationItem(Module):
    """One item of an [`Enumeration`][pytreemod.Enumeration]: an integer that knows its class."""

    _value: Any
    _enumeration: type[Enumeration] = field(static=True)

    def __eq__(self, other: object) -> Any:
        return _compared(operator.eq, self._value, self._other_value(other))

    def __ne__(self, other: object) -> Any:
        return _compared(operator.ne, self._value, self._other_value(other))

    def _other_value(self, other: object) -> Any:
        if isinstance(other, EnumerationItem) and other._enumeration is self._enumeration:
            return other._value
        name = self._enumeration.__qualname__
        fact = f"an item of {name} is compared with {describe(other)}"
        raise ArgumentError(fact, hint=f"{name}.promote(item)")

    def __hash__(self) -> int:
        return hash((self._enumeration, int(self._value)))

    def __repr__(self) -> str:
        prefix = f"{self._enumeration.__module__}.{self._enumeration.__qualname__}"
        return f"{prefix}<{'traced' if self.is_traced() else self._enumeration[self]}>"

    def __pdoc__(self, **options: Any) -> Any:
        # A tree prints it as an item, not as a Module with two fields.
        import wadler_lindig as wl

        return wl.TextDoc(repr(self))

    def is_traced(self) -> bool:
        """Whether a transform still decides which item this is, so that its message is unknown."""
        return isinstance(self._value, Tracer)

    def error_if(self, token: PyTree, pred: Any) -> PyTree:
        """Raise an error with this item's message if `pred` is True; see `error_if`.

        Args:
            token: any tree with arrays; returned.
            pred: a boolean or an array of booleans.

        Returns:
            `token`.

        Raises:
            CheckError: if `pred` is True.
        """
        messages = self._enumeration._messages  # pyright: ignore[reportPrivateUsage]  (ours)
        return branched_error_if(token, pred, self._value, messages)


class _EnumerationMeta(type):
    _names: tuple[str, ...]
    _messages: tuple[str, ...]

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        members: dict[str, str] = {}
        for base in bases:
            if isinstance(base, _EnumerationMeta):
                # The items of the bases come first, so they keep their numbers.
                _add(name, members, dict(zip(base._names, base._messages, strict=True)))
        own = {
            key: value
            for key, value in namespace.items()
            if not key.startswith("__") and bases and (key in _RESERVED or not callable(value))
        }
        for key, value in own.items():
            if key in _RESERVED or not isinstance(value, str):
                fact = f"{name}.{key}: an item is a name with a message, not {describe(value)}"
                raise ArgumentError(fact, hint='failed = "The solver failed."')
        _add(name, members, own)
        # Without the members, because Python would find a string in the class before `__getattr__`.
        cls = super().__new__(
            mcs, name, bases, {k: v for k, v in namespace.items() if k not in own}
        )
        cls._names, cls._messages = tuple(members), tuple(members.values())
        return cls

    def __getattr__(cls, name: str) -> EnumerationItem:
        names = cls.__dict__.get("_names", ())
        if name not in names:
            raise AttributeError(
                f"{cls.__qualname__} has no item {name!r}; it has {', '.join(names)}"
            )
        # NumPy, so that naming an item does not start a device.
        return EnumerationItem(np.int32(names.index(name)), cls)  # pyright: ignore[reportArgumentType]

    def __getitem__(cls, item: EnumerationItem) -> Any:
        value = _checked(cls, item, f"{cls.__qualname__}[item]")._value  # pyright: ignore[reportPrivateUsage]  (ours)
        if isinstance(value, Tracer):
            raise ArgumentError(f"{cls.__qualname__}[item]: the item is not known while tracing")
        # After jax.vmap, items are an array.
        return cls._messages[int(value)] if np.ndim(value) == 0 else np.array(cls._messages)[value]

    def __len__(cls) -> int:
        return len(cls._names)

    def __iter__(cls) -> Iterator[EnumerationItem]:
        return (getattr(cls, name) for name in cls._names)

    def __instancecheck__(cls, instance: object) -> bool:
        # An item of a derived class is not one of this class: its number means another item, or
        # none.
        return getattr(instance, "_enumeration", None) is cls

    __contains__ = __instancecheck__

    def __repr__(cls) -> str:
        return f"<enumeration {cls.__qualname__}: {', '.join(cls._names)}>"


def _add(name: str, members: dict[str, str], more: dict[str, str]) -> None:
    """Add members; those that exist already get the new message, with a warning."""
    changed = [
        f"{name}.{key}: {members[key]!r} -> {message!r}"
        for key, message in more.items()
        if members.get(key, message) != message
    ]
    members.update(more)
    if changed:
        warn(UserWarning, f"{name}: an item of a base gets another message", at=changed)


def _compared(compare: Any, one: Any, other: Any) -> Any:
    """Compare the numbers of two items; return a boolean array."""
    # If both are known, so is the result, also in a transform, where jnp would make a tracer.
    is_known = not isinstance(one, Tracer) and not isinstance(other, Tracer)
    with jax.ensure_compile_time_eval() if is_known else nullcontext():
        return jnp.asarray(compare(one, other))


def _checked(cls: Any, item: Any, where: str) -> EnumerationItem:
    if not isinstance(item, EnumerationItem) or item._enumeration is not cls:  # pyright: ignore[reportPrivateUsage]  (ours)
        raise ArgumentError(f"{where}: {describe(item)} is no item of {cls.__qualname__}")
    return item


class Enumeration(metaclass=_EnumerationMeta):
    """Base of enumerations whose items are integers to JAX and messages to people.

    Declare items as class attributes. They contain arrays, so a function under any transform can
    choose between them; `==` returns a boolean array. A subclass has the items of its base and its
    own. It warns if it declares an item again with another message.

    Raises:
        ArgumentError: if a member is not a string, or has a reserved name (`promote`, `where`); if
            items of different classes are compared.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> class Result(pm.Enumeration):
        ...     success = "All is well."
        ...     failure = "It did not work."
        >>> result = Result.where(jnp.asarray(False), Result.success, Result.failure)
        >>> Result[result]
        'It did not work.'
        >>> bool(result == Result.failure)
        True
    """

    @classmethod
    def promote(cls, item: EnumerationItem) -> EnumerationItem:
        """Convert an item of a base class to the item of this class with the same name.

        Args:
            item: an item of a class that this one derives from.

        Returns:
            An item of this class.

        Raises:
            ArgumentError: if `item` belongs to no base of this class. An item of this class itself
                cannot be promoted.
        """
        source: Any = getattr(item, "_enumeration", None)
        if not is_instance(item, EnumerationItem) or source is cls or not issubclass(cls, source):
            raise ArgumentError(f"{cls.__qualname__}.promote: {describe(item)} is of no base of it")
        names = cls._names  # pyright: ignore[reportPrivateUsage]  (its metaclass's)
        table = np.asarray([names.index(name) for name in source._names], np.int32)
        value = item._value  # pyright: ignore[reportPrivateUsage]  (ours)
        traced = isinstance(value, jax.Array)
        return EnumerationItem(jnp.asarray(table)[value] if traced else table[value], cls)  # pyright: ignore[reportArgumentType]

    @classmethod
    def where(cls, pred: Any, a: EnumerationItem, b: EnumerationItem) -> EnumerationItem:
        """`a` if `pred` is True, `b` if it is False.

        Args:
            pred: a boolean, or a scalar boolean array.
            a: an item of this class.
            b: an item of this class.

        Returns:
            An item of this class.

        Raises:
            ArgumentError: if `pred` is not a scalar boolean, or an item is of another class.
        """
        where = f"{cls.__qualname__}.where"
        scalar = isinstance(pred, bool) or (is_array(pred) and jnp.shape(pred) == ())
        if not scalar or jnp.result_type(pred) != jnp.bool_:
            raise ArgumentError(f"{where}: {describe(pred)} is no boolean scalar")
        first = _checked(cls, a, f"{where}(a)")._value  # pyright: ignore[reportPrivateUsage]  (ours)
        second = _checked(cls, b, f"{where}(b)")._value  # pyright: ignore[reportPrivateUsage]  (ours)
        if isinstance(pred, bool):
            return a if pred else b
        if first is second:
            return a
        return EnumerationItem(jnp.where(pred, first, second), cls)  # pyright: ignore[reportArgumentType]
