"""Results handed out in groups.

JAX's transforms want to know how to treat each output before the function has run: on which axis
to stack it, how to lay it out. But only the run shows what the result of a function of any trees
is made of. So a traced function hands out its arrays in groups, one for each treatment that the
spec can name, which is known beforehand; which array went where is written down in the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pytreemod.transform.boundary.packing import Plan, pack
from pytreemod.tree.prefixes import By
from pytreemod.typing import PyTree, jtu


class Grouped(NamedTuple):
    """A packed result in groups; like the one of `boundary.pack`, to whoever unpacks it.

    With a tree of treatments in the place of `groups` and None in the place of `plan`, it is also
    the prefix that JAX wants.
    """

    plan: dict[Plan, Any] | None
    groups: list[Any]

    def items(self) -> list[tuple[Plan, list[Any]]]:
        """The plan, and what it builds the result from."""
        return [(plan, self.groups) for plan in self.plan or ()]


def group(
    result: PyTree,
    slots: Sequence[int],
    count: int,
    finish: Callable[[list[Any]], list[Any]] | None = None,
) -> Grouped:
    """Pack a traced result in groups.

    Args:
        result: what the traced function returned.
        slots: for each of its arrays, the group that it goes to.
        count: how many groups there are.
        finish: what to do with the arrays, once they are out, before the result is built.
    """
    ((plan, arrays),) = pack(result).items()
    groups: list[list[Any]] = [[] for _ in range(count)]
    targets: list[tuple[int, int]] = []
    for array, slot in zip(arrays, slots, strict=True):
        targets.append((slot, len(groups[slot])))
        groups[slot].append(array)

    def gather(groups: Sequence[Any]) -> list[Any]:
        arrays = [groups[slot][i] for slot, i in targets]
        return arrays if finish is None else finish(arrays)

    plan.gather = gather
    return Grouped({plan: []}, groups)


def values_in(spec: Any, stops: Callable[[Any], bool]) -> list[Any]:
    """The leaves of a spec, what its rules give included; each once."""
    values: list[Any] = []
    for leaf in jtu.tree_leaves(spec, is_leaf=stops):
        for value in [value for _, value in leaf.items] if isinstance(leaf, By) else [leaf]:
            if value not in values:
                values.append(value)
    return values
