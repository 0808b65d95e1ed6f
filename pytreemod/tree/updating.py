"""Adding updates to a model."""

from __future__ import annotations

from typing import Any, TypeVar

from pytreemod.typing import PyTree, jtu

_T = TypeVar("_T")


def apply_updates(model: _T, updates: PyTree) -> _T:
    """Add updates to a model, leaf by leaf; `None` leaves a leaf, or a whole subtree, as it is.

    Args:
        model: the tree to update.
        updates: a prefix of it, such as an optax optimizer returns.

    Returns:
        `model + updates`.

    Examples:
        >>> apply_updates({"a": 1.0, "b": "text"}, {"a": 0.5, "b": None})
        {'a': 1.5, 'b': 'text'}
    """
    return jtu.tree_map(_add, updates, model, is_leaf=_is_none)


def _is_none(node: object) -> bool:
    return node is None


def _add(update: Any, leaf: Any) -> Any:
    return leaf if update is None else leaf + update
