"""Record the loops and maps along which a value was stacked.

A loop returns a recorded value with an axis for the steps, and a map with one for the members. The
axes look alike. A `StackedNote` records the kind of each. In a plan (see `supplying`) it also
records the transform in the label's route.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

from pytreemod.transform.boundary.sowing import Collected, WithCollected
from pytreemod.typing import PyTree, jtu

AxisKind: TypeAlias = Literal["loop", "reversed loop", "map"]


class NoteAxis(NamedTuple):
    """One leading axis.

    Attributes:
        kind: the kind of its entries: steps or members.
        depth: the number of transforms called inside that one, on the way to the value; known only
            in a plan.
    """

    kind: AxisKind
    depth: int

    def prefix(self, route: tuple[int, ...]) -> tuple[int, ...]:
        """Return the part of a label's route that ends with the transform of this axis."""
        return route[: len(route) - self.depth]


class StackedNote:
    """A value to be recorded; a pytree of it.

    Attributes:
        value: any tree of arrays.
        axes: the leading axes of all of them, outermost first.
    """

    __slots__ = ("axes", "value")

    def __init__(self, value: PyTree, axes: tuple[NoteAxis, ...] = ()):
        self.value = value
        self.axes = axes


def _flatten(node: StackedNote) -> tuple[tuple[Any, ...], Any]:
    return ((jtu.GetAttrKey("value"), node.value),), node.axes


def _unflatten(axes: tuple[NoteAxis, ...], children: Any) -> StackedNote:
    return StackedNote(children[0], axes)


jtu.register_pytree_with_keys(StackedNote, _flatten, _unflatten)


def stacked_along(kind: AxisKind, collected: Collected | None) -> Collected | None:
    """Return the values recorded in a step or member, before all of them are stacked."""
    if collected is None:
        return None
    values = [
        _marked(value, NoteAxis(kind, len(label.route)))
        for label, value in zip(collected.labels, collected.values, strict=True)
    ]
    return Collected(collected.labels, values)


def result_along(kind: AxisKind, result: Any) -> Any:
    """Return the result of a function under `collecting`, which runs for one member."""
    if type(result) is not WithCollected:
        return result
    return WithCollected(result.result, stacked_along(kind, result.collected) or result.collected)


def _marked(value: PyTree, axis: NoteAxis) -> PyTree:
    def mark(node: Any) -> Any:
        return StackedNote(node.value, (axis, *node.axes)) if _is_stacked(node) else node

    return jtu.tree_map(mark, value, is_leaf=_is_stacked)


def _is_stacked(node: Any) -> bool:
    return isinstance(node, StackedNote)
