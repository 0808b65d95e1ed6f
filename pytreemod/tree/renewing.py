"""New lists and dicts for a new tree.

A function that returns a changed model shares everything unchanged with the old one: arrays, and
nodes, which are immutable. Lists and dicts are not, and editing one in the new model must not edit
the old model. So such a function begins with `with_new_containers`, which makes new lists and
dicts, as every transform does. (`copy.copy` shares them, as in Python.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

from pytreemod.tree.instances import schema_of
from pytreemod.tree.nodes import DICTS, children_of, is_node, node_like
from pytreemod.typing import class_of, jtu

_T = TypeVar("_T")

EDITABLE: dict[type, bool] = dict.fromkeys((list, *DICTS), True)
"""Classes of objects that can be edited; False for a State, whose values cannot be edited."""


def with_new_containers(tree: _T) -> _T:
    """Return a tree with new lists and dicts; nodes that contain none are shared.

    Args:
        tree: any tree.

    Returns:
        An equal tree; the same object if nothing in it can be edited.
    """
    # JAX searches in C (0.15 us per node), because most nodes contain none.
    if not is_node(tree) or not _holds_any(tree):
        return tree
    children = children_of(tree) or []
    parts: list[Any] = []
    # No comprehension: it would add a frame per level of the tree, and Python allows a thousand.
    for _, child in children:
        parts.append(with_new_containers(child))
    if class_of(tree) in EDITABLE:
        return cast("_T", node_like(tree, children, parts))
    return with_children(tree, children, parts)


def with_children(node: Any, children: Sequence[tuple[Any, Any]], parts: Sequence[Any]) -> Any:
    """Copy a node with other children.

    Args:
        node: the node. It is returned itself if no child changes: its snapshot stays valid.
        children: its present children, with their keys.
        parts: the new ones, in that order.
    """
    pairs = zip(children, parts, strict=True)
    changes = {key: part for (key, old), part in pairs if part is not old}
    if not changes:
        return node
    schema = schema_of(node)
    if schema is None:
        return node_like(node, children, parts)
    return schema.rebuild(node, {key.name: part for key, part in changes.items()})


def _holds_any(node: Any) -> bool:
    found: list[bool] = []

    def stops(within: Any) -> bool:
        is_editable = EDITABLE.get(class_of(within))
        if is_editable is None:
            return False
        if is_editable:
            found.append(True)
        return True

    jtu.tree_leaves(node, is_leaf=stops)
    return bool(found)
