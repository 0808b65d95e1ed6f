"""Several trees as one with a further axis, and back.

**Law.** `unstack(stack(trees))` equals `trees`, for all trees that have an array and differ only in
the values of their arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, ShapeError, StructureError, describe
from pytreemod.tree.differences import compare
from pytreemod.tree.kinds import are_one
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
        ShapeError: if an array has too few axes for `axis`.
        StructureError: if two trees differ; the error names the paths.

    Examples:
        >>> stack([{"x": jnp.zeros(2), "unit": "cm"}, {"x": jnp.ones(2), "unit": "cm"}])
        {'unit': 'cm', 'x': Array([[0., 0.],
               [1., 1.]], dtype=float32)}
    """
    # The characters of a string, or the keys of a dict, are not members.
    if isinstance(trees, (str, bytes, Mapping)) or not isinstance(trees, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
        raise ArgumentError(f"stack: the members are several trees, not {describe(trees)}")
    members = [*trees]
    if not members:
        raise ArgumentError("stack: there is no tree")
    arrays, structure = divide(members[0])
    columns = [arrays]
    for i, member in enumerate(members[1:], 1):
        # Before arrays are stacked, which would fail without a path.
        found = compare(members[0], member, _alike)
        if found:
            form = f"{{}} in trees[0], {{}} in trees[{i}]"
            at = [each.line("tree", form) for each in found]
            raise StructureError("stack: the trees differ in more than their arrays' values", at=at)
        columns.append(divide(member)[0])
    # The first represents all, because they do not differ.
    wrong = [
        f"{path_text(path, 'tree')}: {describe(leaf)}"
        for path, leaf in jtu.tree_leaves_with_path(members[0])
        if is_array(leaf) and not -leaf.ndim - 1 <= axis <= leaf.ndim
    ]
    if wrong:
        raise ShapeError(f"stack: the stacked arrays have no axis {axis}", at=wrong)
    stacked = [_stack_arrays(column, axis) for column in zip(*columns, strict=True)]
    return structure.assemble(stacked)


def _alike(first: Any, second: Any) -> bool:
    if is_array(first) and is_array(second):
        return first.shape == second.shape and first.dtype == second.dtype
    if is_array(first) or is_array(second):
        return False
    return are_one(first, second)


def _stack_arrays(arrays: Sequence[Any], axis: int) -> Any:
    # NumPy arrays remain NumPy arrays, so a data set can be stacked in host memory.
    if any(isinstance(array, jax.Array) for array in arrays):
        return jnp.stack(arrays, axis)
    return np.stack(arrays, axis)


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
    sizes = {x.shape[axis] if -x.ndim <= axis < x.ndim else None for x in arrays}
    if not sizes:
        raise ArgumentError("unstack: the tree has no array")
    if len(sizes) > 1 or None in sizes:
        places = [(p, x) for p, x in jtu.tree_leaves_with_path(tree) if is_array(x)]
        at = [f"{path_text(path, 'tree')}: {describe(x)}, axis {axis}" for path, x in places]
        raise ShapeError("unstack: arrays lack the axis, or differ in size along it", at=at)
    columns = [_unstack_array(array, axis) for array in arrays]
    return [structure.assemble(members) for members in zip(*columns, strict=True)]


def _unstack_array(array: Any, axis: int) -> Sequence[Any]:
    if isinstance(array, jax.Array):
        return jnp.unstack(array, axis=axis)
    return list(np.moveaxis(array, axis, 0))
