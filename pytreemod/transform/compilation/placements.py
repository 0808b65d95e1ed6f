"""`filter_shard`, and the parts that all transforms with shardings or specs share.

A *placement* says how an array is placed on devices. It is a `jax.sharding.Sharding`, a
`PartitionSpec` (which needs a mesh in context), a device, or None for "unchanged". Specs are made
of these, of functions from an array to one of these, and of rules by path
([`by`][pytreemod.by]).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import compress
from typing import Any, TypeVar

import jax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from pytreemod.errors import ArgumentError, ShapeError, SpecError, describe
from pytreemod.transform.compilation.axis_rules import lay_by_names
from pytreemod.transform.interception.argument_specs import Assigned, Terms, assign
from pytreemod.tree.nodes import is_node
from pytreemod.tree.predicates import is_array
from pytreemod.tree.prefixes import By
from pytreemod.tree.selecting import Rule
from pytreemod.tree.split_arrays import explicit_mesh, split_axes
from pytreemod.typing import PyTree, Tracer, jtu, untyped_jax

_T = TypeVar("_T")

PLACEMENTS = "shardings, PartitionSpecs, devices or None"
SPECS = "PartitionSpecs, NamedShardings or None"


def is_placement(value: Any) -> bool:
    """Whether a value is a placement."""
    # The last case is a jax.experimental.layout.Format, which is a sharding with a layout.
    return (
        value is None
        or isinstance(value, (Sharding, PartitionSpec, jax.Device))
        or (hasattr(value, "layout") and hasattr(value, "sharding") and not is_array(value))
    )


def is_function(value: Any) -> bool:
    """Whether a part of a spec is a function from an array to its placement."""
    return callable(value) and not isinstance(value, Rule) and not is_node(value)


def stops(spec: Any) -> bool:
    """Whether a node is a leaf of a spec."""
    return is_placement(spec) or isinstance(spec, By) or is_function(spec)


def placement_terms(where: str) -> Terms:
    """Return the values of which shardings and specs are made, for a spec of one tree."""
    return Terms(where, stops)


class SpecOption:
    """A spec of shardings as an option: compared by value if possible, or else by identity."""

    __slots__ = ("identity", "spec")

    def __init__(self, spec: Any):
        self.spec = spec
        try:
            leaves, treedef = jtu.tree_flatten(spec, is_leaf=stops)
        except ValueError as error:
            # JAX sorts the keys of a dict.
            raise SpecError(
                "in_shardings, out_shardings",
                "dicts with keys of one type, such as the names of arguments",
                describe(spec),
                hint=["name each argument:", "in_shardings={'x': rows, 'y': rows}"],
            ) from error
        self.identity: Any = (tuple(leaves), treedef)
        try:
            hash(self.identity)
        except TypeError:
            # Equal to itself alone: a wrong comparison would find the program of another spec.
            self.identity = object()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpecOption) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        return repr(self.spec)


def as_sharding(value: Any) -> Any:
    """Return a placement in the form that JAX takes.

    Raises:
        TypeError: if the value is not a placement.
    """
    if not is_placement(value):
        raise TypeError
    return SingleDeviceSharding(value) if isinstance(value, jax.Device) else value


def as_spec(value: Any) -> PartitionSpec:
    """Return a placement as a PartitionSpec.

    Raises:
        TypeError: if the placement has none.
    """
    if value is None:
        return PartitionSpec()
    if isinstance(value, NamedSharding):
        return value.spec
    if not isinstance(value, PartitionSpec):
        raise TypeError
    return value


def convert_values(
    assigned: Sequence[Assigned], convert: Callable[[Any], Any], where: str, expected: str
) -> list[Assigned]:
    """Call the functions in a spec, and convert each value to the form that JAX takes.

    Args:
        assigned: arrays with their values in the spec.
        convert: converts a value; raises TypeError for anything else.
        where: the name of the spec in errors.
        expected: the valid values, for errors.

    Raises:
        SpecError: if a value is not a placement.
    """
    converted: list[Assigned] = []
    for place, array, value in assigned:
        if is_function(value):
            value = value(array)
        try:
            converted.append(Assigned(place, array, convert(value)))
        except TypeError:
            raise SpecError(where, expected, describe(value), at=[place]) from None
    return converted


def check_placements(
    assigned: Sequence[Assigned], where: str, mesh: Any = None, *, are_parts: bool = False
) -> None:
    """Refuse specs that do not fit their arrays.

    Args:
        assigned: arrays and their placements.
        where: the name of the spec in errors.
        mesh: the mesh of PartitionSpecs; by default the one in context, if any.
        are_parts: whether the arrays are split already, and need not be divided evenly.

    Raises:
        ShapeError: if an array has too few axes, or one that the mesh does not divide evenly.
        SpecError: if a spec names an axis that the mesh does not have.
    """
    specs = [(each, _spec_of(each.value)) for each in assigned]
    longer = [
        f"{place}: {describe(array)} with {spec_text(spec)}"
        for (place, array, _), spec in specs
        if spec is not None and len(spec) > array.ndim
    ]
    # First, because the code below pairs the entries of a spec with axes.
    if longer:
        raise ShapeError(
            f"{where}: a spec has more entries than its array has axes",
            at=longer,
        )
    uneven: list[str] = []
    for (place, array, value), spec in specs:
        sizes = _axis_sizes(value, mesh)
        if spec is None or not sizes:
            continue
        check_axis_names(spec, sizes, where, f"{place}: {spec_text(spec)}")
        if not are_parts:
            uneven += [f"{place}: {line}" for line in _uneven(array, spec, sizes)]
    if uneven:
        raise ShapeError(
            f"{where}: the mesh does not divide every axis evenly",
            at=uneven,
        )


def explain_placements(
    assigned: Sequence[Assigned],
    where: str,
    error: Exception,
    mesh: Any = None,
    *,
    are_parts: bool = False,
) -> None:
    """Raise a better error than JAX's, if the specs do not fit their arrays."""
    try:
        check_placements(assigned, where, mesh, are_parts=are_parts)
    except ValueError as better:
        raise better from error


