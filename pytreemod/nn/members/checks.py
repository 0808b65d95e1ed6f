"""Checks of members before a call; their errors name the owner of the members."""

from __future__ import annotations

from typing import Any, NamedTuple

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.transform.placements import manual_axes
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.typing import jtu


class Owner(NamedTuple):
    """The class that has members, as errors name it.

    Attributes:
        name: of the class.
        member: the word for one member, and the field that has the members.
        make: the argument that makes one member.
        call: the name of an instance in the code of errors.
        number: the field with the number of members.
        least: the least number of members.
        part: the code for some of the members, in errors.
    """

    name: str
    member: str
    make: str
    call: str
    number: str
    least: int
    part: str


_SCAN = "x, _ = pm.filter_scan(lambda x, layer: (layer(x), None), x, stack.layer)"
_MAP = "y = pm.filter_vmap(lambda member: member(x))(nets.member)"
STACK = Owner("Stack", "layer", "make_layer", "stack", "depth", 0, _SCAN)
ENSEMBLE = Owner("Ensemble", "member", "make", "nets", "n", 1, _MAP)


def check_name(where: str, name: Any) -> str:
    """Refuse an axis name that is not a string.

    Raises:
        ArgumentError: if it is not a name.
    """
    if isinstance(name, str) and name.isidentifier():
        return name
    raise ArgumentError(where, "a name, such as 'layers'", describe(name))


def check_leading(owner: Owner, title: str, n: int, trees: dict[str, Any]) -> None:
    """Refuse arrays that lack the leading axis.

    Raises:
        ShapeError: if there are some; the message has their paths.
    """
    wrong = without_leading_axis(trees, n)
    if not wrong:
        return
    hint = (
        f"To call several stacked {owner.name}s, map over them:",
        f"pm.filter_vmap(lambda m: m(x))({owner.name.lower()}s)",
    )
    if manual_axes():
        hint = (f"Inside a shard_map a device has some of the {owner.member}s:", owner.part)
    raise ShapeError(
        title,
        f"arrays with a leading axis of {n}",
        f"{len(wrong)} without one",
        at=wrong,
        hint=hint if any(text.startswith(owner.member) for text in wrong) else (),
    )


def without_leading_axis(trees: dict[str, Any], n: int) -> list[str]:
    """Return the arrays that lack an entry for each member, with their paths."""
    # Only an error needs the paths, which cost more than the leaves.
    first = (n,)
    if all(not is_array(x) or x.shape[:1] == first for x in jtu.tree_leaves(trees)):
        return []
    return [
        f"{path_text(path, root)}: {describe(leaf)}"
        for root, tree in trees.items()
        for path, leaf in jtu.tree_leaves_with_path(tree)
        if is_array(leaf) and leaf.shape[:1] != first
    ]
