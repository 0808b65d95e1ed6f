"""Tangents, cotangents, gradients and updates: trees like other trees, where None means zero."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from pytreemod.errors import SpecError, StructureError, describe
from pytreemod.tree.comparison import side_text
from pytreemod.tree.nodes import with_new_containers
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import NUMBERS, is_array_like, is_inexact_array
from pytreemod.tree.prefixes import spread
from pytreemod.typing import KeyPath, PyTree, jtu

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
        StructureError: if an update has another shape than its leaf, is for what is no number, or
            is complex for a real leaf.
        ValueError: if `updates` is no prefix of the model (from JAX).

    Examples:
        >>> apply_updates({"a": 1.0, "b": "text"}, {"a": 0.5, "b": None})
        {'a': 1.5, 'b': 'text'}
    """
    model = with_new_containers(model)
    return jtu.tree_map_with_path(_add, updates, model, is_leaf=is_zero)


def _add(path: Any, update: Any, leaf: Any) -> Any:
    if is_zero(update):
        return leaf
    is_number = is_array_like(leaf) and is_array_like(update)
    # Of a sum with a complex update, a real leaf would keep the real part alone.
    fits = is_number and (jnp.iscomplexobj(leaf) or not jnp.iscomplexobj(update))
    if not fits or jnp.shape(update) != jnp.shape(leaf):
        fact = f"apply_updates: {describe(update)} cannot be added to {describe(leaf)}"
        raise StructureError(fact, at=[path_text(path, "model")])
    # As optax: 32 bits may be added to 16, and the model still has 16.
    return (leaf + update).astype(leaf.dtype) if is_inexact_array(leaf) else leaf + update


def is_differentiable(leaf: Any) -> bool:
    """Whether a tangent can belong to `leaf`: a floating array or number, or the shape of one."""
    if isinstance(leaf, (float, complex)):
        return True
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def is_zero(derivative: Any) -> bool:
    """Whether a derivative is zero by its type: None, JAX's symbolic zero, or one of an integer."""
    return (
        derivative is None
        or isinstance(derivative, jax.custom_derivatives.SymbolicZero)
        or getattr(derivative, "dtype", None) == jax.dtypes.float0
    )


def match_derivative(
    tree: PyTree, derivative: PyTree, where: str, root: str, strict: bool = True
) -> list[Any]:
    """Return the derivative of each leaf of `tree`; None where it is zero.

    Args:
        tree: the tree that the derivative belongs to; shapes may replace arrays.
        derivative: a tree of the same structure, or with None at any of its nodes.
        where: the name of the transform in errors.
        root: the name of `derivative` in errors.
        strict: whether a value for a leaf that has no derivative is an error, or ignored.

    Raises:
        StructureError: if a structure, shape or dtype differs; the error names all paths.
    """
    wrong: list[str] = []

    def resolve(value: Any, subtree: PyTree, path: KeyPath) -> list[Any]:
        if value is None:
            return [None] * len(jtu.tree_leaves(subtree))
        fitting = _fitted(subtree, value, strict) if jtu.all_leaves([subtree]) else _MISFIT
        if fitting is _MISFIT:
            wrong.append(f"{path_text(path, root)}: {describe(value)}, for {side_text(subtree)}")
        return [fitting]

    try:
        found = spread(derivative, tree, resolve, lambda node: node is None, where, root=root)
    except SpecError as error:
        raise StructureError(error) from None
    if wrong:
        hint = "None is zero, and stands for leaves that have no derivative"
        raise StructureError(f"{where}: a derivative does not fit", at=wrong, hint=hint)
    return found


_MISFIT: Any = object()


def _fitted(leaf: Any, value: Any, strict: bool) -> Any:
    """Return the derivative of a leaf, or `_MISFIT`."""
    if is_zero(value) or (not strict and not is_differentiable(leaf)):
        return None
    if not is_differentiable(leaf) or not is_array_like(value):
        return _MISFIT
    dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    if isinstance(value, (bool, int, float)):
        # JAX differentiates by a number as by a weak array.
        value = float(value) if isinstance(leaf, NUMBERS) else jnp.asarray(value, dtype)
    kind = jax.dtypes.canonicalize_dtype(jnp.result_type(value))
    return value if jnp.shape(value) == jnp.shape(leaf) and kind == dtype else _MISFIT