def check_axis_names(
    spec: PartitionSpec,
    sizes: Collection[Any],
    where: str,
    place: str,
    error: Exception | None = None,
) -> None:
    """Refuse a spec that names an axis that the mesh does not have.

    Raises:
        SpecError: if it does.
    """
    unknown = [name for name in axes_in(spec) if name not in sizes]
    if unknown:
        raise SpecError(
            f"{where}: the mesh has no axis {', '.join(map(repr, unknown))}, "
            f"but {', '.join(map(repr, sizes)) or 'none'}",
            at=[place],
        ) from error


def _uneven(array: Any, spec: PartitionSpec, sizes: dict[Any, int]) -> Iterator[str]:
    for axis, entry in enumerate(spec):
        names = list(_names_in(entry))
        parts = math.prod(sizes[name] for name in names)
        if array.shape[axis] % parts:
            over = " and ".join(f"{name!r} of size {sizes[name]}" for name in names)
            yield f"{describe(array)}, axis {axis} over {over}"


def _spec_of(value: Any) -> PartitionSpec | None:
    if isinstance(value, NamedSharding):
        return value.spec
    return value if isinstance(value, PartitionSpec) else None


def _axis_sizes(value: Any, mesh: Any) -> dict[Any, int]:
    if mesh is None:
        mesh = value.mesh if isinstance(value, NamedSharding) else context_mesh()
    return {} if mesh is None else dict(mesh.shape)


def context_mesh() -> Any:
    """Return the mesh set by `jax.set_mesh`, abstract; None if there is none."""
    mesh = untyped_jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def manual_axes() -> list[Any]:
    """Return the mesh axes that the surrounding `shard_map` maps over; none outside of one."""
    mesh = context_mesh()
    if mesh is None:
        return []
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [name for name, kind in types if kind == AxisType.Manual]


