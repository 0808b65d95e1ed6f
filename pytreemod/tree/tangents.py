"""Tangents, cotangents and gradients: trees like other trees, where None means zero."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pytreemod.errors import StructureError, describe
from pytreemod.tree.differences import walk
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import NUMBERS, is_array_like
from pytreemod.typing import PyTree, jtu


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
    (leaves, treedef), (values, other) = map(jtu.tree_flatten, (tree, derivative))
    wrong: list[str] = []
    if treedef == other:
        # Most derivatives fit: then no paths are needed, which take a walk through both trees.
        found = [_fitted(*pair, strict) for pair in zip(leaves, values, strict=True)]
        if not any(fact for _, fact in found):
            return [value for value, _ in found]
    found: list[Any] = []
    for each in walk(tree, derivative, stops=lambda node: node is None):
        fact = None
        if each.kind == "same" and each.new is None:
            found += [None] * len(jtu.tree_leaves(each.old))
        elif each.kind in ("same", "value"):
            value, fact = _fitted(each.old, each.new, strict)
            found.append(value)
        elif each.of_structure:
            fact = "{1}, for {0}".format(*each.texts)
        wrong += [f"{path_text(each.path, root)}: {fact}"] if fact else []
    if wrong:
        hint = "None is zero, and stands for leaves that have no derivative"
        raise StructureError(f"{where}: a derivative does not fit", at=wrong, hint=hint)
    return found


def _fitted(leaf: Any, value: Any, strict: bool) -> tuple[Any, str | None]:
    """Return the derivative of a leaf, and what is wrong with it."""
    wrong = f"{describe(value)}, for {describe(leaf)}"
    if is_zero(value):
        return None, None
    if not is_differentiable(leaf):
        return None, wrong if strict else None
    if not is_array_like(value):
        return None, wrong
    dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    if isinstance(value, NUMBERS):
        # By a number JAX differentiates as by a weak array, so its tangent stays a number.
        is_lost = isinstance(value, complex) and not jnp.issubdtype(dtype, jnp.complexfloating)
        fits = jnp.shape(leaf) == () and not is_lost
        if fits and not isinstance(leaf, NUMBERS):
            value = jnp.asarray(value, dtype)
        return value, None if fits else wrong
    fits = value.shape == jnp.shape(leaf) and jax.dtypes.canonicalize_dtype(value.dtype) == dtype
    return value, None if fits else wrong
