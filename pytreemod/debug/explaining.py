"""Listening to the traces of a jitted function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.methods import BoundMethod
from pytreemod.transform.jit import Jitted


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


class _Explainer:
    """Reports why a function was traced again; call it instead of the function, or use `with`."""

    def __init__(self, wrapper: Jitted, call: Callable[..., Any], announce: Callable[[str], None]):
        self.reports: list[str] = []
        self._has_listened = False
        self._log = wrapper.log
        self._call = call
        self._announce = announce

    def _note(self, text: str) -> None:
        self.reports.append(text)
        self._announce(text)

    def __enter__(self) -> _Explainer:
        self._has_listened = True
        self._log.observers.append(self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        self._log.observers.remove(self._note)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self:
            return self._call(*args, **kwargs)

    def __str__(self) -> str:
        # Printed afterwards, it shows the traces that are stored.
        reports = self.reports if self._has_listened else self._log.reports
        return "\n".join(reports) or "no retraces"


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
        without having listened, it shows the reports of earlier traces (the last 16).

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
        raise ArgumentError(
            f"explain_retraces: {describe(fn)} is not jitted",
            hint="pm.debug.explain_retraces(pm.filter_jit(fn))",
        )
    return _Explainer(wrapper, fn, announce)