def _names_in(entry: Any) -> Iterator[Any]:
    if isinstance(entry, tuple):
        yield from entry
    elif entry is not None and entry is not PartitionSpec.UNCONSTRAINED:
        yield entry


def axes_in(spec: PartitionSpec) -> list[Any]:
    """Return the mesh axes that a spec names."""
    return [name for entry in spec for name in _names_in(entry)]


def spec_text(spec: PartitionSpec) -> str:
    """Return a PartitionSpec as source code, in every version of JAX."""
    return f"P({', '.join(map(repr, spec))})"


def constrain(array: Any, value: Any) -> Any:
    """Constrain a traced array to a placement."""
    if value is None:
        return array
    spec = _spec_of(value)
    mesh = value.mesh if isinstance(value, NamedSharding) else context_mesh()
    if spec is None or mesh is None:
        return jax.lax.with_sharding_constraint(array, value)
    types = {*mesh.axis_types}
    # JAX has one function for axes of each type; its spec names only axes of that type.
    if AxisType.Explicit in types:
        own = value if len(types) == 1 else _of_type(AxisType.Explicit, spec, mesh)
        array = untyped_jax.sharding.reshard(array, own)
    if AxisType.Auto in types:
        own = value if len(types) == 1 else _of_type(AxisType.Auto, spec, mesh)
        array = jax.lax.with_sharding_constraint(array, own)
    return array


def _of_type(kind: AxisType, spec: PartitionSpec, mesh: Any) -> NamedSharding:
    """Return the part of a spec for the mesh axes of one type."""
    own = {n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == kind}
    return NamedSharding(mesh, PartitionSpec(*(_only(own, entry) for entry in spec)))


def _only(names: Collection[Any], entry: Any) -> Any:
    if entry is PartitionSpec.UNCONSTRAINED:
        return entry
    return tuple(name for name in _names_in(entry) if name in names) or None


def _for_parts(value: Any) -> Any:
    """Return a placement for one device's part of an array, inside `filter_shard_map`.

    It has no manual axes of the mesh, because the array is already split along them.
    """
    mesh, spec, manual = context_mesh(), _spec_of(value), manual_axes()
    if spec is None or not manual:
        return value
    if isinstance(value, NamedSharding) and dict(value.mesh.shape) != dict(mesh.shape):
        return value
    if len(manual) == len(mesh.axis_names):
        return None
    return NamedSharding(mesh, PartitionSpec(*(_without(entry, manual) for entry in spec)))


def _without(entry: Any, names: Collection[Any]) -> Any:
    """Return an entry of a spec without some mesh axes."""
    if isinstance(entry, tuple):
        return tuple(name for name in _names_in(entry) if name not in names) or None
    return None if entry in names else entry


def sharded_as(tree: _T, like: _T) -> _T:
    """Return a tree whose arrays are split over explicit axes like those of another tree.

    Arrays that are on no mesh count as replicated.
    """

    def shard(x: Any, other: Any) -> Any:
        if not is_array(x) or not is_array(other) or split_axes(x) == split_axes(other):
            return x
        spec = PartitionSpec(*((None, *at)[-1] if len(at) < 2 else at for at in split_axes(other)))
        return untyped_jax.sharding.reshard(x, NamedSharding(explicit_mesh(x, other), spec))

    return jtu.tree_map(shard, tree, like)


def on_mesh_of(tree: _T, like: PyTree) -> _T:
    """A tree whose arrays are on the mesh of another tree; replicated if they were on none."""
    mesh = explicit_mesh(*jtu.tree_leaves(like))

    def shard(x: Any) -> Any:
        if not is_array(x) or explicit_mesh(x) is not None:
            return x
        return untyped_jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))

    return tree if mesh is None else jtu.tree_map(shard, tree)


