"""Formulas that JAX traces once, and then copies into the programs that use them."""

from __future__ import annotations

import functools as ft
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp

Args = ParamSpec("Args")
Out = TypeVar("Out")

# From 0.12 on JAX can inline at several stages; earlier versions only do it while tracing.
INLINE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)


def traced_once(*static: str) -> Callable[[Callable[Args, Out]], Callable[Args, Out]]:
    """Make JAX trace and differentiate a function once for all arguments of the same shapes.

    A network repeats the same few formulas. Under a transform, each call of the result copies the
    operations of the first call. The program is the same as without, and takes less time to trace.
    The functions of `jax.numpy` are made in the same way.

    Arguments are converted to JAX arrays if possible. None, tuples of arrays, and numbers passed by
    keyword are unchanged.

    Args:
        static: names of hashable arguments that are not arrays; a list becomes a tuple.

    Returns:
        A decorator.

    Examples:
        >>> @traced_once("n")
        ... def power(x, *, n):
        ...     print("traced")
        ...     return x**n
        >>> [float(power(jnp.array(x), n=2)) for x in (1.0, 2.0)]
        traced
        [1.0, 4.0]
    """

    def decorate(function: Callable[Args, Out]) -> Callable[Args, Out]:
        # Used for its cache of traces; inlining leaves no call in the surrounding program.
        compiled: Any = jax.jit(function, static_argnames=static, inline=INLINE)
        names = [*inspect.signature(function).parameters]
        static_at = frozenset(map(names.index, static))

        @ft.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            given = [_hashable(x) if i in static_at else _as_array(x) for i, x in enumerate(args)]
            for name, x in options.items():
                if name in static:
                    options[name] = _hashable(x)
                elif not isinstance(x, (int, float)):
                    options[name] = _as_array(x)
            return compiled(*given, **options)

        return cast("Callable[Args, Out]", call)

    return decorate


def _hashable(value: Any) -> Any:
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value


def as_arrays(*values: Any) -> tuple[Any, ...]:
    """Convert arguments of such a function to JAX arrays; None is unchanged.

    Args:
        values: arrays, numbers, objects that JAX can convert, or None.

    Returns:
        As many JAX arrays (or None).

    Examples:
        >>> [array.shape for array in as_arrays(1.0, jnp.ones(2))]
        [(), (2,)]
    """
    return tuple(map(_as_array, values))


def _as_array(value: Any) -> Any:
    # A tuple is several arrays.
    is_one = value is None or isinstance(value, (jax.Array, tuple))
    return cast("Any", value) if is_one else jnp.asarray(value)
