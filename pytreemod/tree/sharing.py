"""Nodes and parameters that are at two paths of a tree.

A tree does not record sharing: a value at two paths becomes two values in the next transform.
For a parameter that is nearly always a mistake: two gradients, two updates, two values from then
on. Two cases are found: one array of two or more axes at two paths, and any array of a Module
that is itself at two paths. A bias of zeros that two layers have in common is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytreemod.errors import StructureError
from pytreemod.tree.nodes import Location, children_of, is_module, locations
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_inexact_array
from pytreemod.typing import KeyPath, PyTree


def tree_check(pytree: PyTree) -> None:
    """Check that no node or parameter appears twice in a tree, and that no node contains itself.

    A transform turns shared nodes into separate ones: a shared layer becomes two layers, and a
    shared parameter becomes two parameters. Some sharing is allowed: nodes without leaves, leaves
    that are not parameters (buffers, numbers), and small arrays (at most one axis) of different
    layers.

    Args:
        pytree: the tree.

    Raises:
        StructureError: if a node, or a parameter, appears twice; all its paths are named.

    Examples:
        >>> tree_check([[1], [1]])
        >>> shared = [1]
        >>> tree_check([shared, shared])
        Traceback (most recent call last):
            ...
        pytreemod.errors.StructureError: tree_check: one node at two paths
          at [0]
          at [1]
    """
    seen: dict[int, KeyPath] = {}

    def visit(node: Any, path: KeyPath) -> None:
        children = children_of(node)
        # A node without children is nowhere else if it is shared.
        first = seen.setdefault(id(node), path) if children else path
        if first != path:
            places = [path_text(first), path_text(path)]
            raise StructureError("tree_check: one node at two paths", at=places)
        for key, child in children or ():
            visit(child, (*path, key))

    visit(pytree, ())
    chosen = [is_inexact_array(loc.leaf) and loc.role != "buffer" for loc in locations(pytree)]
    for group in places_of_shared(pytree, chosen):
        places = [path_text(loc.path) for loc in group]
        raise StructureError("tree_check: one array at several paths", at=places)


def places_of_shared(tree: PyTree, chosen: Sequence[bool]) -> list[list[Location]]:
    """Return the locations of each shared leaf.

    Args:
        tree: any tree.
        chosen: which of its leaves to look at, in JAX's order.

    Returns:
        For each shared leaf its locations: two or more.
    """
    found: dict[int, list[Location]] = {}
    for loc, is_chosen in zip(locations(tree), chosen, strict=True):
        if is_chosen:
            found.setdefault(id(loc.leaf), []).append(loc)
    return [group for group in found.values() if len(group) > 1 and _is_one_parameter(group)]


def _is_one_parameter(group: Sequence[Location]) -> bool:
    if not all(any(is_module(node) for node in loc.nodes) for loc in group):
        # Arrays in a plain container belong to an argument, not to a model.
        return False
    return group[0].leaf.ndim >= 2 or _is_of_one_layer(group)


def _is_of_one_layer(group: Sequence[Location]) -> bool:
    """Whether a Module that contains the leaf is at two paths."""
    # Two arrays of one Module share the path to it: the Module is not shared.
    places = {
        (id(node), loc.path[:i])
        for loc in group
        for i, node in enumerate(loc.nodes)
        if is_module(node)
    }
    return len({node for node, _ in places}) < len(places)
