"""`partition_specs` and `shardings`: how rules split each leaf of a tree.

A model names its axes (`axis_names`); a program says on which axis of a mesh each name is split
(`AxisRules`). Nothing in the model can disagree with either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pytreemod.errors import ArgumentError, ShapeError, SpecError, describe, nearest
from pytreemod.module.naming_axes import AxisNames, names_of
from pytreemod.transform.axis_rules import AxisRules, check_is_mesh, mesh_axes, spec_text
from pytreemod.tree.nodes import Location, locations
from pytreemod.tree.paths import path_text
from pytreemod.tree.prefixes import By
from pytreemod.typing import PyTree, jtu


def partition_specs(tree: PyTree, rules: Any) -> PyTree:
    """Return a `PartitionSpec` for each leaf of a tree, from the names of its axes.

    The tree is a model, or a tree with its structure or its classes: gradients, an
    [`Optimizer`][pytreemod.Optimizer], moving averages. Scalars, and arrays without an annotation,
    are replicated. You can pass the result anywhere that accepts a tree of specs: `in_shardings`
    and `out_shardings` of [`filter_jit`][pytreemod.filter_jit] under a mesh,
    [`filter_shard`][pytreemod.filter_shard], `in_specs` of
    [`filter_shard_map`][pytreemod.filter_shard_map].

    Args:
        tree: the tree; its arrays may be abstract.
        rules: [`AxisRules`][pytreemod.AxisRules]; or [`by`][pytreemod.by] with one, or a
            `PartitionSpec`, for each selector.

    Returns:
        A tree of the structure of `tree`.

    Raises:
        ArgumentError: if `rules` is neither.
        SpecError: if two axes of one leaf are split over one axis of the mesh, or no axis has the
            name in a rule that splits.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> linear = pm.nn.Linear(4, 8, key=jax.random.key(0))
        >>> specs = pm.partition_specs(linear, pm.AxisRules({"out_features": "tensor"}))
        >>> specs.weight, specs.bias
        (P('tensor', None), P('tensor',))
    """
    return jtu.tree_structure(tree).unflatten([row.spec for row in rows_of(tree, rules)])


def shardings(tree: PyTree, mesh: Mesh | AbstractMesh, rules: Any) -> PyTree:
    """Return a `NamedSharding` for each leaf of a tree, from the names of its axes.

    [`partition_specs`][pytreemod.partition_specs] on a mesh, with sizes checked. You can pass the
    result anywhere that accepts a tree of shardings, including `load(like=)` and orbax.

    Args:
        tree: as for `partition_specs`.
        mesh: the mesh.
        rules: as for `partition_specs`.

    Returns:
        A tree of the structure of `tree`.

    Raises:
        ArgumentError: if `mesh` is not a mesh.
        ShapeError: if a mesh axis does not divide the axis that is split over it; the error names
            the path and the sizes.
        SpecError: if a rule names an axis that the mesh does not have; or as for
            `partition_specs`.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> linear = pm.nn.Linear(4, 8, key=jax.random.key(0))
        >>> rules = pm.AxisRules({"out_features": "tensor"})
        >>> pm.shardings(linear, mesh, rules).bias.spec
        P('tensor',)
        >>> model = pm.filter_shard(linear, pm.shardings(linear, mesh, rules))
    """
    check_is_mesh("shardings", mesh)
    made = [NamedSharding(mesh, row.spec) for row in rows_of(tree, rules, dict(mesh.shape))]
    return jtu.tree_structure(tree).unflatten(made)


class SplitLeaf(NamedTuple):
    """A leaf with the names of its axes, and its spec."""

    loc: Location
    names: AxisNames
    spec: PartitionSpec


def rows_of(tree: PyTree, rules: Any, sizes: Mapping[Any, int] | None = None) -> list[SplitLeaf]:
    """Return the names of the axes, and the spec, of each leaf of a tree.

    Args:
        tree: the tree.
        rules: as for `partition_specs`.
        sizes: of the axes of the mesh; None if there is no mesh.

    Raises:
        ArgumentError, ShapeError, SpecError: as `shardings`.
    """
    locs = [*locations(tree)]
    names = list(map(names_of, locs))
    each = rules.values(tree) if isinstance(rules, By) else [rules] * len(locs)
    _refuse_unused(names, each)
    pairs = zip(names, each, strict=True)
    specs = [_spec(own, rule) for own, rule in pairs]
    rows = list(map(SplitLeaf, locs, names, specs))
    wrong = [(fact, at) for row in rows for fact, at in _misfits(row, sizes)]
    for kind, fact in _FACTS.items():
        at = [line for own, line in wrong if own == fact]
        if at:
            raise kind(f"rules: {fact}", at=at, hint="pm.by({path: P(...), ...: rules})")
    return rows


def _spec(names: AxisNames, rule: Any) -> PartitionSpec:
    if isinstance(rule, PartitionSpec):
        return rule
    if not isinstance(rule, AxisRules):
        raise ArgumentError(f"rules: {describe(rule)} is neither AxisRules nor a PartitionSpec")
    return PartitionSpec(*(rule[name] for name in names))


_FACTS: dict[Any, str] = {
    SpecError: "an axis of the mesh is not there, or would split two axes of one leaf",
    ShapeError: "the mesh does not divide every axis evenly",
}


def _misfits(row: SplitLeaf, sizes: Mapping[Any, int] | None) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a leaf: the fact, and a line with its path."""
    axes = [axis for entry in row.spec for axis in mesh_axes(entry)]
    own = " ".join(name or "_" for name in row.names)
    at = f"{path_text(row.loc.path)}: {describe(row.loc.leaf)} ({own}) as {spec_text(row.spec)}"
    if len({*axes}) < len(axes) or (sizes is not None and not {*axes} <= sizes.keys()):
        yield _FACTS[SpecError], at
    elif sizes is not None:
        parts = [math.prod(sizes[axis] for axis in mesh_axes(entry)) for entry in row.spec]
        if any(n % part for n, part in zip(getattr(row.loc.leaf, "shape", ()), parts)):
            yield _FACTS[ShapeError], f"{at} on a mesh of {dict(sizes)}"


def _refuse_unused(names: Sequence[AxisNames], rules: Sequence[Any]) -> None:
    """Refuse a name that has an axis of the mesh, if no leaf has this name: it would do nothing."""
    tables = {id(rule): rule for rule in rules if isinstance(rule, AxisRules)}
    known = {name for own in names for name in own if name is not None}
    used = {name for table in tables.values() for name, axes in table.rules if axes is not None}
    for name in sorted(used - known):
        fact = f"rules: no axis of the tree has the name {name!r}{nearest(name, known)}"
        raise SpecError(fact, hint=f"pm.AxisRules({{{name!r}: None, ...}})  # to ignore it")
