"""Arrays that are split over a mesh, as far as their types show it: along its explicit axes.

The type of an array, and so its split, determines what a transform or a layer may do with it. The
compiler takes care of automatic axes of a mesh, which are in no type.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from pytreemod.errors import describe, short_dtype
from pytreemod.tree.predicates import is_array
from pytreemod.typing import Tracer, jtu, untyped_jax

_T = TypeVar("_T")


def explicit_mesh(*arrays: Any) -> Any:
    """Return the mesh with explicit axes of some arrays; None if there is none.

    Args:
        arrays: any values; those that are not JAX arrays are skipped.

    Returns:
        The first such mesh. While tracing, it is the mesh in the types of the arrays, without
        devices; otherwise it has devices.

    Examples:
        >>> import jax.numpy as jnp
        >>> explicit_mesh(jnp.ones(3)) is None
        True
    """
    # Traced ones first.
    for array in sorted(arrays, key=lambda x: not isinstance(x, Tracer)):
        if not isinstance(array, jax.Array):
            continue
        sharding: Any = jax.typeof(array).sharding if isinstance(array, Tracer) else array.sharding
        mesh = getattr(sharding, "mesh", None)
        if mesh is not None and AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def split_axes(value: Any) -> tuple[tuple[str, ...], ...]:
    """Return the explicit mesh axes over which each axis of an array is split.

    Args:
        value: an array, or the type of one.

    Returns:
        The names for each axis; an empty tuple for an array that is not split.

    Examples:
        >>> import jax.numpy as jnp
        >>> split_axes(jnp.ones((2, 3)))
        ()
    """
    if isinstance(value, jax.Array):
        # Reading a type from JAX takes microseconds, and nearly all arrays are on one device.
        if not isinstance(value, Tracer) and isinstance(value.sharding, SingleDeviceSharding):
            return ()
        value = jax.typeof(value)
    spec = getattr(getattr(value, "sharding", None), "spec", None) or ()
    found = tuple((at,) if isinstance(at, str) else tuple(at or ()) for at in spec)
    return found if any(found) else ()


def spec_of_split(split: Iterable[tuple[str, ...]]) -> PartitionSpec:
    """Return the spec of an array that is split like this, see `split_axes`."""
    return PartitionSpec(*((None, *at)[-1] if len(at) < 2 else at for at in split))


def axes_of_type(mesh: Any, kind: AxisType) -> tuple[Any, ...]:
    """Return the names of the axes of a mesh that are of a type."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple([name for name, own in pairs if own == kind])


def split_text(value: Any) -> str:
    """An array in short form, with the mesh axes that split it, as JAX writes it: `f32[8@data,3]`.

    Args:
        value: an array, or the type of one.

    Examples:
        >>> import jax.numpy as jnp
        >>> split_text(jnp.ones((2, 3)))
        'f32[2,3]'
    """
    axes = split_axes(value)
    if not axes:
        return describe(value)
    names = [f"@({','.join(each)})" if each[1:] else "@".join(("", *each)) for each in axes]
    sizes = [f"{size}{name}" for size, name in zip(value.shape, names, strict=True)]
    return f"{short_dtype(value.dtype)}[{','.join(sizes)}]"


def sharded_as(tree: _T, like: _T) -> _T:
    """Return a tree whose arrays are split over explicit axes like those of another tree.

    Arrays that are on no mesh count as replicated.
    """

    def shard(x: Any, other: Any) -> Any:
        if not is_array(x) or not is_array(other) or split_axes(x) == split_axes(other):
            return x
        to = NamedSharding(explicit_mesh(x, other), spec_of_split(split_axes(other)))
        return untyped_jax.sharding.reshard(x, to)

    return jtu.tree_map(shard, tree, like)
