"""What every transformed function has in common.

A transformed function is a pytree (its child is the function it wraps, if that is a pytree), so
that it can be stored in a field and passed through other transforms; it binds to instances as a
function does; and it keeps the name, docstring and signature of what it wraps.
"""

from __future__ import annotations

import functools as ft
import inspect
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pytreemod.errors import ArgumentError, describe, explain
from pytreemod.module.methods import BoundMethod
from pytreemod.tree.nodes import is_node
from pytreemod.tree.selecting import Rule
from pytreemod.typing import jtu

_COPIED = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")


class Transformed:
    """A function under a transform; the base of what each transform returns."""

    # One letter short, for they are read in every call.
    __slots__ = ("__dict__", "__weakref__", "fn", "options")

    fn: Callable[..., Any]
    options: Any

    def __init_subclass__(cls) -> None:
        jtu.register_pytree_with_keys(cls, _flatten_with_keys, _unflatten, _flatten)

    def __init__(self, fn: Callable[..., Any], options: Any):
        self.fn = fn
        self.options = options
        for name in _COPIED:
            try:
                self.__dict__[name] = getattr(fn, name)
            except AttributeError:
                continue
        self.__dict__.setdefault("__name__", type(fn).__name__)
        self.__dict__.setdefault("__qualname__", type(fn).__qualname__)

    @abstractmethod
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function under the transform."""

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundMethod(self, instance)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, Transformed):
            return NotImplemented
        same = self.fn is other.fn or bool(self.fn == other.fn)
        return same and self.options == other.options

    def __hash__(self) -> int:
        try:
            return hash((type(self), self.fn, self.options))
        except TypeError:
            # Axes by name are a dict, which has no hash: equal functions are told apart by `==`.
            return hash((type(self), self.fn))

    def __reduce__(self) -> Any:
        # A decorated function is found by its name, as any function is when it is pickled.
        name = self.__dict__["__qualname__"]
        found: Any = sys.modules.get(self.__dict__.get("__module__", ""))
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (type(self), (self.fn, self.options))

    def __repr__(self) -> str:
        return f"<{self.transform_name()} of {self.__dict__['__qualname__']}>"

    @classmethod
    def transform_name(cls) -> str:
        """The transform as the reader knows it: `filter_jit`."""
        return cls.__name__


def _flatten(node: Transformed) -> tuple[tuple[Any, ...], Any]:
    if is_node(node.fn):
        return (node.fn,), (type(node), None, node.options)
    return (), (type(node), node.fn, node.options)


def _flatten_with_keys(node: Transformed) -> tuple[tuple[Any, ...], Any]:
    children, aux = _flatten(node)
    return tuple((jtu.GetAttrKey("__wrapped__"), child) for child in children), aux


def _unflatten(aux: Any, children: Any) -> Transformed:
    cls, fn, options = aux
    return cls(children[0] if children else fn, options)


def parameters_of(fn: Callable[..., Any]) -> tuple[inspect.Parameter, ...] | None:
    """The parameters of a function; None if Python cannot tell."""
    try:
        return tuple(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None


def positional_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters that may be given by position, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters_of(fn) or () if p.kind in kinds)


def place_keywords(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move arguments given by keyword to their positions, as far as there is no gap."""
    placed = list(args)
    rest = dict(kwargs)
    for name in names[len(args) :]:
        if name not in rest:
            break
        placed.append(rest.pop(name))
    return tuple(placed), rest


def check_names(where: str, names: tuple[str, ...], fn: Any) -> None:
    """Refuse names that are not those of arguments of a function, as far as Python can tell.

    Raises:
        ArgumentError: there are some.
    """
    parameters = parameters_of(fn)
    if parameters is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ArgumentError(
            explain(
                where,
                f"names of arguments of {function_name(fn)} ({', '.join(known)})",
                ", ".join(map(repr, unknown)),
            )
        )


def check_options(where: str, options: Iterable[str], function: Callable[..., Any]) -> None:
    """Refuse options that JAX's own transform does not have.

    Args:
        where: our transform.
        options: the names of what was given for JAX's.
        function: JAX's transform.

    Raises:
        ArgumentError: it has no such option.
    """
    unknown = [name for name in options if name not in _options_of(function)]
    if unknown:
        raise ArgumentError(
            explain(
                where,
                f"its own options and those of jax.{function_name(function)}",
                ", ".join(f"{name}=" for name in unknown),
            )
        )


@ft.lru_cache(maxsize=64)
def _options_of(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(parameter.name for parameter in parameters_of(function) or ())


def check_count(where: str, value: Any, least: int = 0) -> None:
    """Refuse what is no count.

    Raises:
        ArgumentError: `value` is no int, or is less than `least`.
    """
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_int or value < least:
        expected = "a count" if least == 0 else f"an int from {least} on"
        raise ArgumentError(explain(where, expected, describe(value)))


def check_callable(where: str, fn: Any, argument: str = "fun") -> None:
    """Refuse to transform what cannot be called.

    Raises:
        ArgumentError: `fn` is not callable.
    """
    if not callable(fn) or isinstance(fn, Rule):
        raise ArgumentError(explain(f"{where}({argument})", "something callable", describe(fn)))


def argument_name(names: tuple[str, ...], index: int) -> str:
    """What to call the argument at a position in an error."""
    return names[index] if index < len(names) else f"args[{index}]"


def function_name(fn: Any) -> str:
    """What to call a function in an error, or in a compiled program."""
    return getattr(fn, "__name__", None) or type(fn).__name__
