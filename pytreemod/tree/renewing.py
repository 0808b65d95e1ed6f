"""New lists and dicts for a new tree.

A function that returns a changed model shares everything unchanged with the old one: arrays, and
nodes, which are immutable. Lists and dicts are not, and editing one in the new model must not edit
the old model. So such a function begins with `with_new_containers`, which makes new lists and
dicts, as every transform does. (`copy.copy` shares them, as in Python.)
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from pytreemod.tree.instances import record_of
from pytreemod.tree.nodes import children_of, is_node, stop_below
from pytreemod.typing import class_of, jtu

_T = TypeVar("_T")

_DICTS = (dict, OrderedDict, defaultdict)
EDITABLE: dict[type, bool] = dict.fromkeys((list, *_DICTS), True)
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
    if class_of(tree) in _DICTS:
        made: Any = copy.copy(tree)  # In the same order.
        made.update({key.key: part for (key, _), part in zip(children, parts, strict=True)})
        return made
    return cast("_T", parts) if class_of(tree) is list else with_children(tree, children, parts)


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
    record = record_of(node)
    if record is not None:
        return record.rebuild(node, {key.name: part for key, part in changes.items()})
    if class_of(node) is list:
        return [*parts]
    return jtu.tree_structure(node, is_leaf=stop_below(node)).unflatten(parts)


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
