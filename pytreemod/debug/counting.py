"""Counting traces of a function, whatever traces it."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable
from typing import Any, TypeVar, overload

from pytreemod.errors import ArgumentError, describe
from pytreemod.transform.arguments import Parameters, function_name
from pytreemod.transform.retraces import TraceLog
from pytreemod.transform.wrapping import Transformed, check_callable

_F = TypeVar("_F", bound=Callable[..., Any])


class _Counted(Transformed):
    """A function that counts its calls, which under a transform are its traces."""

    __slots__ = ()

    options: TraceLog
    transform_name = "assert_max_traces"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Count the call, and make it."""
        self.options.add(Parameters.of(self.fn).named(args, kwargs))
        return self.fn(*args, **kwargs)


@overload
def assert_max_traces(fn: _F, *, max_traces: int | None) -> _F: ...
@overload
def assert_max_traces(*, max_traces: int | None) -> Callable[[_F], _F]: ...
def assert_max_traces(fn: Any = None, *, max_traces: int | None) -> Any:
    """Raise an error if a function is traced too often.

    Put it *under* the transform: every call of the function itself counts.

    Args:
        fn: the function; without it, a decorator is returned.
        max_traces: the number of allowed calls; None to count only.

    Returns:
        A function of the same signature.

    Raises:
        ArgumentError: if `fn` is not callable, or `max_traces` is not a count.
        RetraceError: if a call exceeds the number; the message says what changed.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> @pm.filter_jit
        ... @pm.debug.assert_max_traces(max_traces=1)
        ... def f(x):
        ...     return x + 1
        >>> _ = f(jnp.ones(2))
        >>> f(jnp.ones(3))
        Traceback (most recent call last):
            ...
        pytreemod.errors.RetraceError: f: this call needs more than 1 trace (max_traces)
          at x: f32[2] -> f32[3]
        ...
    """
    if max_traces is not None and (type(max_traces) is not int or max_traces < 0):
        raise ArgumentError("assert_max_traces(max_traces)", "a count", describe(max_traces))
    if fn is None:
        return ft.partial(assert_max_traces, max_traces=max_traces)
    check_callable("assert_max_traces", fn, "fn")
    return _Counted(fn, TraceLog(function_name(fn), max_traces))


def get_num_traces(fn: Any) -> int:
    """Return the number of traces of a function under `assert_max_traces`.

    Args:
        fn: the result of `assert_max_traces`, or a transform of it.

    Returns:
        The count.

    Raises:
        ArgumentError: if there is no such function inside.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> f = pm.filter_jit(pm.debug.assert_max_traces(lambda x: x, max_traces=None))
        >>> _ = f(jnp.ones(2)), f(jnp.ones(2)), f(jnp.ones(3))
        >>> pm.debug.get_num_traces(f)
        2
    """
    inner = fn
    while inner is not None and not isinstance(inner, _Counted):
        # A bound method and a transform have different names for the function inside.
        inner = getattr(inner, "func", None) or getattr(inner, "__wrapped__", None)
    if inner is None:
        raise ArgumentError(
            "get_num_traces(fn)",
            "a function under assert_max_traces",
            describe(fn),
            hint=["count without a limit:", "pm.debug.assert_max_traces(fn, max_traces=None)"],
        )
    return inner.options.count
