"""`filter_checkpoint`: recompute in the backward pass instead of storing."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

from pytreemod.transform.packing import as_function_of_arrays, unpack
from pytreemod.transform.wrapping import Transformed, check_callable
from pytreemod.typing import untyped_jax

_F = TypeVar("_F", bound=Callable[..., Any])


class _Options(NamedTuple):
    prevent_cse: bool
    policy: Callable[..., bool] | None


class _Checkpointed(Transformed):
    __slots__ = ()

    options: _Options

    transform_name = "filter_checkpoint"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        run, arrays = as_function_of_arrays(self.fn, args, kwargs)
        return unpack(untyped_jax.checkpoint(run, **self.options._asdict())(arrays))


@overload
def filter_checkpoint(fun: _F, **options: Any) -> _F: ...
@overload
def filter_checkpoint(**options: Any) -> Callable[[_F], _F]: ...
def filter_checkpoint(  # pyright: ignore[reportInconsistentOverload]  (options are checked below)
    fun: Any = None, *, prevent_cse: bool = True, policy: Callable[..., bool] | None = None
) -> Any:
    """`jax.checkpoint` (rematerialization) for functions of any trees.

    **Law.** Values and gradients are those of `fun`; only which intermediate values are stored for
    the backward pass changes.

    Args:
        fun: the function, which may be a Module; without it, the result is a decorator.
        prevent_cse: as for `jax.checkpoint`; False is faster inside `jax.lax.scan`.
        policy: chooses the values to store; see `jax.checkpoint_policies`.

    Returns:
        A function of the same signature.

    Raises:
        ArgumentError: if `fun` is not callable.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> pm.filter_grad(filter_checkpoint(lambda x: jnp.sin(jnp.sin(x))))(jnp.asarray(0.0))
        Array(1., dtype=float32, weak_type=True)
    """
    if fun is None:
        return ft.partial(filter_checkpoint, prevent_cse=prevent_cse, policy=policy)
    check_callable("filter_checkpoint", fun)
    return _Checkpointed(fun, _Options(prevent_cse, policy))
