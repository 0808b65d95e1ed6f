"""Several trees as one with a further axis, and back.

**Law.** `unstack(stack(trees))` equals `trees`, for all trees that have an array and differ only in
the values of their arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, ShapeError, StructureError, describe
from pytreemod.tree.comparison import compare, have_one_type
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import divide
from pytreemod.typing import jtu

_T = TypeVar("_T")


def stack(trees: Iterable[_T], axis: int = 0) -> _T:
    """Return one tree whose arrays are those of several trees, stacked.

    Leaves other than arrays (numbers, functions, strings) must be equal in all trees, and are
    returned unchanged. Stacked layers equal the result of [`filter_vmap`][pytreemod.filter_vmap]
    over their class. [`filter_scan`][pytreemod.filter_scan] and `filter_vmap` take them apart.

    **Law.** `unstack(stack(trees)) == trees`.

    Args:
        trees: Modules, or other trees, that differ only in the values of their arrays.
        axis: the position of the new axis in each array.

    Returns:
        A tree of the same structure. If all arrays at a path are NumPy arrays, the result is one.

    Raises:
        ArgumentError: if there are no trees, or `trees` is one.
        StructureError: if two trees differ; the error names the paths.

    Examples:
        >>> stack([{"x": jnp.zeros(2), "unit": "cm"}, {"x": jnp.ones(2), "unit": "cm"}])
        {'unit': 'cm', 'x': Array([[0., 0.],
               [1., 1.]], dtype=float32)}
    """
    # The keys of a dict are not members.
    members = [] if isinstance(trees, Mapping) else [*trees]
    if not members:
        raise ArgumentError(f"stack: the members are several trees, not {describe(trees)}")
    columns: list[list[Any]] = []
    for i, member in enumerate(members):
        found = compare(members[0], member, have_one_type)
        if found:
            at = [each.line("tree", f"{{}} in trees[0], {{}} in trees[{i}]") for each in found]
            raise StructureError("stack: the trees differ in more than their arrays' values", at=at)
        columns.append(divide(member)[0])
    # NumPy arrays remain NumPy arrays, so a data set can be stacked in host memory.
    stacked = [
        (jnp if any(isinstance(x, jax.Array) for x in column) else np).stack(column, axis)
        for column in zip(*columns, strict=True)
    ]
    return divide(members[0])[1].assemble(stacked)


def unstack(tree: _T, axis: int = 0) -> list[_T]:
    """Return the members of a stacked tree: the inverse of `stack`.

    **Law.** `stack(unstack(tree)) == tree`, if it has at least one member.

    Args:
        tree: a Module, or another tree, whose arrays all have the axis.
        axis: the axis.

    Returns:
        A list of trees without that axis.

    Raises:
        ArgumentError: if the tree has no array, so that the number of members is unknown.
        ShapeError: if arrays lack the axis, or disagree in size; the error names the paths.

    Examples:
        >>> unstack({"x": jnp.arange(2), "unit": "cm"})
        [{'unit': 'cm', 'x': Array(0, dtype=int32)}, {'unit': 'cm', 'x': Array(1, dtype=int32)}]
    """
    arrays, structure = divide(tree)
    if not arrays:
        raise ArgumentError("unstack: the tree has no array")
    if len({x.shape[axis : axis + 1 or None] for x in arrays}) > 1:
        places = [(p, x) for p, x in jtu.tree_leaves_with_path(tree) if is_array(x)]
        at = [f"{path_text(path, 'tree')}: {describe(x)}" for path, x in places]
        raise ShapeError(f"unstack: the arrays differ in size along axis {axis}", at=at)
    columns = [
        jnp.unstack(x, axis=axis) if isinstance(x, jax.Array) else list(np.moveaxis(x, axis, 0))
        for x in arrays
    ]
    return [structure.assemble(members) for members in zip(*columns, strict=True)]
