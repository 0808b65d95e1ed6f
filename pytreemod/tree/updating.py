"""Adding updates to a model."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, PytreemodError, ShapeError, StructureError, describe
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array, is_array_like, is_inexact_array
from pytreemod.tree.renewing import with_new_containers
from pytreemod.typing import PyTree, class_of, jtu

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
        StructureError: if `updates` is not a prefix of the model, or cannot be added to it.

    Examples:
        >>> apply_updates({"a": 1.0, "b": "text"}, {"a": 0.5, "b": None})
        {'a': 1.5, 'b': 'text'}
    """
    try:
        return jtu.tree_map_with_path(_add, updates, with_new_containers(model), is_leaf=_is_none)
    except PytreemodError:
        raise
    # The addition may raise any error of its own.
    except (ValueError, TypeError) as error:
        raise StructureError(
            "apply_updates",
            "updates that are a prefix of the model",
            "another structure",
            hint=["pass the model first:", "pm.apply_updates(model, updates)"],
        ) from error


def _is_none(node: object) -> bool:
    return node is None


def _add(path: Any, update: Any, leaf: Any) -> Any:
    if update is None or getattr(update, "dtype", None) == jax.dtypes.float0:
        return leaf
    if leaf is None:
        raise StructureError(
            f"apply_updates at {path_text(path, 'model')}",
            "updates for leaves of the model",
            "an update where the model has None",
            hint=["pass the model first:", "pm.apply_updates(model, updates)"],
        )
    # Updates may be any objects that can be added.
    is_number = is_array_like(leaf) and is_array_like(update)
    if is_number and jnp.shape(update) != jnp.shape(leaf):
        raise ShapeError(
            f"apply_updates at {path_text(path, 'model')}",
            f"an update of shape {jnp.shape(leaf)}",
            describe(update),
        )
    if is_number and jnp.iscomplexobj(update) and not jnp.iscomplexobj(leaf):
        refuse_complex("apply_updates", path_text(path, "model"), "an update", update)
    try:
        new = leaf + update
    except (ValueError, TypeError) as error:
        raise _misfit(path, update, leaf) from error
    # NumPy adds an array even to a list, and the result is an array.
    if not is_number and jtu.tree_structure(new) != jtu.tree_structure(leaf):
        raise _misfit(path, update, leaf)
    if not is_array(leaf):
        return new
    # As optax: 32 bits may be added to 16, and the model still has 16.
    return new.astype(leaf.dtype) if is_inexact_array(leaf) and new.dtype != leaf.dtype else new


def refuse_complex(where: str, path: str, what: str, given: Any) -> NoReturn:
    """Refuse a complex update of a real leaf, which would lose its imaginary part.

    Raises:
        ArgumentError: always.
    """
    hint = ["to discard the imaginary part:", "jax.tree.map(jnp.real, grads)"]
    expected = f"{what} without an imaginary part, for a real leaf"
    raise ArgumentError(f"{where} at {path}", expected, describe(given), hint=hint)


def _misfit(path: Any, update: Any, leaf: Any) -> StructureError:
    kind = describe(leaf) if jtu.all_leaves([leaf]) else f"a {class_of(leaf).__qualname__}"
    return StructureError(
        f"apply_updates at {path_text(path, 'model')}",
        "an update for each leaf, or None",
        f"{describe(update)} for {kind}",
        hint=[
            "pass a tree like the model, such as scaled gradients:",
            "updates = jax.tree.map(lambda grad: -0.1 * grad, grads)",
        ],
    )
