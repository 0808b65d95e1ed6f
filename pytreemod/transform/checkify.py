"""`filter_checkify`: checks inside compiled code as a value, returned beside the result."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pytreemod.errors import ArgumentError, describe
from pytreemod.transform.packing import as_function_of_arrays, unpack
from pytreemod.transform.runtime_checks import CHECKIFIED
from pytreemod.transform.wrapping import Transformed, check_callable
from pytreemod.tree.traces import trace_context

_Out = TypeVar("_Out")


class _Checkified(Transformed):
    __slots__ = ()

    transform_name = "filter_checkify"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return the error, and the result of the function."""
        # Imported here, because few programs need it, and the import takes time.
        from jax.experimental import checkify

        errors = checkify.user_checks if self.options is None else self.options
        run, arrays = as_function_of_arrays(self.fn, args, kwargs)
        # Without the user's checks, JAX would drop those of `error_if`: they stay callbacks.
        are_kept = checkify.user_checks <= frozenset(errors)
        with trace_context(CHECKIFIED, are_kept):
            error, packed = checkify.checkify(run, errors=errors)(arrays)
        return error, unpack(packed)


def filter_checkify(
    fun: Callable[..., _Out] | None = None, errors: Iterable[Any] | None = None
) -> Any:
    """`jax.experimental.checkify.checkify` for functions of any trees.

    The function returns its checks as a value, and nothing waits for them: neither a call of
    `filter_jit(filter_checkify(step))`, nor a loop around it. `error.throw()` waits, and raises the
    failed check as an error of JAX.

    **Law.** `filter_checkify(f)(*args)[1]` equals `f(*args)`.

    Args:
        fun: the function; without it, the result is a decorator.
        errors: the checks to insert: a set of `jax.experimental.checkify`, such as
            `checkify.nan_checks | checkify.user_checks`. By default your own checks:
            `checkify.check`, and `error_if`, which does not call the host then. A predicate that
            is known while tracing still raises at once.

    Returns:
        A function of the same arguments that returns a pair: the error, a
        `jax.experimental.checkify.Error` with `get()` and `throw()`, and the result of `fun`.

    Raises:
        ArgumentError: if `fun` is not callable, or `errors` is not a set of checks.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> @pm.filter_jit
        ... @filter_checkify
        ... def root(x, name):
        ...     x = pm.error_if(x, x < 0, "x must not be negative")
        ...     return jnp.sqrt(x), name
        >>> error, (y, name) = root(jnp.asarray(-4.0), "y")
        >>> error.get().splitlines()[0]
        'x must not be negative (`check` failed)'
    """
    if fun is None:
        return ft.partial(filter_checkify, errors=errors)
    check_callable("filter_checkify", fun)
    if errors is not None and not isinstance(errors, (set, frozenset)):
        fact = f"filter_checkify: {describe(errors)} is no set of checks"
        raise ArgumentError(fact, hint="errors=jax.experimental.checkify.nan_checks")
    return _Checkified(fun, None if errors is None else frozenset(errors))
