"""Formulas that JAX traces once, and then only copies into the programs that use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp

Args = ParamSpec("Args")
Out = TypeVar("Out")

# From 0.12 on JAX can inline at several stages; before, only while tracing, as it is meant here.
INLINE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)


def traced_once(*static: str) -> Callable[[Callable[Args, Out]], Callable[Args, Out]]:
    """Make JAX trace, and differentiate, a function once for all arguments of the same shapes.

    A network is the same few formulas over and over. Under a transform each call of the result
    copies the operations that were noted down at the first one, so that the program is the one
    that it would have been, and takes less time to trace. The functions of `jax.numpy` are made
    in this way, each for itself.

    Args:
        static: names of arguments that are no arrays, and hashable; to be passed by keyword.

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
        # For its cache of traces; inlined, no call of it is left in the program around.
        compiled: Any = jax.jit(function, static_argnames=static, inline=INLINE)
        return cast("Callable[Args, Out]", compiled)

    return decorate


def as_arrays(*values: Any) -> tuple[Any, ...]:
    """What such a function takes: JAX arrays, whatever else can be one converted; None as it is.

    Args:
        values: arrays, numbers, objects that JAX can convert, or None.

    Returns:
        As many JAX arrays (or None).

    Examples:
        >>> [array.shape for array in as_arrays(1.0, jnp.ones(2))]
        [(), (2,)]
    """
    return tuple(
        value if value is None or isinstance(value, jax.Array) else jnp.asarray(value)
        for value in values
    )
