"""`filter_shard`: move the arrays of a tree to devices, or constrain them inside compiled code.

A *placement* says how an array is placed on devices. It is a `jax.sharding.Sharding`, a
`PartitionSpec` (which needs a mesh in context), a device, names of axes under `use_rules`, or None
for "unchanged". Specs are made of these, of functions from an array to one of these, and of rules
by path ([`by`][pytreemod.by]).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax import sharding as shardings
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pytreemod.errors import ShapeError, SpecError, describe
from pytreemod.transform.arguments import Named, Specs
from pytreemod.transform.axis_rules import mesh_axes, sharding_of_names, spec_text
from pytreemod.transform.tracebacks import with_short_errors
from pytreemod.tree.nodes import is_node
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_abstract, is_array
from pytreemod.tree.prefixes import By
from pytreemod.tree.split_arrays import axes_of_type
from pytreemod.typing import PyTree, Tracer, jtu, untyped_jax

_T = TypeVar("_T")


def is_placement(value: Any) -> bool:
    """Whether a value is a placement."""
    # The last is a jax.experimental.layout.Format, which is a sharding with a layout.
    return (
        value is None
        or isinstance(value, (shardings.Sharding, PartitionSpec, jax.Device, str))
        or (hasattr(value, "layout") and hasattr(value, "sharding") and not is_array(value))
    )


def is_placement_spec(spec: Any) -> bool:
    """Whether a node is a leaf of a spec of placements."""
    return is_placement(spec) or isinstance(spec, By) or (callable(spec) and not is_node(spec))


class Placed(NamedTuple):
    """An array of a tree, with its path and its placement."""

    place: str
    array: Any
    to: Any


def _asked(value: Any, leaf: Any) -> Any:
    return value(leaf) if callable(value) and not is_placement(value) and is_array(leaf) else value


def _fits(value: Any) -> bool:
    return is_placement(value) or callable(value)


_KIND = "sharding, PartitionSpec, device or None"
_PLACEMENTS = Specs(is_placement_spec, _asked, _fits, is_abstract, _KIND)


def placements_of(spec: Any, tree: PyTree, where: str, root: str) -> list[Placed]:
    """Return the placement of each array of a tree, or struct of one, from a prefix of it.

    Raises:
        SpecError: if the spec is no prefix, or has a value that is no placement.
    """
    return _placed(root, tree, _PLACEMENTS.of_leaves(spec, tree, where, root))


def _placed(root: str, tree: PyTree, values: list[Any]) -> list[Placed]:
    pairs = zip(jtu.tree_leaves_with_path(tree), values, strict=True)
    return [Placed(path_text(path, root), x, to) for (path, x), to in pairs if is_abstract(x)]


def placements_by_argument(
    spec: Any, named: Named, positional: int, known: Sequence[str], where: str
) -> list[list[Placed]]:
    """Return the placement of each array of each argument; see `Specs.by_argument`.

    Raises:
        ArgumentError, SpecError: if the spec does not fit the arguments.
    """
    found = _PLACEMENTS.by_argument(spec, named, positional, known, where)
    return [_placed(*pair, values) for pair, values in zip(named, found, strict=True)]


def as_sharding(value: Any) -> Any:
    """Return a placement in the form that JAX takes."""
    return shardings.SingleDeviceSharding(value) if isinstance(value, jax.Device) else value


def known_placements(spec: Any) -> list[Any]:
    """Return the placements in a spec, including those of its rules; each once."""
    leaves = jtu.tree_leaves(spec, is_leaf=is_placement_spec)
    found: list[Any] = []
    for leaf in leaves or [None]:
        for value in [value for _, value in leaf.items] if isinstance(leaf, By) else [leaf]:
            if value not in found:
                found.append(value)
    return found


def check_placements(placed: Sequence[Placed], where: str, mesh: Any = None) -> None:
    """Refuse specs that do not fit their arrays.

    Args:
        placed: arrays and their placements.
        where: the name of the spec in errors.
        mesh: that of PartitionSpecs; by default the one in context.

    Raises:
        ShapeError: if an array has too few axes, or one that the mesh does not divide evenly.
        SpecError: if a spec names an axis that the mesh does not have.
    """
    for place, array, to in placed:
        spec, own = spec_of(to), mesh or mesh_of(to)
        if spec is None:
            continue
        at = [f"{place}: {describe(array)} with {spec_text(spec)}"]
        if len(spec) > array.ndim:
            raise ShapeError(f"{where}: a spec has more entries than its array has axes", at=at)
        sizes: dict[Any, int] = {} if own is None else dict(own.shape)
        unknown = [name for entry in spec for name in mesh_axes(entry) if name not in sizes]
        if unknown and sizes:
            known = ", ".join(map(repr, sizes))
            fact = f"{where}: the mesh has no axis {unknown[0]!r}, but {known}"
            raise SpecError(fact, at=at)
        parts = [math.prod(sizes.get(name, 1) for name in mesh_axes(entry)) for entry in spec]
        if any(n % part for n, part in zip(array.shape, parts, strict=False)):
            raise ShapeError(f"{where}: the mesh does not divide every axis evenly", at=at)


def spec_of(value: Any) -> PartitionSpec | None:
    """Return the PartitionSpec of a placement; None if it has none."""
    return value if isinstance(value, PartitionSpec) else getattr(value, "spec", None)


def mesh_of(value: Any) -> Any:
    """Return the mesh of a placement, or the one in context."""
    return value.mesh if isinstance(value, NamedSharding) else context_mesh()


@with_short_errors
def filter_shard(x: _T, device_or_shardings: PyTree) -> _T:
    """Move the arrays of a tree to devices; leave everything else unchanged.

    Outside compiled code it moves the arrays; inside, it constrains the compiler. Inside
    [`filter_shard_map`][pytreemod.filter_shard_map] a spec applies to one device's part of an
    array. There, the mesh axes that the function is mapped over are ignored in the spec.

    Names of axes, such as `"batch seq embed"`, follow the rules of the innermost
    [`use_rules`][pytreemod.use_rules]; without one, they do nothing. Each of their arrays must have
    as many axes as there are names. An axis without a name is `_`, and is not split.

    **Law.** `filter_shard(x, s)` equals `x`: only the devices of its numbers change.

    Args:
        x: any tree.
        device_or_shardings: a spec. A placement is a device, a sharding, a `PartitionSpec` for the
            mesh in context (`jax.set_mesh`), names of axes, or None for "unchanged". A spec is a
            placement, a function from an array to one, [`by`][pytreemod.by], a Module with
            placements instead of its data, or a prefix tree of these.

    Returns:
        The tree with its arrays on these devices.

    Raises:
        ShapeError: if a spec has more entries than its array has axes, if (outside compiled code)
            it does not divide the array evenly, or if names and axes differ in number.
        SpecError: if the spec is not a prefix of the tree, or contains a value that is not a
            placement. Also if a name has no rule, or two names have one axis of the mesh.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
        >>> split = NamedSharding(mesh, PartitionSpec("data"))
        >>> batch = filter_shard({"x": jnp.ones((4, 2)), "name": "train"}, split)
        >>> batch["x"].sharding == split, batch["name"]
        (True, 'train')

        By the names of axes:

        >>> with pm.use_rules(mesh, pm.AxisRules({"batch": "data"})):
        ...     filter_shard(jnp.ones((4, 2)), "batch _").sharding.spec
        P('data', None)
    """
    where = "filter_shard"
    placed = placements_of(device_or_shardings, x, where, "x")
    leaves, treedef = jtu.tree_flatten(x)
    try:
        arrays = iter([_shard(*each) for each in placed if is_array(each.array)])
    except ValueError:
        # JAX's errors have no paths.
        check_placements([each for each in placed if not isinstance(each.to, str)], where)
        raise
    return treedef.unflatten([next(arrays) if is_array(leaf) else leaf for leaf in leaves])


def _shard(place: str, array: Any, to: Any) -> Any:
    if isinstance(to, str):
        to = _without_manual_axes(sharding_of_names(to, array, place))
        # In compiled code, JAX pads axes that it cannot divide.
        check_placements([Placed(place, array, to)], "filter_shard")
    to = _without_manual_axes(as_sharding(to))
    if to is None:
        return array
    # Arrays cannot be moved onto a part of a mesh.
    if isinstance(array, Tracer) or isinstance(getattr(to, "mesh", None), AbstractMesh):
        return _constrained(array, to)
    moved = jax.device_put(array, to)
    # A constant in a traced function, where `device_put` is only a hint.
    return _constrained(array, to) if isinstance(moved, Tracer) else moved


def _constrained(array: Any, to: Any) -> Any:
    spec, mesh = spec_of(to), mesh_of(to)
    if spec is None or mesh is None:
        return jax.lax.with_sharding_constraint(array, to)
    types = {*mesh.axis_types}
    # JAX has one function for axes of each type; its spec names only axes of that type.
    if AxisType.Explicit in types:
        array = untyped_jax.sharding.reshard(array, _of_type(AxisType.Explicit, to, spec, mesh))
    if AxisType.Auto in types:
        own = _of_type(AxisType.Auto, to, spec, mesh)
        array = jax.lax.with_sharding_constraint(array, own)
    return array


def _of_type(kind: AxisType, to: Any, spec: PartitionSpec, mesh: Any) -> Any:
    """Return the part of a placement for the mesh axes of one type."""
    if len({*mesh.axis_types}) == 1:
        return to
    own = axes_of_type(mesh, kind)
    return NamedSharding(mesh, PartitionSpec(*(_only(entry, own) for entry in spec)))


def _only(entry: Any, names: Sequence[Any]) -> Any:
    if entry is PartitionSpec.UNCONSTRAINED:
        return entry
    return tuple(name for name in mesh_axes(entry) if name in names) or None


def _without_manual_axes(to: Any) -> Any:
    """Return a placement for one device's part of an array, inside `filter_shard_map`.

    It has no manual axes of the mesh, because the array is already split along them.
    """
    mesh, spec, manual = context_mesh(), spec_of(to), manual_axes()
    if spec is None or not manual:
        return to
    if isinstance(to, NamedSharding) and dict(to.mesh.shape) != dict(mesh.shape):
        return to
    others = [name for name in mesh.axis_names if name not in manual]
    entries = (_only(entry, others) for entry in spec)
    return NamedSharding(mesh, PartitionSpec(*entries)) if others else None


# ---- meshes


def context_mesh() -> Any:
    """Return the mesh set by `jax.set_mesh`, abstract; None if there is none."""
    mesh = untyped_jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def manual_axes() -> tuple[Any, ...]:
    """Return the mesh axes that the surrounding `shard_map` maps over; none outside of one."""
    mesh = context_mesh()
    return () if mesh is None else axes_of_type(mesh, AxisType.Manual)
