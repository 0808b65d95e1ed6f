"""Notes about leaves of single instances: roles, names of axes.

They are configuration of the innermost Module above a leaf: a note beside its fields, which goes
wherever the Module goes, and which other instances do not have. The note is a tuple of pairs: the
keys from the Module to the leaf, and the value for the leaf.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from pytreemod.module.construction import with_notes
from pytreemod.module.flattening import note_of
from pytreemod.tree.nodes import Location, Represents, children_of, record_of
from pytreemod.tree.paths import step_name
from pytreemod.tree.surgery import with_children
from pytreemod.typing import class_of

_T = TypeVar("_T")
_Steps = tuple[str, ...]

# For each Module that changes, by its path: the values for its leaves, by their keys.
_Changes = dict[tuple[Any, ...], dict[_Steps, Any]]


def with_leaf_notes(model: _T, note: str, values: Iterable[tuple[Location, Any]]) -> _T:
    """Set the values of a note for some leaves, beside those of others.

    Args:
        model: any tree of Modules.
        note: the name of the note.
        values: leaves, each with its value; None for none.
    """
    changes: _Changes = {}
    for loc, value in values:
        depth = depth_of_holder(loc)
        steps = tuple(map(step_name, loc.path[depth:]))
        changes.setdefault(loc.path[:depth], {})[steps] = value
    above = {path[:i] for path in changes for i in range(len(path) + 1)}
    return _changed(model, note, (), changes, above)


def depth_of_holder(loc: Location) -> int:
    """Return the number of keys to the innermost Module above a leaf; -1 if there is none."""
    nodes = [node for node in loc.nodes if class_of(node) is not Represents]
    return max((i for i, node in enumerate(nodes) if record_of(node) is not None), default=-1)


def _changed(
    node: Any, note: str, path: tuple[Any, ...], changes: _Changes, above: set[tuple[Any, ...]]
) -> Any:
    if path not in above:
        return node
    children = children_of(node) or []
    below = [_changed(child, note, (*path, key), changes, above) for key, child in children]
    node = with_children(node, children, below)
    return _holding(node, note, changes[path]) if path in changes else node


def _holding(node: Any, note: str, changes: dict[_Steps, Any]) -> Any:
    """Return a Module with other values for its leaves; itself if nothing changes."""
    old = note_of(node, note)
    now: dict[_Steps, Any] = {**dict(old), **changes}
    # Sorted, so that the order in which values were set does not matter.
    new = tuple(sorted(((s, value) for s, value in now.items() if value is not None), key=_steps))
    return node if new == old else with_notes(node, {note: new})


def _steps(pair: tuple[_Steps, Any]) -> _Steps:
    return pair[0]
