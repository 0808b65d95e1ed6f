"""The carry of a loop: a tree that keeps its structure in every step.

It is taken apart before the loop and assembled in each step, so it may be a Module, a State, or a
container of anything. Its static values are part of the program, which is the same for all steps.
So each step must return them unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytreemod.errors import StructureError, explain
from pytreemod.transform.boundary.agreement import may_be_promoted
from pytreemod.transform.compilation.placements import spec_text
from pytreemod.tree.differences import (
    Difference,
    aval_of,
    compare,
    is_number,
    varying_axes,
)
from pytreemod.tree.paths import path_text
from pytreemod.tree.snapshots import Structure
from pytreemod.tree.split_arrays import split_axes
from pytreemod.typing import PyTree, jtu


def returned(where: str, root: str, structure: Structure, values: Any, after: PyTree) -> list[Any]:
    """Return the values of the carry that a step returned.

    Args:
        where: the name of the loop in errors.
        root: the name of the carry.
        structure: the structure of the carry.
        values: its values before the step.
        after: the carry that the step returned.

    Raises:
        StructureError: if they do not match; the error shows both by path.
    """
    found = compare(structure.assemble(values), after, _fits)
    if found:
        raise StructureError(_explain_change(where, root, found))
    leaves = jtu.tree_leaves(after)
    return [leaves[i] for i in structure.positions or ()]


def _fits(before: Any, after: Any) -> bool:
    """Whether JAX accepts `after` in a carry that was `before`, perhaps by promoting that."""
    a, b = aval_of(before), aval_of(after)
    if a.shape != b.shape or varying_axes(a) != varying_axes(b) or split_axes(a) != split_axes(b):
        return False
    # JAX starts a loop from a weak value with the dtype that its step returns.
    return a.dtype == b.dtype or may_be_promoted(a, b) not in (None, a.dtype)


def _explain_change(where: str, root: str, found: Sequence[Difference]) -> str:
    places = [entry.line(root) for entry in found]
    return explain(
        f"{where}: the {root} changes its type in a step",
        at=places,
        hint=_hint_of_change(root, found),
    )


def _hint_of_change(root: str, found: Sequence[Difference]) -> str:
    for entry in found:
        if entry.of_dtypes:
            return _cast(path_text(entry.path, root), entry)
        if entry.of_arrays and aval_of(entry.old).shape == aval_of(entry.new).shape:
            if split_axes(aval_of(entry.old)) != split_axes(aval_of(entry.new)):
                return _layout(path_text(entry.path, root), entry)
            axes = ", ".join(map(repr, sorted(varying_axes(aval_of(entry.new)), key=str)))
            return f'jax.lax.pcast({path_text(entry.path, root)}, ({axes},), to="varying")'
    return ""


def _layout(place: str, entry: Difference) -> str:
    return f"pm.filter_shard({place}, {_sharding_text(aval_of(entry.old))})   # in the step"


def _sharding_text(aval: Any) -> str:
    return f"NamedSharding(mesh, {spec_text(aval.sharding.spec)})"


def _cast(place: str, entry: Difference) -> str:
    dtype = f"jnp.{aval_of(entry.old).dtype.name}"
    if is_number(entry.new):
        return f"jnp.asarray({entry.new!r}, {dtype})   # in the step"
    return f"{place}.astype({dtype})   # in the step"
