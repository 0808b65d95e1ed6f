"""`filter_checkify`: checks inside compiled code as a value, returned beside the result."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pytreemod.errors import ArgumentError, describe
from pytreemod.transform.boundary.packing import pack, unpack
from pytreemod.transform.boundary.sowing import collecting
from pytreemod.transform.boundary.supplying import supplied
from pytreemod.transform.boundary.wrapping import Transformed, check_callable, function_name
from pytreemod.transform.host.failures import raises_checks
from pytreemod.tree.nodes import is_node
from pytreemod.tree.snapshots import divide

_Out = TypeVar("_Out")


class _Checkified(Transformed):
    """A function under `filter_checkify`."""

    __slots__ = ()

    transform_name = "filter_checkify"

    @raises_checks
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        # Imported here, because few programs need it, and the import takes time.
        from jax.experimental import checkify

        errors = checkify.user_checks if self.options is None else self.options
        fn = supplied(self.fn)
        head = (fn,) if is_node(fn) else ()
        arrays, structure = divide((head, args, kwargs))

        def run(values: list[Any]) -> Any:
            head, args, kwargs = structure.assemble(values)
            return pack(collecting(head[0] if head else fn)(*args, **kwargs))

        run.__name__ = run.__qualname__ = function_name(self.fn)
        error, packed = checkify.checkify(run, errors=errors)(arrays)
        return error, unpack(packed)


def filter_checkify(
    fun: Callable[..., _Out] | None = None, errors: Iterable[Any] | None = None
) -> Any:
    """`jax.experimental.checkify.checkify` for functions of any trees.

    The function returns its checks as a value. Unlike [`error_if`][pytreemod.error_if], it does not
    call the host, and it raises only when you call `error.throw()`.

    **Law.** `filter_checkify(f)(*args)[1]` equals `f(*args)`.

    Args:
        fun: the function; without it, the result is a decorator.
        errors: the checks to insert: a set of `jax.experimental.checkify`, such as
            `checkify.nan_checks | checkify.user_checks`. By default your own checks
            (`checkify.check`).

    Returns:
        A function of the same arguments that returns a pair: the error, a
        `jax.experimental.checkify.Error` with `get()` and `throw()`, and the result of `fun`.

    Raises:
        ArgumentError: if `fun` is not callable, or `errors` is not a set of checks.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> from jax.experimental import checkify
        >>> @pm.filter_jit
        ... @filter_checkify
        ... def root(x, name):
        ...     checkify.check(x >= 0, "x must not be negative")
        ...     return jnp.sqrt(x), name
        >>> error, (y, name) = root(jnp.asarray(-4.0), "y")
        >>> error.get().splitlines()[0]
        'x must not be negative (`check` failed)'
    """
    if fun is None:
        return ft.partial(filter_checkify, errors=errors)
    check_callable("filter_checkify", fun)
    if errors is not None and not _are_checks(errors):
        raise ArgumentError(
            "filter_checkify(errors)",
            "a set of checks",
            describe(errors),
            hint=["for example:", "errors=jax.experimental.checkify.nan_checks"],
        )
    return _Checkified(fun, None if errors is None else frozenset(errors))


def _are_checks(errors: Any) -> bool:
    kinds: Any = errors
    return isinstance(errors, (set, frozenset)) and all(isinstance(kind, type) for kind in kinds)
