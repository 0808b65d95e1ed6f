"""How members, and what they are called with, are laid out on a mesh with explicit axes.

The rule is that of `functional.explicit_meshes`: what a layer is called with leads, and what
members have is gathered where both are split over one mesh axis. A scan goes through layers that
each device has whole; a map, over members that are all split alike. Elsewhere nothing is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pytreemod.nn.functional.explicit_meshes import explicit_mesh, laid_out
from pytreemod.tree.predicates import is_array
from pytreemod.tree.split_arrays import split_axes
from pytreemod.typing import jtu

_T = TypeVar("_T")
_S = TypeVar("_S")


def gathered(tree: _T) -> _T:
    """A tree whose arrays are whole along their first axis."""

    def gather(x: Any) -> Any:
        return _moved(x, 0, (), explicit_mesh(x)) if _names_at(x, 0) else x

    return jtu.tree_map(gather, tree)


def laid_alike(
    own: _T, shared: _S, inputs: Sequence[Any], axes: Sequence[int | None]
) -> tuple[_T, _S, list[Any]]:
    """What a map over members is given, so that all of it is split alike along the members.

    As the inputs are that have an entry for each member; or else as the members are, but for mesh
    axes that split the inputs along other axes.

    Args:
        own: has an entry for each member, on the first axis of its arrays.
        shared: what members have that is the same for all.
        inputs: the leaves that they are called with.
        axes: where each of these has an entry for each member; None for nowhere.

    Returns:
        What the members have, and what they are called with.
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
    # The mesh of any of them; arrays on no mesh are moved to it, too.
    mesh = explicit_mesh(*filter(is_array, [*jtu.tree_leaves(own), *inputs]))

    def whole(x: Any) -> Any:
        return _moved(x, None, names, mesh)

    def along(x: Any, axis: int | None = 0) -> Any:
        return _moved(x, axis, names, mesh)

    laid = [x if axis is None else along(x, axis) for x, axis in pairs]
    return jtu.tree_map(along, own), jtu.tree_map(whole, shared), laid


def _names_at(x: Any, axis: int) -> tuple[str, ...]:
    """The mesh axes that split an array along an axis."""
    axes = split_axes(x) if is_array(x) else ()
    return axes[axis] if axes else ()


def _moved(x: Any, axis: int | None, names: tuple[str, ...], mesh: Any) -> Any:
    """An array, split over some mesh axes along one axis, or none, and not along the others."""
    if not is_array(x):
        return x
    before = split_axes(x) or ((),) * x.ndim
    after = [tuple(name for name in at if name not in names) for at in before]
    if axis is not None:
        after[axis] = names
    return x if tuple(after) == before else laid_out(x, mesh, after)
