"""Which axes of an array are of layers that a node holds as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytreemod.tree.paths import parse_pattern, step_names
from pytreemod.typing import KeyPath, class_of


def count_member_axes(nodes: Sequence[Any], path: KeyPath) -> int:
    """How many leading axes of what is at a path are of layers that are held as one.

    A node that holds layers as one has a method `__stacked__`, without arguments, which gives the
    paths below which every array has one such axis.

    Args:
        nodes: those above, from the root; one for each step of the path.
        path: from the root.

    Returns:
        A number, one for each such node.

    Examples:
        >>> import jax
        >>> class Layers(dict):
        ...     def __stacked__(self):
        ...         return ("['w']",)
        >>> count_member_axes([Layers()], (jax.tree_util.DictKey("w"),))
        1
    """
    return sum(_is_stacked(node, path[i:]) for i, node in enumerate(nodes))


def _is_stacked(node: Any, below: KeyPath) -> bool:
    # Asked of any node, for this room does not know layers.
    stacked = getattr(class_of(node), "__stacked__", None)
    if stacked is None:
        return False
    steps = step_names(below)
    starts = [parse_pattern(text) for text in stacked(node)]
    return any(steps[: len(start)] == start for start in starts)
