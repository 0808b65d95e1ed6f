"""Adding updates to a model."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, ShapeError, StructureError, describe
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array_like, is_inexact_array
from pytreemod.tree.renewing import with_new_containers
from pytreemod.typing import PyTree, jtu

_T = TypeVar("_T")


def apply_updates(model: _T, updates: PyTree) -> _T:
    """Add updates to a model, leaf by leaf; `None` leaves a leaf, or a subtree, unchanged.

    So does a zero of dtype `float0`, JAX's derivative by an integer. Nothing is broadcast.

    **Law.** Every array of the result has the shape of the model's array, and its dtype if that is
    floating or complex: whatever the dtype of the updates, a step changes only the values of a
    model.

    Args:
        model: the tree to update.
        updates: a prefix of it, such as an optax optimizer returns.

    Returns:
        `model + updates`.

    Raises:
        ShapeError: if an update has another shape than its leaf.
        ArgumentError: if an update is complex, and its leaf is real.
        StructureError: if there is an update for what is no number.
        ValueError: if `updates` is no prefix of the model (from JAX).

    Examples:
        >>> apply_updates({"a": 1.0, "b": "text"}, {"a": 0.5, "b": None})
        {'a': 1.5, 'b': 'text'}
    """
    model = with_new_containers(model)
    return jtu.tree_map_with_path(_add, updates, model, is_leaf=_is_none)


def _is_none(node: object) -> bool:
    return node is None


def _add(path: Any, update: Any, leaf: Any) -> Any:
    if update is None or getattr(update, "dtype", None) == jax.dtypes.float0:
        return leaf
    where = f"apply_updates at {path_text(path, 'model')}"
    if not is_array_like(leaf) or not is_array_like(update):
        raise StructureError(f"{where}: {describe(update)} cannot be added to {describe(leaf)}")
    if jnp.shape(update) != jnp.shape(leaf):
        raise ShapeError(where, describe(leaf), describe(update))
    if jnp.iscomplexobj(update) and not jnp.iscomplexobj(leaf):
        fact = f"{where}: {describe(update)} would lose its imaginary part"
        raise ArgumentError(fact, hint="jax.tree.map(jnp.real, updates)")
    # As optax: 32 bits may be added to 16, and the model still has 16.
    return (leaf + update).astype(leaf.dtype) if is_inexact_array(leaf) else leaf + update
