"""`filter_pmap`: a map whose members are on different devices, for programs that use it already."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pytreemod.transform.jit import filter_jit
from pytreemod.transform.placements import filter_shard
from pytreemod.transform.vmap import filter_vmap
from pytreemod.transform.wrapping import Transformed, check_callable
from pytreemod.typing import Names

_F = TypeVar("_F", bound=Callable[..., Any])


class _Divided(Transformed):
    """A mapped function whose results are split over devices."""

    __slots__ = ()

    transform_name = "filter_pmap"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call it on all members."""
        devices: list[Any] = [*(self.options or jax.local_devices())]
        mesh = Mesh(np.array(devices), ("devices",))
        split = NamedSharding(mesh, PartitionSpec("devices"))

        def place(x: Any) -> Any:
            return split if x.ndim and x.shape[0] % mesh.size == 0 else None

        return filter_shard(self.fn(*args, **kwargs), place)


@overload
def filter_pmap(fun: _F, **options: Any) -> _F: ...
@overload
def filter_pmap(**options: Any) -> Callable[[_F], _F]: ...
def filter_pmap(
    fun: Any = None,
    *,
    donate: str | Names = "none",
    devices: Sequence[Any] | None = None,
    **options: Any,
) -> Any:
    """`jax.pmap` for functions of any trees: `filter_vmap`, with the members split over devices.

    For programs that use it already; JAX recommends this form instead of `jax.pmap`. In new ones,
    use [`filter_jit`][pytreemod.filter_jit] with shardings, or
    [`filter_shard_map`][pytreemod.filter_shard_map].

    **Law.** `filter_pmap(f)(*args)` equals `filter_vmap(f)(*args)`.

    Args:
        fun: the function; without it, the result is a decorator.
        donate: as for `filter_jit`.
        devices: by default all local ones.
        **options: those of [`filter_vmap`][pytreemod.filter_vmap].

    Returns:
        A function of the same signature, with `lower(...).compile()`.

    Raises:
        ArgumentError: if `fun` is not callable; and all errors of `filter_vmap`.

    Examples:
        >>> import jax.numpy as jnp
        >>> f = filter_pmap(lambda x, how: x + 1 if how == "inc" else x, in_axes=(0, None))
        >>> f(jnp.arange(1), "inc")
        Array([1], dtype=int32)
    """
    if fun is None:
        return ft.partial(filter_pmap, donate=donate, devices=devices, **options)
    check_callable("filter_pmap", fun)
    divided = _Divided(filter_vmap(fun, **options), None if devices is None else tuple(devices))
    return filter_jit(divided, donate=donate)