def _shard(array: Any, value: Any) -> Any:
    if value is None:
        return array
    # Arrays cannot be moved onto a part of a mesh.
    if isinstance(array, Tracer) or isinstance(getattr(value, "mesh", None), AbstractMesh):
        return constrain(array, value)
    moved = jax.device_put(array, value)
    # A constant in a traced function, where `device_put` is only a hint.
    return constrain(array, value) if isinstance(moved, Tracer) else moved


def _explain_meshes(assigned: Sequence[Assigned], where: str, error: Exception) -> None:
    """Raise a better error if there is no mesh, or if the arrays are on another one."""
    # JAX has two messages for this, and no class of error.
    found = [each for each in assigned if isinstance(each.value, PartitionSpec)]
    if found and "mesh" in str(error) and context_mesh() is None:
        raise ArgumentError(
            f"{where}: a PartitionSpec needs a mesh in context",
            at=[f"{p}: {describe(array)} with {spec_text(spec)}" for p, array, spec in found],
            hint=f"NamedSharding(mesh, {spec_text(found[0].value)})  # or jax.set_mesh(mesh)",
        ) from error
    for place, array, value in assigned:
        if not isinstance(value, NamedSharding):
            continue
        if isinstance(value.mesh, AbstractMesh) and not isinstance(array, Tracer):
            expected = "a mesh of devices, for arrays outside compiled code"
            raise ArgumentError(where, expected, "an abstract mesh", at=[place]) from error
        own: Any = untyped_jax.typeof(array).sharding.mesh
        if not own.empty and dict(own.shape) != dict(value.mesh.shape):
            raise ArgumentError(
                where,
                f"arrays on the mesh of their shardings ({_mesh_text(value.mesh)})",
                f"an array on another mesh ({_mesh_text(own)})",
                at=[f"{place}: {describe(array)}"],
                hint=["move it first, outside compiled code:", "x = pm.filter_shard(x, sharding)"],
            ) from error


def _mesh_text(mesh: Any) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def _explain_twice(
    assigned: Sequence[Assigned], where: str, error: Exception, *, have_names: bool
) -> None:
    """Raise a better error if a surrounding map is split along a mesh axis that a spec names."""
    # JAX's class has no public name. Within a spec no axis appears twice.
    if type(error).__name__ != "DuplicateSpecError":
        return
    found = [
        (axis, f"{place}: {describe(array)} with {spec_text(spec)}")
        for place, array, value in assigned
        if (spec := _spec_of(value)) is not None
        for axis in axes_in(spec)
        if f"`{axis}`" in str(error)
    ]
    if found:
        raise SpecError(
            where,
            "mesh axes that no surrounding map uses",
            repr(found[0][0]),
            at=[line for _, line in found],
            hint=[
                "do not split that axis of the array, for example:",
                'pm.filter_shard(x, "_ embed")' if have_names else "P(None, ...)",
            ],
        ) from error


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
        ArgumentError: if there is no mesh in context for a `PartitionSpec`.
        ShapeError: if a spec has more entries than its array has axes, if (outside compiled code)
            it does not divide the array evenly, or if names and axes differ in number. The error
            names the path.
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
    where = "filter_shard(device_or_shardings)"
    assigned = assign(device_or_shardings, x, "x", placement_terms(where))
    by_name = [isinstance(each.value, str) for each in assigned]
    if any(by_name):
        assigned = lay_by_names(assigned, where)
    converted = [
        each._replace(value=_for_parts(each.value))
        for each in convert_values(assigned, as_sharding, where, PLACEMENTS)
    ]
    # In compiled code, JAX pads axes that it cannot divide, on meshes of some types.
    check_placements(list(compress(converted, by_name)), where)
    leaves, treedef = jtu.tree_flatten(x)
    try:
        sharded = iter([_shard(array, value) for _, array, value in converted])
    # JAX's errors about specs that are too long or repeat an axis have no public class.
    except Exception as error:
        explain_placements(converted, where, error)
        _explain_meshes(converted, where, error)
        _explain_twice(converted, where, error, have_names=any(by_name))
        raise
    return treedef.unflatten([next(sharded) if is_array(leaf) else leaf for leaf in leaves])
