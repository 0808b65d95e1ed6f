"""Errors of maps on meshes with explicit axes, which name the argument and the mesh axis.

If members are split over a mesh axis, each device computes its own members and needs all of their
inputs. So an array that is shared by all members cannot be split over that axis, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from pytreemod.errors import ShapeError
from pytreemod.transform.compilation.placements import spec_text
from pytreemod.tree.nodes import is_node, record_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.split_arrays import split_axes, split_text
from pytreemod.typing import PyTree, jtu


class _Row(NamedTuple):
    """An array of a call."""

    place: str
    array: Any
    axis: int | None

    @property
    def over(self) -> tuple[str, ...]:
        """The mesh axes over which it is split along its axis; or along any, if it has none."""
        axes = split_axes(self.array)
        if self.axis is None:
            return tuple(name for names in axes for name in names)
        return axes[self.axis] if axes else ()


def explain_split(
    where: str,
    fn: Callable[..., Any],
    named: Sequence[tuple[str, PyTree]],
    axes: Sequence[int | None],
    error: Exception,
) -> None:
    """Raise a better error than JAX's, if the reason is how the arrays of a map are split.

    JAX raises one of three classes, or more, wherever two arrays meet in the function.

    Args:
        where: the name of the map in errors.
        fn: the function.
        named: its arguments with their names.
        axes: the axis of each leaf of the arguments; None if it is the same for all members.
        error: the error of JAX.

    Raises:
        ShapeError: if it is.
    """
    found = [(path_text(p, n), x) for n, tree in named for p, x in jtu.tree_leaves_with_path(tree)]
    rows = [
        _Row(place, x, axis) for (place, x), axis in zip(found, axes, strict=True) if is_array(x)
    ]
    own = _own_trees(fn)
    rows += [
        _Row(path_text(path, name), x, None)
        for name, tree in own
        for path, x in jtu.tree_leaves_with_path(tree)
        if is_array(x)
    ]
    mapped = [row for row in rows if row.axis is not None]
    taken = {name for row in mapped for name in row.over}
    if not any(name in str(error) for name in taken):
        return
    if len({row.over for row in mapped}) > 1:
        _refuse_uneven(where, mapped, error)
    whole = [row for row in rows if row.axis is None and taken.intersection(row.over)]
    if whole:
        _refuse_shared(where, own, named, whole, taken, error)


def _own_trees(fn: Callable[..., Any]) -> list[tuple[str, PyTree]]:
    """Return the trees in a function, or that it refers to, besides its arguments."""
    if is_node(fn):
        return [("model", fn)]
    try:
        variables = inspect.getclosurevars(fn)
    except TypeError:
        return []
    return [*{**variables.globals, **variables.nonlocals}.items()]


def _refuse_uneven(where: str, rows: Sequence[_Row], error: Exception) -> None:
    first = next(row for row in rows if row.over)
    other = next(row for row in rows if row.over != first.over)
    raise ShapeError(
        where,
        "the same split of all arrays along the mapped axis",
        "different splits",
        at=[f"{row.place}: {split_text(row.array)}, axis {row.axis}" for row in rows],
        hint=[
            "give them the same sharding first:",
            _resharding_code(other, other.axis, first.over),
        ],
    ) from error


def _refuse_shared(
    where: str,
    own: Sequence[tuple[str, PyTree]],
    named: Sequence[tuple[str, PyTree]],
    rows: Sequence[_Row],
    taken: set[str],
    error: Exception,
) -> None:
    over = ", ".join(map(repr, sorted(taken)))
    models = [n for n, tree in (*own, *named) if record_of(tree) is not None]
    inputs = [name for name, tree in named if name not in models and jtu.tree_leaves(tree)]
    hint = ["gather them first:", _resharding_code(rows[0], None, tuple(taken))]
    if models and inputs:
        hint = [
            "call the layer with the batch, without a map; it gathers its weights:",
            f"{models[0]}({inputs[0]})",
        ]
    raise ShapeError(
        where,
        f"shared arrays that are replicated along {over}, the mesh axis of the members",
        f"{len(rows)} array{'s' * (len(rows) > 1)} that {'are' if len(rows) > 1 else 'is'} split",
        at=[f"{row.place}: {split_text(row.array)}" for row in rows],
        hint=hint,
    ) from error


def _resharding_code(row: _Row, axis: int | None, over: tuple[str, ...]) -> str:
    """Return code that shards an array: along one axis, or no longer over some mesh axes."""
    typed: Any = jax.typeof(row.array).sharding
    spec: list[Any] = list(typed.spec)
    if axis is None:
        spec = [
            None if set(names) & set(over) else at
            for at, names in zip(spec, split_axes(row.array), strict=True)
        ]
    else:
        spec = spec or [None] * row.array.ndim
        spec[axis] = over if len(over) > 1 else next(iter(over))
    return f"pm.filter_shard({row.place}, NamedSharding(mesh, {spec_text(PartitionSpec(*spec))}))"
