"""Traces of a function: why a jitted one was traced again, and how often any function is traced."""

from __future__ import annotations

import functools as ft
import sys
from collections.abc import Callable
from typing import Any, TypeVar, overload

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.methods import BoundMethod
from pytreemod.transform.arguments import Parameters, function_name
from pytreemod.transform.jit import Jitted
from pytreemod.transform.retraces import TraceLog
from pytreemod.transform.wrapping import Transformed

_F = TypeVar("_F", bound=Callable[..., Any])


class _Explainer:
    """Reports why a function was traced again; call it instead of the function, or use `with`."""

    def __init__(self, log: TraceLog, call: Callable[..., Any], announce: Callable[[str], None]):
        self.reports: list[str] = []
        self._log, self._call, self._announce = log, call, announce

    def _note(self, text: str) -> None:
        self.reports.append(text)
        self._announce(text)

    def __enter__(self) -> _Explainer:
        self._log.observers.append(self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        self._log.observers.remove(self._note)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self:
            return self._call(*args, **kwargs)

    def __str__(self) -> str:
        return "\n".join(self.reports or self._log.reports) or "no retraces"


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def explain_retraces(
    fn: Callable[..., Any], announce: Callable[[str], None] = _to_stderr
) -> _Explainer:
    """Explain, for each trace of a jitted function after the first, why it was necessary.

    Each report names the argument and the path in it, and the change: in the structure, in a static
    value (old and new; functions by name and line), a shape, a dtype, a weak type, a sharding.

    Args:
        fn: a function under `filter_jit`, or a method under it, bound or not.
        announce: called with each report; prints to standard error by default.

    Returns:
        A context manager that listens while it is open. It is also a function that can be called
        instead of `fn`, and listens during the call. `reports` lists the reports so far. Printed
        without any, it shows those of earlier traces (the last 16).

    Raises:
        ArgumentError: if `fn` is not under `filter_jit`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> f = pm.filter_jit(lambda x, how: x)
        >>> with pm.debug.explain_retraces(f, announce=print) as report:
        ...     _ = f(jnp.ones(2), "a")
        ...     _ = f(jnp.ones(2), "b")
        <lambda> was traced again (trace 2), because of
          how: 'a' -> 'b'
    """
    # A method is jitted once, for all of its instances.
    wrapper = fn.func if isinstance(fn, BoundMethod) else fn
    if not isinstance(wrapper, Jitted):
        hint = "pm.debug.explain_retraces(pm.filter_jit(fn))"
        raise ArgumentError(f"explain_retraces: {describe(fn)} is not jitted", hint=hint)
    return _Explainer(wrapper.log, fn, announce)


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
        CheckError: if a call exceeds the number; the message says what changed.

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
        pytreemod.errors.CheckError: f: this call needs more than 1 trace (max_traces)
          at x: f32[2] -> f32[3]
        ...
    """
    if fn is None:
        return ft.partial(assert_max_traces, max_traces=max_traces)
    return _Counted(fn, TraceLog(function_name(fn), max_traces))


def get_num_traces(fn: Any) -> int:
    """Return the number of traces of a function under `assert_max_traces`.

    Args:
        fn: the result of `assert_max_traces`, or a transform of it.

    Returns:
        The count.

    Raises:
        AttributeError: if there is no such function inside.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> f = pm.filter_jit(pm.debug.assert_max_traces(lambda x: x, max_traces=None))
        >>> _ = f(jnp.ones(2)), f(jnp.ones(2)), f(jnp.ones(3))
        >>> pm.debug.get_num_traces(f)
        2
    """
    inner = fn
    while not isinstance(inner, _Counted):
        # A bound method and a transform have different names for the function inside.
        inner = getattr(inner, "func", None) or inner.__wrapped__
    return inner.options.count
