"""`AxisRules`: from names of axes to axes of a mesh; `use_rules`: a context with such rules.

A model names its axes (`axis_names`); a program says on which axis of a mesh each name is split.
Both are plain values. So a model that trains on one device trains on eight with one more table, and
nothing in the model can disagree with it.

Activations are named where they are computed: `filter_shard(x, "batch seq embed")`. The rules for
these names are in the context, so a layer can name its activations without a mesh. The context is
part of the key of JAX's caches: a program traced under other rules, or without rules, is another
program.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pytreemod.errors import ArgumentError, ShapeError, SpecError, describe, nearest
from pytreemod.tree.traces import context_value, trace_context
from pytreemod.typing import class_of

MeshAxes: TypeAlias = str | tuple[str, ...] | None
"""An axis of a mesh; several, over which one axis of an array is split; or None."""


@dataclass(frozen=True, init=False, repr=False)
class AxisRules:
    """A table from names of axes to axes of a mesh.

    `rules | {"batch": "data"}` is a table with more rules, or with others for the same names.

    Args:
        rules: by the name of an axis, the axis of the mesh over which it is split; a tuple of
            several, the outermost first; or None for "not split". A name without a rule is not
            split, either.

    Raises:
        ArgumentError: if a name, or an axis of a mesh, is not a string, or one mesh axis is twice
            in a tuple.

    Examples:
        >>> import pytreemod as pm
        >>> rules = pm.AxisRules({"embed": "fsdp", "mlp": ("fsdp", "tensor"), "layers": None})
        >>> rules["mlp"], rules["heads"]
        (('fsdp', 'tensor'), None)
        >>> rules | {"batch": "fsdp", "embed": None, "mlp": "tensor"}
        AxisRules({'embed': None, 'mlp': 'tensor', 'layers': None, 'batch': 'fsdp'})

    Source:
        The tables of `flax.linen.logical_axis_rules`, and of T5X before it.
    """

    rules: tuple[tuple[str, MeshAxes], ...]

    def __init__(self, rules: Mapping[str, MeshAxes]):
        checked = tuple(_checked(name, axes) for name, axes in rules.items())
        object.__setattr__(self, "rules", checked)

    def __getitem__(self, name: str | None) -> MeshAxes:
        """The axis of a mesh for a name; None if it has no rule."""
        return next((axes for own, axes in self.rules if own == name), None)

    def __or__(self, more: Mapping[str, MeshAxes] | AxisRules) -> AxisRules:
        """A table with more rules; for a name in both, `more` counts."""
        added = dict(more.rules) if isinstance(more, AxisRules) else more
        return AxisRules({**dict(self.rules), **added})

    def __repr__(self) -> str:
        return f"AxisRules({dict(self.rules)})"


class RulesInUse(NamedTuple):
    """A mesh, and the rules for names of axes on it."""

    mesh: Mesh | AbstractMesh
    rules: AxisRules


_USED = "axis rules"


@contextmanager
def use_rules(mesh: Mesh | AbstractMesh, rules: AxisRules) -> Generator[None]:
    """A context in which [`filter_shard`][pytreemod.filter_shard] knows names of axes.

    In it, `filter_shard(x, "batch seq embed")` shards `x` by the rules for these names. Outside,
    such a call does nothing, so the same model runs on one device.

    The context is part of a program's key: a function is traced once for each mesh and rules, and
    once without. This is true for [`filter_jit`][pytreemod.filter_jit] and for `jax.jit`. Contexts
    nest, and the innermost one counts. A context belongs to its thread.

    The mesh is not set for anything else; for that, use `jax.set_mesh`. With explicit axes,
    compiled code needs it if none of its inputs is on the mesh.

    Args:
        mesh: the mesh.
        rules: [`AxisRules`][pytreemod.AxisRules] for the names of activations. If they differ from
            those of parameters: `rules | {"batch": "fsdp", "embed": None}`.

    Raises:
        ArgumentError: if `mesh` is not a mesh, or `rules` are not `AxisRules`.
        SpecError: if a rule names an axis that the mesh does not have.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
        >>> @pm.filter_jit
        ... def double(x):
        ...     return pm.filter_shard(2 * x, "batch embed")
        >>> with pm.use_rules(mesh, pm.AxisRules({"batch": "data", "embed": None})):
        ...     double(jnp.ones((4, 3))).sharding.spec
        P('data', None)

    Source:
        `flax.linen.logical_axis_rules`.
    """
    check_is_mesh("use_rules", mesh)
    if not isinstance(rules, AxisRules):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
        raise ArgumentError(f"use_rules: the rules are AxisRules, not {describe(rules)}")
    for name, axes in rules.rules:
        for axis in mesh_axes(axes):
            if axis not in mesh.axis_names:
                near = nearest(axis, map(str, mesh.axis_names))
                fact = f"use_rules: the mesh has no axis {axis!r}{near}, the rule for {name!r}"
                raise SpecError(fact)
    with trace_context(_USED, RulesInUse(mesh, rules)):
        yield


def mesh_axes(entry: Any) -> tuple[Any, ...]:
    """The axes of a mesh in an entry of a spec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if class_of(entry) is tuple else (entry,)


def spec_text(entries: Iterable[Any]) -> str:
    """Return the entries of a spec as text, the same in all releases of JAX."""
    return f"P({', '.join(map(repr, entries))})"


def sharding_of_names(text: str, array: Any, place: str) -> NamedSharding | None:
    """Return the sharding of an array under the rules in use; None if there are none.

    Args:
        text: a name for each axis of the array; `_` for an axis without one.
        array: the array.
        place: its path, for errors.

    Raises:
        ShapeError: if names and axes differ in number.
        SpecError: if a name has no rule, or two names have one axis of the mesh.
    """
    names, used = text.split(), context_value(_USED)
    at = [f"{place}: {describe(array)} with {text!r}"]
    if len(names) != array.ndim:
        raise ShapeError("filter_shard: names and axes differ in number", at=at)
    if used is None:
        return None
    known = {name for name, _ in used.rules.rules}
    for name in names:
        if name != "_" and name not in known:
            fact = f"filter_shard: there is no rule for {name!r}{nearest(name, known)}"
            raise SpecError(fact, at=at, hint=f"pm.use_rules(mesh, rules | {{{name!r}: None}})")
    entries = [None if name == "_" else used.rules[name] for name in names]
    every = [axis for entry in entries for axis in mesh_axes(entry)]
    if len({*every}) < len(every):
        fact = f"filter_shard: two axes are split over one of the mesh: {spec_text(entries)}"
        raise SpecError(fact, at=at)
    return NamedSharding(used.mesh, PartitionSpec(*entries))


# ---- refusals


def check_is_mesh(where: str, mesh: Any) -> None:
    """Refuse anything but a mesh.

    Raises:
        ArgumentError: if the value is not a mesh.
    """
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise ArgumentError(
            f"{where}: {describe(mesh)} is no mesh", hint='jax.make_mesh((8,), ("fsdp",))'
        )


def _checked(name: Any, axes: Any) -> tuple[str, MeshAxes]:
    several: Any = axes if class_of(axes) is tuple else () if axes is None else (axes,)
    if not isinstance(name, str) or not all(isinstance(axis, str) for axis in several):
        fact = "AxisRules: a rule is from a name to an axis of a mesh, several, or None"
        raise ArgumentError(fact, at=[f"{describe(name)}: {describe(axes)}"])
    if len({*several}) < len(several):
        raise ArgumentError(f"AxisRules: {name!r} has one axis of the mesh twice: {axes!r}")
    return name, axes or None
