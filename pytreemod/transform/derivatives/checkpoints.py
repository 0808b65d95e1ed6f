"""`filter_checkpoint`: recompute in the backward pass instead of storing."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

from pytreemod.transform.boundary.packing import pack_call, unpack
from pytreemod.transform.boundary.supplying import supplied
from pytreemod.transform.boundary.wrapping import Transformed, check_callable
from pytreemod.transform.host.failures import raises_checks
from pytreemod.tree.snapshots import divide
from pytreemod.typing import untyped_jax

_F = TypeVar("_F", bound=Callable[..., Any])


class _Options(NamedTuple):
    prevent_cse: bool
    policy: Callable[..., bool] | None


class _Checkpointed(Transformed):
    __slots__ = ()

    options: _Options

    transform_name = "filter_checkpoint"

    @raises_checks
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        # The function, too: the arrays of a Module are differentiated like arguments.
        arrays, structure = divide((supplied(self.fn), args, kwargs))

        def run(values: list[Any]) -> Any:
            return pack_call(*structure.assemble(values))

        return unpack(untyped_jax.checkpoint(run, **self.options._asdict())(arrays))


@overload
def filter_checkpoint(
    fun: _F, *, prevent_cse: bool = ..., policy: Callable[..., bool] | None = ...
) -> _F: ...
@overload
def filter_checkpoint(
    *, prevent_cse: bool = ..., policy: Callable[..., bool] | None = ...
) -> Callable[[_F], _F]: ...
def filter_checkpoint(
    fun: Any = None,
    *,
    prevent_cse: bool = True,
    policy: Callable[..., bool] | None = None,
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
        ArgumentError: if `fun` or `policy` is not callable.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> pm.filter_grad(filter_checkpoint(lambda x: jnp.sin(jnp.sin(x))))(jnp.asarray(0.0))
        Array(1., dtype=float32, weak_type=True)
    """
    if fun is None:
        return ft.partial(filter_checkpoint, prevent_cse=prevent_cse, policy=policy)
    check_callable("filter_checkpoint", fun)
    if policy is not None:
        check_callable("filter_checkpoint", policy, "policy")
    return _Checkpointed(fun, _Options(prevent_cse, policy))
