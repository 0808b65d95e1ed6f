"""New lists and dicts for a new tree.

A function that returns a changed model shares everything unchanged with the old one: arrays, and
nodes, which are immutable. Lists and dicts are not, and editing one in the new model must not edit
the old model. So such a function begins with `with_new_containers`, which makes new lists and
dicts, as every transform does. (`copy.copy` shares them, as in Python.)
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any, TypeVar

from pytreemod.tree.nodes import children_of, is_node, record_of, stop_below
from pytreemod.typing import class_of, jtu

_T = TypeVar("_T")

_DICTS = (dict, OrderedDict, defaultdict)

EDITABLE: dict[type, bool] = dict.fromkeys((list, *_DICTS), True)
"""Classes of objects that can be edited, or that contain configuration that can be; False for a
State, whose values cannot be edited."""


def with_new_containers(tree: _T) -> _T:
    """Return a tree with new lists and dicts; nodes that contain none are shared.

    Args:
        tree: any tree.

    Returns:
        An equal tree; the same object if nothing in it can be edited.
    """
    within: Any = tree
    kind = class_of(within)
    if kind is list:
        items: Any = []
        # No comprehension: it would add a frame per level of the tree, and Python allows a
        # thousand.
        for item in within:
            items.append(with_new_containers(item))
        return items
    if kind in _DICTS:
        made = copy.copy(within)
        for name, item in within.items():
            made[name] = with_new_containers(item)
        return made
    # JAX searches in C (0.15 us per node), because most nodes contain none.
    if not is_node(within) or not _holds_any(within):
        return tree
    children = children_of(within) or []
    changes: dict[Any, Any] = {}
    for key, old in children:
        new = with_new_containers(old)
        if new is not old:
            changes[key] = new
    record = record_of(within)
    if record is not None:
        return record.renewed(within, {key.name: new for key, new in changes.items()})
    if not changes:
        return tree
    parts = [changes.get(key, old) for key, old in children]
    return jtu.tree_structure(within, is_leaf=stop_below(within)).unflatten(parts)


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
