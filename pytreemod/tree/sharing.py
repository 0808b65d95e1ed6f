"""Parameters that are at two paths of a tree.

A tree says nothing of sharing: what is at two paths comes out of the next transform as two.
For a parameter that is nearly always a mistake: two gradients, two updates, two values from then
on. Found are the same array of two or more axes, and any array of a record (a layer) that itself
is at two paths; not a bias of zeros that two layers happen to have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from pytreemod.tree.nodes import Location, locations, record_of
from pytreemod.typing import KeyPath, PyTree


def places_of_shared(
    tree: PyTree,
    chosen: Sequence[bool],
    identity: Callable[[Any], int] = id,
    known: Collection[int] = (),
) -> list[list[Location]]:
    """The locations of each leaf that is shared.

    Args:
        tree: any tree.
        chosen: which of its leaves to look at, in JAX's order.
        identity: what is equal for two leaves that are one.
        known: the identities of leaves that are known to be parameters at several paths.

    Returns:
        For each shared leaf, where it is: two paths or more.
    """
    found: dict[int, list[Location]] = {}
    for loc, is_chosen in zip(locations(tree), chosen, strict=True):
        if is_chosen:
            found.setdefault(identity(loc.leaf), []).append(loc)
    several = ((one, group) for one, group in found.items() if len(group) > 1)
    return [group for one, group in several if one in known or _is_one_parameter(group)]


def _is_one_parameter(group: Sequence[Location]) -> bool:
    if not all(any(record_of(node) is not None for node in loc.nodes) for loc in group):
        # Arrays in a plain container are an argument's, not a model's.
        return False
    return group[0].leaf.ndim >= 2 or _is_of_one_layer(group)


def _is_of_one_layer(group: Sequence[Location]) -> bool:
    """Whether one record, which holds a leaf, is at two paths."""
    paths: dict[int, KeyPath] = {}
    for loc in group:
        for i, node in enumerate(loc.nodes):
            # Two arrays of one record have one path up to it: that is no sharing.
            path = loc.path[:i]
            if record_of(node) is not None and paths.setdefault(id(node), path) != path:
                return True
    return False
