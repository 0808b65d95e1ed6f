"""Parameters that are at two paths of a tree.

A tree does not record sharing: a value at two paths becomes two values in the next transform.
For a parameter that is nearly always a mistake: two gradients, two updates, two values from then
on. Two cases are found: one array of two or more axes at two paths, and any array of a record
(a layer) that is itself at two paths. A bias of zeros that two layers have in common is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytreemod.tree.nodes import Location, locations, record_of
from pytreemod.typing import KeyPath, PyTree


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
    if not all(any(record_of(node) is not None for node in loc.nodes) for loc in group):
        # Arrays in a plain container belong to an argument, not to a model.
        return False
    return group[0].leaf.ndim >= 2 or _is_of_one_layer(group)


def _is_of_one_layer(group: Sequence[Location]) -> bool:
    """Whether a record that contains the leaf is at two paths."""
    paths: dict[int, KeyPath] = {}
    for loc in group:
        for i, node in enumerate(loc.nodes):
            # Two arrays of one record share the path to it: the record is not shared.
            path = loc.path[:i]
            if record_of(node) is not None and paths.setdefault(id(node), path) != path:
                return True
    return False
