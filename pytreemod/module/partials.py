"""`Partial`, and wrapping functions in Modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pytreemod.module.classes import Module

_M = TypeVar("_M", bound=Module)
_R = TypeVar("_R")


class Partial(Module, Generic[_R]):
    """`functools.partial` as a pytree: the function and its arguments are fields.

    Args:
        func: the function.
        *args: arguments that come before those of the call.
        **kwargs: arguments by keyword, passed with those of the call.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> double = pm.Partial(jnp.multiply, jnp.asarray(2.0))
        >>> pm.filter_jit(double)(jnp.asarray(3.0))
        Array(6., dtype=float32, weak_type=True)
    """

    func: Callable[..., _R]
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def __init__(self, func: Callable[..., _R], /, *args: Any, **kwargs: Any):
        self.func = func
        self.args = args
        self.keywords = kwargs

    def __call__(self, /, *args: Any, **kwargs: Any) -> _R:
        """Call the function: first the stored arguments, then these."""
        return self.func(*self.args, *args, **kwargs, **self.keywords)


_COPIED = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")


def module_update_wrapper(wrapper: _M, wrapped: Any = None) -> _M:
    """Give a Module that wraps a function the function's name, docstring and signature.

    Args:
        wrapper: the Module; its class has a property `__wrapped__`.
        wrapped: the function; by default `wrapper.__wrapped__`.

    Returns:
        A copy of `wrapper` that has these; copies that a transform makes have its class's.

    Examples:
        >>> import pytreemod as pm
        >>> class Twice(pm.Module):
        ...     fn: object
        ...     @property
        ...     def __wrapped__(self):
        ...         return self.fn
        ...     def __call__(self, x):
        ...         return self.fn(self.fn(x))
        >>> def inc(x): return x + 1
        >>> pm.module_update_wrapper(Twice(inc)).__name__
        'inc'
    """
    if wrapped is None:
        wrapped = getattr(wrapper, "__wrapped__")  # noqa: B009  (not every Module has it)
    made = copy.copy(wrapper)
    vars(made).update({name: getattr(wrapped, name) for name in _COPIED if hasattr(wrapped, name)})
    return made
