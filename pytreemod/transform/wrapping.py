"""The common part of all transformed functions.

A transformed function is a pytree: its child is the wrapped function, if that is a pytree. So you
can store it in a field and pass it through other transforms. It binds to instances as a function
does. It keeps the name, docstring and signature of the wrapped function.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.methods import BoundMethod
from pytreemod.module.references import is_by_value, look_up
from pytreemod.transform.tracebacks import with_short_errors
from pytreemod.tree.nodes import is_node
from pytreemod.tree.selecting import Rule
from pytreemod.typing import jtu

_COPIED = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")


class Transformed:
    """A function under a transform; the base of the results of all transforms."""

    __slots__ = ("__dict__", "__weakref__", "fn", "options")

    fn: Callable[..., Any]
    options: Any
    __name__: str
    # The public name: `filter_jit`.
    transform_name: ClassVar[str]

    def __init_subclass__(cls, *, is_fast: bool = False) -> None:
        jtu.register_pytree_with_keys(cls, _flatten_with_keys, _unflatten, _flatten)
        # A fast one shortens its errors itself: one more call would be a tenth of it.
        if "__call__" in vars(cls) and not is_fast:
            cls.__call__ = with_short_errors(vars(cls)["__call__"])

    def __init__(self, fn: Callable[..., Any], options: Any):
        self.fn = fn
        self.options = options
        for name in _COPIED:
            try:
                self.__dict__[name] = getattr(fn, name)
            # A partial, a Module or a user's callable has only some of them.
            except AttributeError:
                continue
        # JAX and errors need a name of every function.
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
        # Identity first: `==` of two Modules compares their arrays.
        same = self.fn is other.fn or bool(self.fn == other.fn)
        return same and self.options == other.options

    def __hash__(self) -> int:
        try:
            return hash((type(self), self.fn, self.options))
        except TypeError:
            # Axes by name are a dict, which has no hash; `==` distinguishes such functions.
            return hash((type(self), self.fn))

    def __reduce__(self) -> Any:
        # A pickle finds a decorated function by its name, as it finds any function.
        name, module = self.__dict__["__qualname__"], self.__dict__.get("__module__", "")
        found: Any = None if is_by_value(module) else look_up(sys.modules.get(module), name)
        return name if found is self else (type(self), (self.fn, self.options))

    def __repr__(self) -> str:
        return f"<{self.transform_name} of {self.__dict__['__qualname__']}>"


class _OfFunction(tuple[Any, ...]):
    """The static part of a function under a transform, with the function itself.

    The latter is not compared. JAX gets it back when it assembles the tree, because making it again
    would take 4 us for `filter_jit`.
    """

    node: Transformed


def _flatten(node: Transformed) -> tuple[tuple[Any, ...], Any]:
    # The arrays of a Module are children, so JAX's transforms see them; a function is structure.
    if is_node(node.fn):
        return (node.fn,), (type(node), None, node.options)
    aux = _OfFunction((type(node), node.fn, node.options))
    aux.node = node
    return (), aux


def _flatten_with_keys(node: Transformed) -> tuple[tuple[Any, ...], Any]:
    children, aux = _flatten(node)
    return tuple((jtu.GetAttrKey("__wrapped__"), child) for child in children), aux


def _unflatten(aux: Any, children: Any) -> Transformed:
    cls, fn, options = aux
    if children:
        return cls(children[0], options)
    # Unless custom rules were defined meanwhile.
    return aux.node if aux.node.options is options else cls(fn, options)


def check_callable(where: str, fn: Any, argument: str = "fun") -> None:
    """Refuse a value that cannot be called.

    Raises:
        ArgumentError: if `fn` is not callable.
    """
    if not callable(fn) or isinstance(fn, Rule):
        raise ArgumentError(f"{where}({argument}): {describe(fn)} is not callable")
