"""`SameCode`: a function that equals another one that was made by the same code.

A lambda in a loop is a new object each time, so that programs compiled for the last one would not
be found again. Two functions do the same if they have the same code, in one module, and capture
the same variables. These are compared as all static values: values that differ in kind differ,
and so do values without a hash, because they may change.
Globals have the values of the first trace, as for each function that JAX compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from pytreemod.tree.snapshots import exact, static_kind


class SameCode:
    """A function, compared by its code.

    Args:
        fn: any function; a callable of another kind is compared by its own `==`.

    Raises:
        TypeError: if it has no hash.
    """

    __slots__ = ("fn", "key")

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn
        self.key = _key_of(fn)
        hash(self.key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.fn(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameCode) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return getattr(self.fn, "__name__", repr(self.fn))


def _key_of(fn: Any, around: tuple[Any, ...] = ()) -> Any:
    if type(fn) is not FunctionType or fn.__dict__:
        return fn
    around = (*around, fn)
    try:
        cells = tuple(_token(cell.cell_contents, around) for cell in fn.__closure__ or ())
        defaults = tuple(_token(value, around) for value in fn.__defaults__ or ())
        named = tuple((name, _token(x, around)) for name, x in (fn.__kwdefaults__ or {}).items())
        key = fn.__code__, id(fn.__globals__), cells, defaults, named
        hash(key)
    # ValueError: a captured variable has no value yet.
    except (TypeError, ValueError):
        return fn
    return key


def _token(value: Any, around: tuple[Any, ...]) -> Any:
    if type(value) is FunctionType:
        if any(value is fn for fn in around):
            raise TypeError("it calls itself")
        return FunctionType, _key_of(value, around)
    return static_kind(value), exact(value)
