"""The sharding of members and their inputs on a mesh with explicit axes.

The rule is that of `functional.explicit_meshes`: inputs lead, and members are gathered where both
are split over one mesh axis. A scan needs layers that are replicated along the layers; a map needs
members that are all split alike. Without such a mesh nothing is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pytreemod.nn.functional.explicit_meshes import resharded
from pytreemod.tree.predicates import is_array
from pytreemod.tree.split_arrays import explicit_mesh, split_axes
from pytreemod.typing import jtu

_T = TypeVar("_T")
_S = TypeVar("_S")


def gathered(tree: _T) -> _T:
    """Gather the arrays of a tree along their first axis."""

    def gather(x: Any) -> Any:
        return _moved(x, 0, (), explicit_mesh(x)) if _names_at(x, 0) else x

    return jtu.tree_map(gather, tree)


def split_alike(
    own: _T, shared: _S, inputs: Sequence[Any], axes: Sequence[int | None]
) -> tuple[_T, _S, list[Any]]:
    """Split everything that a map over members gets alike, along the members.

    Follows the inputs that have an entry for each member. If there are none, it follows the
    members, except for mesh axes that split the inputs along other axes.

    Args:
        own: has an entry for each member, on the first axis of its arrays.
        shared: values that all members share.
        inputs: the leaves of the inputs.
        axes: the axis of each input that has an entry for each member; None for no axis.

    Returns:
        The members' values, the shared ones, and the inputs.
    """
    pairs = list(zip(inputs, axes, strict=True))
    held = [names for x in jtu.tree_leaves(own) if (names := _names_at(x, 0))]
    given = [names for x, axis in pairs if axis is not None and (names := _names_at(x, axis))]
    if not held and not given:
        return own, shared, [*inputs]
    taken = {
        name
        for x, axis in pairs
        for i, at in enumerate(split_axes(x) if is_array(x) else ())
        for name in at
        if axis is None or i != axis % x.ndim
    }
    names = given[0] if given else tuple(name for name in held[0] if name not in taken)
    # Any of their meshes; arrays that are on no mesh move to it.
    mesh = explicit_mesh(*filter(is_array, [*jtu.tree_leaves(own), *inputs]))

    def whole(x: Any) -> Any:
        return _moved(x, None, names, mesh)

    def along(x: Any, axis: int | None = 0) -> Any:
        return _moved(x, axis, names, mesh)

    split = [x if axis is None else along(x, axis) for x, axis in pairs]
    return jtu.tree_map(along, own), jtu.tree_map(whole, shared), split


def _names_at(x: Any, axis: int) -> tuple[str, ...]:
    """Return the mesh axes that split an array along an axis."""
    axes = split_axes(x) if is_array(x) else ()
    return axes[axis] if axes else ()


def _moved(x: Any, axis: int | None, names: tuple[str, ...], mesh: Any) -> Any:
    """Split an array over some mesh axes along one axis, or none, and not along the others."""
    if not is_array(x):
        return x
    before = split_axes(x) or ((),) * x.ndim
    after = [tuple(name for name in at if name not in names) for at in before]
    if axis is not None:
        after[axis] = names
    return x if tuple(after) == before else resharded(x, mesh, after)
