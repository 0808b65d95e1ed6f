"""Splitting a tree in two by a filter spec, and putting the parts together again.

**Law.** `combine(*partition(t, s))` equals `t`, for every tree `t` and every spec `s`.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pytreemod.tree.nodes import children_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.prefixes import By, spread
from pytreemod.tree.selecting import Rule, as_bool, as_selector
from pytreemod.typing import FilterSpec, IsLeaf, KeyPath, PyTree, jtu

# A tree of the same structure has the same type, whatever its leaves are.
_T = TypeVar("_T")


def filter(
    pytree: _T,
    filter_spec: FilterSpec,
    inverse: bool = False,
    replace: Any = None,
    is_leaf: IsLeaf = None,
) -> _T:
    """Keep the leaves that `filter_spec` picks; put `replace` instead of the others.

    Args:
        pytree: any tree.
        filter_spec: a selector, a predicate, a bool, or a prefix tree of these.
        inverse: keep the other leaves instead.
        replace: the value that replaces the other leaves.
        is_leaf: where to stop descending.

    Returns:
        A tree of the same structure.

    Raises:
        SpecError: if the spec does not fit the tree.

    Examples:
        >>> filter([1, "a", 2.0], lambda x: isinstance(x, str))
        [None, 'a', None]
    """
    return partition(pytree, filter_spec, replace, is_leaf)[1 if inverse else 0]


def partition(
    pytree: _T, filter_spec: FilterSpec, replace: Any = None, is_leaf: IsLeaf = None
) -> tuple[_T, _T]:
    """Split a tree in two: the leaves that `filter_spec` picks, and all others.

    Args:
        pytree: any tree.
        filter_spec: a selector, a predicate, a bool, or a prefix tree of these.
        replace: the value that replaces a leaf in the tree that it is not in.
        is_leaf: where to stop descending.

    Returns:
        Two trees of the same structure.

    Raises:
        SpecError: if the spec does not fit the tree.

    Examples:
        >>> partition([1, "a"], lambda x: isinstance(x, str))
        ([None, 'a'], [1, None])
    """
    leaves, treedef = jtu.tree_flatten(pytree, is_leaf=is_leaf)
    mask = mask_of(filter_spec, pytree, is_leaf, where="partition(filter_spec)")
    pairs = list(zip(leaves, mask, strict=True))
    return (
        treedef.unflatten([x if m else replace for x, m in pairs]),
        treedef.unflatten([replace if m else x for x, m in pairs]),
    )


def combine(*pytrees: _T, is_leaf: IsLeaf = None) -> _T:
    """Put trees of one structure together: at each path, the first leaf that is not None.

    Args:
        *pytrees: trees that are equal apart from their Nones.
        is_leaf: where to stop descending.

    Returns:
        One tree.

    Raises:
        ValueError: if the structures differ.

    Examples:
        >>> combine([None, "a"], [1, None])
        [1, 'a']
    """

    def stop(node: Any) -> bool:
        return node is None or (is_leaf is not None and is_leaf(node))

    def first(*leaves: Any) -> Any:
        return next((leaf for leaf in leaves if leaf is not None), None)

    return jtu.tree_map(first, *pytrees, is_leaf=stop)


def _is_filter_leaf(spec: Any) -> bool:
    return isinstance(spec, (Rule, str, type, bool)) or spec is ...


def mask_of(
    spec: FilterSpec, tree: PyTree, is_leaf: IsLeaf = None, *, where: str, root: str = ""
) -> list[bool]:
    """Return one bool for each leaf of `tree`, from any filter spec.

    Args:
        spec: a selector or a value that converts to one, `by` with bools, or a prefix tree.
        tree: the tree.
        is_leaf: where to stop descending.
        where: the name of `spec` in errors.
        root: the name of `tree` in errors.

    Returns:
        A list as long as `jax.tree.leaves(tree, is_leaf)`.

    Raises:
        SpecError: if the spec is not a prefix, or returns something other than bools.
    """
    if callable(spec) and not isinstance(spec, (Rule, type)) and children_of(spec) is None:
        # The most common spec needs no paths.
        return [as_bool(spec(leaf), where) for leaf in jtu.tree_leaves(tree, is_leaf=is_leaf)]

    def resolve(value: Any, subtree: PyTree, path: KeyPath) -> list[bool]:
        if isinstance(value, By):
            picked = value.values(subtree, is_leaf, path_text(path, root) if path else root)
            return [as_bool(v, where) for v in picked]
        if isinstance(value, bool):
            return [value] * len(jtu.tree_leaves(subtree, is_leaf=is_leaf))
        return as_selector(value).mask(subtree, is_leaf)

    return spread(spec, tree, resolve, _is_filter_leaf, where, root=root)
