"""Methods that, bound, are pytrees.

A function in a Module's class body is wrapped in a `Method`. Reading it from an instance gives a
`BoundMethod`, whose one child is that instance, so that a bound method passes through every
transform as the Module itself does. This file knows no Module: any pytree can be bound.
"""

from __future__ import annotations

import functools as ft
import inspect
from collections.abc import Callable
from typing import Any

import jax

from pytreemod.tree.nodes import own_class
from pytreemod.tree.predicates import same_static
from pytreemod.typing import jtu

_STAGES = frozenset({"lower", "trace", "eval_shape"})


class BoundMethod(ft.partial):  # noqa: D101  # pyright: ignore[reportMissingTypeArgument]
    # A function bound to its first argument, as a pytree with that argument as its child. It
    # derives from `functools.partial` because a partial is made and called in C: reading and
    # calling a method costs a few times as much as in plain Python, not hundreds. (No docstring:
    # an instance shows its function's.)

    __slots__ = ()

    @property
    def __doc__(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.func.__doc__

    @property
    def __self__(self) -> Any:
        return self.args[0]

    @property
    def __func__(self) -> Callable[..., Any]:
        return self.func

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.func)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __getattr__(self, name: str) -> Any:
        # As for Python's methods, the name, the docstring and so on are the function's.
        # A jitted method is staged for the instance that it is bound to, as a call would be.
        stage = getattr(self.func, "stage_bound", None) if name in _STAGES else None
        return getattr(self.func, name) if stage is None else stage(name, self.args[0])

    def __eq__(self, other: object) -> bool:
        if type(other) is not BoundMethod:
            return NotImplemented
        one, two = self.args[0], other.args[0]
        return self.func == other.func and (one is two or _are_one(one, two))

    def __hash__(self) -> int:
        # Arrays have no hash; a method of a model can be a key nevertheless, as Python's can.
        leaves, treedef = jtu.tree_flatten(self.args[0])
        return hash((self.func, treedef, *(getattr(leaf, "shape", leaf) for leaf in leaves)))

    def __reduce__(self) -> Any:
        owner = self.args[0]
        if own_class(owner) is not type(owner):
            # The function of a class that was made at run time cannot be found by its name.
            return getattr, (owner, self.func.__name__)
        return BoundMethod, (self.func, owner)

    def __pdoc__(self, **kwargs: Any) -> Any:
        import wadler_lindig as wl  # As in tree.printing.

        owner = wl.pdoc(self.args[0], **kwargs)
        return wl.TextDoc(f"<bound method {self.__qualname__} of ") + owner + wl.TextDoc(">")

    def __repr__(self) -> str:
        return f"<bound method {self.__qualname__} of {self.args[0]!r}>"


def _are_one(one: Any, two: Any) -> bool:
    """Whether a program that was traced for a method of one is valid for that of the other.

    JAX remembers the functions that it has traced.
    """
    leaves, treedef = jtu.tree_flatten(one)
    others, structure = jtu.tree_flatten(two)
    return treedef == structure and all(map(same_static, leaves, others))


def _flatten(method: BoundMethod) -> tuple[tuple[Any, ...], Any]:
    return method.args, method.func


def _flatten_with_keys(method: BoundMethod) -> tuple[tuple[tuple[Any, Any]], Any]:
    return ((jtu.GetAttrKey("__self__"), method.args[0]),), method.func


def _unflatten(function: Any, children: Any) -> BoundMethod:
    return BoundMethod(function, *children)


jtu.register_pytree_with_keys(BoundMethod, _flatten_with_keys, _unflatten, _flatten)


class Method:  # noqa: D101
    # Stores a function in a class so that reading it from an instance gives a `BoundMethod`. (No
    # docstring: readers of a class's dict, such as doctest, find the function's.)

    # Not by `__getattr__`, with which reading any attribute takes longer on Python 3.11.
    __slots__ = ("__name__", "__qualname__", "__wrapped__")

    def __init__(self, function: Callable[..., Any]):
        self.__wrapped__ = function
        # A jitted function that is being unpickled has neither yet.
        self.__name__ = getattr(function, "__name__", "")
        self.__qualname__ = getattr(function, "__qualname__", "")

    def __get__(self, node: Any, owner: type | None = None) -> Any:
        return self.__wrapped__ if node is None else BoundMethod(self.__wrapped__, node)

    @property
    def __doc__(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.__wrapped__.__doc__

    @property
    def __module__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.__wrapped__.__module__

    @property
    def __isabstractmethod__(self) -> bool:
        return getattr(self.__wrapped__, "__isabstractmethod__", False)

    def __reduce__(self) -> Any:
        names = {"__name__": self.__name__, "__qualname__": self.__qualname__}
        return Method, (self.__wrapped__,), (None, names)


_FUNCTIONS: tuple[type, ...] = (type(lambda: None), type(jax.jit(lambda: None)))


def as_method(name: str, value: Any) -> Any:
    """Return the attribute to store in a class for `value`, found in its body under `name`.

    Python itself calls methods with names like `__init__`, often on an instance that is half built
    or broken: these are bound the plain way.
    """
    is_bound = isinstance(value, _FUNCTIONS) and (name[:2] != "__" or name == "__call__")
    return Method(value) if is_bound else value
