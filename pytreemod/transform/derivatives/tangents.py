"""Tangents, cotangents and gradients: trees with the structure of other trees.

In each of them None means zero, for one leaf or for everything below a node. A leaf that cannot be
differentiated has only None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pytreemod.errors import DerivativeError, describe
from pytreemod.tree.differences import walk
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import NUMBERS, is_array, is_array_like
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


def beside(
    tree: PyTree,
    derivative: PyTree,
    *,
    where: str,
    expected: str,
    root: str | Callable[[], Sequence[str]] = "",
    strict: bool = True,
) -> list[Any]:
    """Return the derivative of each leaf of `tree`, None where it is zero.

    Args:
        tree: the tree that the derivative belongs to; shapes may replace arrays.
        derivative: a tree of the same structure, or with None at any of its nodes.
        where: the name of the transform in errors.
        expected: the name of the derivative in errors.
        root: the name of `tree` in errors; for a tuple, a function that names each of its items.
        strict: whether a value for a leaf that cannot be differentiated is an error; otherwise it
            is ignored.

    Returns:
        A list as long as that of the leaves.

    Raises:
        DerivativeError: if a structure, shape or dtype differs; the error names all paths.
    """
    # Most derivatives fit. Then no paths are needed, which take a walk through both trees.
    checked = [_checked(leaf, value, strict) for leaf, value in _pairs(tree, derivative) or ()]
    if checked and not any(complaint for _, complaint in checked):
        return [fitted for fitted, _ in checked]
    found: list[Any] = []
    wrong: list[str] = []
    for each in walk(tree, derivative, stops=_is_none):
        complaint = None
        if each.kind == "same" and each.new is None:
            found += [None] * len(jtu.tree_leaves(each.old))
        elif each.kind in ("same", "value"):
            fitted, complaint = _checked(each.old, each.new, strict)
            found.append(fitted)
        # Configuration does not matter.
        elif each.of_structure:
            complaint = "{1}, for {0}".format(*each.texts)
        if complaint:
            wrong.append(f"{_place(each.path, root)}: {complaint}")
    if wrong:
        raise DerivativeError(
            where,
            expected,
            "1 that does not fit" if len(wrong) == 1 else f"{len(wrong)} that do not fit",
            at=wrong,
            hint="use None for zero, and for leaves that are not differentiated",
        )
    return found


def _pairs(tree: PyTree, derivative: PyTree) -> list[tuple[Any, Any]] | None:
    """Return each leaf with its derivative; None if the two structures do not simply match."""
    try:
        leaves, treedef = jtu.tree_flatten(tree)
        values, other = jtu.tree_flatten(derivative)
        return list(zip(leaves, values, strict=True)) if treedef == other else None
    # The walk explains trees that cannot be flattened. Configuration of a user's class may not
    # be comparable, and does not matter here.
    except Exception:
        return None


def _place(path: tuple[Any, ...], root: str | Callable[[], Sequence[str]]) -> str:
    if isinstance(root, str):
        return path_text(path, root)
    index: int = path[0].idx
    return path_text(path[1:], root()[index])


def _is_none(node: object) -> bool:
    return node is None


def _checked(leaf: Any, value: Any, strict: bool) -> tuple[Any, str | None]:
    """Return the derivative to use, and a description of its mistake."""
    if is_zero(value):
        return None, None
    if not is_differentiable(leaf):
        complaint = f"{describe(value)} instead of None, for {describe(leaf)}"
        return None, complaint if strict else None
    if not is_array_like(value):
        return None, f"{describe(value)}, for {describe(leaf)}"
    if not is_array(value):
        value = _from_number(leaf, value)
    if jnp.shape(value) != jnp.shape(leaf) or _dtype(value) != _dtype(leaf):
        return None, f"{describe(value)}, for {describe(leaf)}"
    return value, None


def _from_number(leaf: Any, value: Any) -> Any:
    """Return a Python number as an array like `leaf`, if it is of the leaf's kind."""
    if not isinstance(value, NUMBERS):
        return jnp.asarray(value)
    # JAX differentiates by a number as by a weak array, so its tangent must be weak, too.
    if isinstance(leaf, NUMBERS):
        return value
    # Unchanged, so that the error shows both types; a cast would drop a half of it.
    if isinstance(value, complex) and not jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return value
    return jnp.asarray(value, leaf.dtype)


def _dtype(value: Any) -> Any:
    if isinstance(value, NUMBERS):
        return jnp.result_type(value)
    # A float64 of NumPy becomes float32 if JAX does not compute in 64 bits.
    return jax.dtypes.canonicalize_dtype(value.dtype)
