"""New lists and dicts for a new tree.

A function that returns a changed model shares everything unchanged with the old one: arrays, and
nodes, which are immutable. Lists and dicts are not, and editing one in the new model must not edit
the old model. So such a function begins with `with_new_containers`, which makes new lists and
dicts, as every transform does. (`copy.copy` shares them, as in Python.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pytreemod.tree.instances import schema_of
from pytreemod.tree.nodes import DICTS, children_of, node_like
from pytreemod.tree.snapshots import is_state
from pytreemod.typing import class_of

_T = TypeVar("_T")


def with_new_containers(tree: _T) -> _T:
    """Return a tree with new lists and dicts; nodes that contain none are shared.

    Args:
        tree: any tree.

    Returns:
        An equal tree; the same object if nothing in it can be edited.
    """
    return _renewed(None, tree)


def _renewed(_: Any, node: Any) -> Any:
    # The values of a State cannot be edited.
    return node if is_state(node) else with_children(node, _renewed, class_of(node) in _EDITABLE)


_EDITABLE = frozenset({list, *DICTS})


def with_children(node: Any, visit: Callable[[Any, Any], Any], is_new: bool = False) -> Any:
    """Copy a node with other children.

    Args:
        node: the node. It is returned itself if no child changes: its snapshot stays valid.
        visit: returns the new child for a key and a child.
        is_new: whether to copy the node anyway.
    """
    children = children_of(node) or []
    changes: dict[Any, Any] = {}
    parts: list[Any] = []
    # No comprehension: it would add a frame per level of the tree, and Python allows a thousand.
    for key, child in children:
        parts.append(visit(key, child))
        if parts[-1] is not child:
            changes[key] = parts[-1]
    if not changes and not is_new:
        return node
    schema = schema_of(node)
    if schema is None:
        return node_like(node, children, parts)
    return schema.rebuild(node, {key.name: part for key, part in changes.items()})
