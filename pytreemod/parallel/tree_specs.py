"""`partition_specs` and `shardings`: how rules split each leaf of a tree.

A model names its axes (`axis_names`); a program says on which axis of a mesh each name is split
(`AxisRules`). Nothing in the model can disagree with either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pytreemod.errors import ArgumentError, ShapeError, SpecError, describe, nearest
from pytreemod.module.naming_axes import LeafNames, fitting_names
from pytreemod.transform.compilation.axis_rules import AxisRules, check_is_mesh, mesh_axes
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
        ShapeError: if an annotation does not fit its leaf.
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
    rows = rows_of("partition_specs", tree, rules)
    return jtu.tree_structure(tree).unflatten([row.spec for row in rows])


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
    return shardings_for("shardings", tree, mesh, rules)


def shardings_for(where: str, tree: PyTree, mesh: Mesh | AbstractMesh, rules: Any) -> PyTree:
    """`shardings`, for a call with another name.

    Raises:
        ArgumentError, ShapeError, SpecError: as `shardings`.
    """
    rows = rows_of(where, tree, rules)
    check_mesh(where, rows, mesh)
    made = {spec: NamedSharding(mesh, spec) for spec in {row.spec for row in rows}}
    return jtu.tree_structure(tree).unflatten([made[row.spec] for row in rows])


# ---- one leaf


class SplitLeaf(NamedTuple):
    """A leaf with the names of its axes, and its spec.

    Attributes:
        loc: the leaf.
        names: the names of its axes.
        spec: how it is split.
    """

    loc: Location
    names: LeafNames
    spec: PartitionSpec

    @property
    def path(self) -> str:
        """The path of the leaf."""
        return path_text(self.loc.path)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the leaf."""
        return tuple(getattr(self.loc.leaf, "shape", ()))


def rows_of(where: str, tree: PyTree, rules: Any) -> list[SplitLeaf]:
    """Return the names of the axes, and the spec, of each leaf of a tree.

    Args:
        where: the name of the call, for errors.
        tree: the tree.
        rules: as for `partition_specs`.

    Raises:
        ArgumentError, ShapeError, SpecError: as `partition_specs`.
    """
    locs = list(locations(tree))
    names = fitting_names(where, locs)
    each = rules.values(tree) if isinstance(rules, By) else [rules] * len(locs)
    pairs = list(zip(locs, names, each, strict=True))
    for _, _, rule in pairs:
        _check_rule(where, rule)
    # Most of thousands of leaves share names and rule with another.
    specs = {(own.names, id(rule)): (own, rule) for _, own, rule in pairs}
    specs = {key: _spec(own, rule) for key, (own, rule) in specs.items()}
    rows = [SplitLeaf(loc, own, specs[own.names, id(rule)]) for loc, own, rule in pairs]
    _refuse_shared(where, rows)
    _refuse_unused(where, [(own.names, rule) for _, own, rule in pairs])
    return rows


def _spec(names: LeafNames, rule: Any) -> PartitionSpec:
    if isinstance(rule, PartitionSpec):
        return rule
    return PartitionSpec(*(rule[name] for name in names.names))


def check_mesh(where: str, rows: Iterable[SplitLeaf], mesh: Any) -> None:
    """Refuse rules that do not fit a mesh.

    Raises:
        ArgumentError, ShapeError, SpecError: as `shardings`.
    """
    check_is_mesh(where, mesh)
    sizes: dict[Any, int] = dict(mesh.shape)
    unknown: dict[str, None] = {}
    unfit: list[str] = []
    # Those that fit; the error lists each of the others.
    seen: set[tuple[Any, ...]] = set()
    for row in rows:
        if (row.spec, row.shape) in seen:
            continue
        count = len(unfit)
        for i, entry in enumerate(row.spec):
            axes = mesh_axes(entry)
            missing = [axis for axis in axes if axis not in sizes]
            unknown.update(dict.fromkeys(missing))
            parts = _product(sizes.get(axis, 1) for axis in axes)
            if not missing and i < len(row.shape) and row.shape[i] % parts:
                shown = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
                named = "" if row.names.names[i] is None else f" ({row.names.names[i]})"
                unfit.append(
                    f"{row.path}: {describe(row.loc.leaf)}, axis {i}{named} of {row.shape[i]}"
                    f" over {shown}"
                )
        if len(unfit) == count:
            seen.add((row.spec, row.shape))
    if unknown:
        got = ", ".join(f"{axis!r}{nearest(axis, map(str, sizes))}" for axis in unknown)
        known = ", ".join(map(repr, sizes))
        raise SpecError(f"{where}(rules)", f"axes of the mesh ({known})", got)
    if unfit:
        raise ShapeError(
            where,
            "axes that the mesh divides evenly",
            f"{len(unfit)} others",
            at=unfit,
            hint=["do not split them, by name or by path:", "pm.by({path: P(), ...: rules})"],
        )


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


# ---- refusals


def _check_rule(where: str, rule: Any) -> None:
    if not isinstance(rule, (AxisRules, PartitionSpec)):
        hint = ["for example:", 'pm.AxisRules({"embed": "fsdp", "layers": None})']
        expected = "AxisRules, or pm.by with AxisRules and PartitionSpecs"
        raise ArgumentError(f"{where}(rules)", expected, describe(rule), hint=hint)


def _refuse_shared(where: str, rows: Sequence[SplitLeaf]) -> None:
    """Refuse to split two axes of one leaf over one axis of the mesh."""
    places: list[str] = []
    for row in rows:
        used = [axis for entry in row.spec for axis in mesh_axes(entry)]
        twice = next((axis for axis in used if used.count(axis) > 1), None)
        if twice is not None:
            own = [
                str(name)
                for name, entry in zip(row.names.names, row.spec, strict=False)
                if twice in mesh_axes(entry)
            ]
            places.append(f"{row.path}: {describe(row.loc.leaf)}, {' and '.join(own)} over {twice}")
    if places:
        raise SpecError(
            f"{where}(rules)",
            "at most one axis of a leaf for each axis of the mesh",
            f"two axes in {len(places)}",
            at=places,
            hint=["choose the axis by path:", 'pm.by({path: P("fsdp", None), ...: rules})'],
        )


def _refuse_unused(where: str, pairs: Sequence[tuple[Sequence[str | None], Any]]) -> None:
    """Refuse a name that has an axis of the mesh, if no leaf has this name."""
    tables: dict[int, AxisRules] = {id(r): r for _, r in pairs if isinstance(r, AxisRules)}
    known = {name for names, _ in pairs for name in names if name is not None}
    used = {name for rules in tables.values() for name, axes in rules.rules if axes is not None}
    unused = sorted(used - known)
    if unused and pairs:
        got = ", ".join(f"{name!r}{nearest(name, known)}" for name in unused)
        shown = ", ".join(sorted(known)) or "none"
        raise SpecError(
            f"{where}(rules)",
            f"names that axes of the tree have ({shown})",
            got,
            hint=[
                "to ignore a name that this model does not have, map it to None:",
                f"{{{unused[0]!r}: None}}",
            ],
        )
