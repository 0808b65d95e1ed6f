"""Refuse wrong options, splits and results of scans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from pytreemod.errors import (
    ArgumentError,
    ShapeError,
    SpecError,
    StructureError,
    describe,
)
from pytreemod.transform.boundary.wrapping import check_count
from pytreemod.transform.compilation.placements import spec_text
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.split_arrays import split_axes, split_text
from pytreemod.typing import PyTree, Tracer, class_of, jtu


def refuse_unroll(where: str, unroll: Any) -> None:
    """Refuse an `unroll` that is neither bool nor count.

    Raises:
        ArgumentError: if it is neither.
    """
    if not isinstance(unroll, bool):
        check_count(f"{where}(unroll)", unroll)


def as_length(where: str, length: Any) -> Any:
    """`length` unchanged, if it is a count.

    Raises:
        ArgumentError: if it is not, or is known only when the program runs.
    """
    # A bool is an int in Python. The others would fail in JAX, with names that no user wrote.
    if isinstance(length, (bool, float, str, Tracer)):
        raise ArgumentError(
            f"{where}(length)", "an int that is known while tracing", describe(length)
        )
    if isinstance(length, int) and length < 0:
        raise ArgumentError(f"{where}(length)", "a count", str(length))
    return length


def refuse_split(
    where: str, root: str, tree: PyTree, axes: Sequence[int | None], error: Exception
) -> None:
    """Raise a better error than JAX's, if a loop cannot take arrays apart.

    Args:
        where: the name of the loop in errors.
        root: the name of the tree.
        tree: the tree that is taken apart.
        axes: the axis of each of its arrays; None for arrays that each step gets whole.
        error: the error of JAX.

    Raises:
        ShapeError: if arrays are split over a mesh along that axis.
    """
    arrays = [(path, x) for path, x in jtu.tree_leaves_with_path(tree) if is_array(x)]
    split = [
        (path_text(path, root), array, axis)
        for (path, array), axis in zip(arrays, axes, strict=True)
        if axis is not None and split_axes(array) and split_axes(array)[axis]
    ]
    if not split:
        return
    place, array, axis = split[0]
    spec = [*jax.typeof(array).sharding.spec]
    spec[axis] = None
    raise ShapeError(
        where,
        "arrays that are not split along the axis of the steps",
        f"{len(split)} split over a mesh",
        at=[f"{place}: {split_text(array)}, axis {axis}" for place, array, axis in split],
        hint=[
            "gather them first:",
            f"pm.filter_shard({place}, NamedSharding(mesh, {spec_text(PartitionSpec(*spec))}))",
        ],
    ) from error


def as_pair(where: str, result: Any) -> tuple[Any, Any]:
    """Return the result of a step, as a pair.

    Raises:
        StructureError: if it is not a pair.
    """
    is_sequence = issubclass(class_of(result), (tuple, list))
    if is_sequence and len(result) == 2:
        return result[0], result[1]
    raise StructureError(
        f"{where}: the step returns no pair (carry, y), but "
        + (f"{len(result)} values" if is_sequence else describe(result)),
        hint="return carry, None",
    )


def axis_in_stack(where: str, place: str, leaf: Any, axis: int | None) -> int:
    """Return the axis of the stacked results, counted from the front.

    Args:
        where: the name of the transform in errors.
        place: the path of the array in the result.
        leaf: the array, as one step returns it.
        axis: the value of `out_axes`.

    Raises:
        SpecError: if the stacked results will not have such an axis.
    """
    if axis is None:
        raise SpecError(
            f"{where}(out_axes)",
            "an axis for each array that a step returns",
            "None",
            at=[f"{place}: {describe(leaf)}"],
            hint="each step returns its own value; to return one value, put it in the carry",
        )
    rank = leaf.ndim + 1
    if not -rank <= axis < rank:
        raise SpecError(
            f"{where}(out_axes)",
            f"an axis from {-rank} to {rank - 1}",
            str(axis),
            at=[f"{place}: {describe(leaf)} in each step"],
        )
    return axis % rank
