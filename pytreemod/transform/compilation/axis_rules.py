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

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pytreemod.errors import ArgumentError, ShapeError, SpecError, describe, nearest
from pytreemod.transform.interception.argument_specs import Assigned
from pytreemod.tree.traces import traced_apart, value_apart
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
        if not isinstance(rules, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
            raise ArgumentError("AxisRules(rules)", "a dict by names of axes", describe(rules))
        checked = tuple((_check_name(name), _check_axes(name, to)) for name, to in rules.items())
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
        hint = ["activations have no path, so their rules are one table:"]
        hint.append('pm.AxisRules({"batch": "data", "embed": None})')
        raise ArgumentError("use_rules(rules)", "AxisRules", describe(rules), hint=hint)
    known = tuple(map(str, mesh.axis_names))
    for name, axes in rules.rules:
        for axis in mesh_axes(axes):
            if axis not in known:
                expected = f"axes of the mesh ({', '.join(map(repr, known))})"
                got = f"{axis!r}{nearest(axis, known)}"
                raise SpecError(f"use_rules(rules[{name!r}])", expected, got)
    with traced_apart(_USED, RulesInUse(mesh, rules)):
        yield


def rules_in_use() -> RulesInUse | None:
    """The mesh and the rules of the innermost `use_rules` of this thread; None without one."""
    return value_apart(_USED)


def mesh_axes(entry: Any) -> tuple[Any, ...]:
    """The axes of a mesh in an entry of a spec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if class_of(entry) is tuple else (entry,)


# ---- names of activations


def lay_by_names(assigned: Sequence[Assigned], where: str) -> list[Assigned]:
    """Replace names of axes by their placements under the rules in use.

    Args:
        assigned: arrays with their values in a spec; values that are not strings are unchanged.
        where: the name of the spec in errors.

    Returns:
        The same, with shardings instead of strings; with None, if no rules are in use.

    Raises:
        ShapeError: if names and axes of an array differ in number.
        SpecError: if a name has no rule, or two names of one array have one axis of the mesh.
    """
    _check_ranks(assigned, where)
    used = rules_in_use()
    texts = [each.value for each in assigned if isinstance(each.value, str)]
    placements = {text: used and _placement(text, used, where) for text in {*texts}}
    return [
        each._replace(value=placements[each.value]) if isinstance(each.value, str) else each
        for each in assigned
    ]


def _placement(text: str, used: RulesInUse, where: str) -> NamedSharding:
    names = text.split()
    known = {name for name, _ in used.rules.rules}
    unknown = [name for name in names if name != "_" and name not in known]
    if unknown:
        shown = ", ".join(f"{name!r}{nearest(name, known)}" for name in unknown)
        expected = f"names that have a rule ({', '.join(map(repr, sorted(known))) or 'none'})"
        hint = ["an axis that is not split has the rule None:"]
        hint.append(f"pm.use_rules(mesh, rules | {{{unknown[0]!r}: None}})")
        raise SpecError(where, expected, shown, hint=hint)
    entries = [None if name == "_" else used.rules[name] for name in names]
    every = [axis for entry in entries for axis in mesh_axes(entry)]
    twice = next((axis for axis in every if every.count(axis) > 1), None)
    if twice is not None:
        own = [n for n, entry in zip(names, entries, strict=True) if twice in mesh_axes(entry)]
        hint = ["split one of them, by rules for activations:"]
        hint.append(f"pm.use_rules(mesh, rules | {{{own[-1]!r}: None}})")
        expected = "one name for each axis of the mesh"
        raise SpecError(where, expected, f"{' and '.join(own)} over {twice!r}", hint=hint)
    return NamedSharding(used.mesh, PartitionSpec(*entries))


def _check_ranks(assigned: Sequence[Assigned], where: str) -> None:
    def lines() -> Iterator[str]:
        for place, array, text in assigned:
            if isinstance(text, str) and len(text.split()) != array.ndim:
                yield f"{place}: {describe(array)} with {text!r}"

    unfit = list(lines())
    if unfit:
        hint = ['one name for each axis, and "_" for an axis without one:']
        hint.append('pm.filter_shard(x, "batch _ embed")')
        expected = "as many names as an array has axes"
        raise ShapeError(where, expected, "others", at=unfit, hint=hint)


# ---- refusals


def check_is_mesh(where: str, mesh: Any) -> None:
    """Refuse anything but a mesh.

    Raises:
        ArgumentError: if the value is not a mesh.
    """
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        hint = ["make one, with the types of its axes:"]
        hint.append('jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Explicit,))')
        raise ArgumentError(f"{where}(mesh)", "a mesh", describe(mesh), hint=hint)


def _check_name(name: Any) -> str:
    if not isinstance(name, str):
        raise ArgumentError("AxisRules(rules)", "names of axes, which are texts", describe(name))
    return name


def _check_axes(name: str, axes: Any) -> MeshAxes:
    several: Any = axes if class_of(axes) is tuple else () if axes is None else (axes,)
    if not all(isinstance(axis, str) for axis in several):
        expected = "an axis of a mesh, a tuple of several, or None"
        raise ArgumentError(f"AxisRules({name!r})", expected, describe(axes))
    if len({*several}) < len(several):
        expected = "each axis of the mesh once"
        raise ArgumentError(f"AxisRules({name!r})", expected, repr(axes))
    return axes or None
