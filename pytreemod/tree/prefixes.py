"""Prefix trees: a value, or a rule, for every leaf of a tree; and splitting a tree by one of bools.

Wherever a transform takes one value for each leaf (an axis, a spec, a bool), it takes a *prefix*.
That is one value for all leaves, or a tree of values that each apply to a subtree. A rule
[`by`][pytreemod.by] may be anywhere inside it, and so may a Module that has values instead of data.

**Law.** `combine(*partition(t, s))` equals `t`, for every tree `t` and every spec `s`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pytreemod.errors import SpecError
from pytreemod.tree.comparison import side_text
from pytreemod.tree.instances import reading_stored
from pytreemod.tree.nodes import children_of, is_module, locations, own_class
from pytreemod.tree.paths import path_text
from pytreemod.tree.printing import tree_pformat
from pytreemod.tree.selecting import (
    Locations,
    Rule,
    Selector,
    as_bool,
    as_selector,
    refuse_unmatched,
)
from pytreemod.typing import FilterSpec, IsLeaf, KeyPath, PyTree, jtu

Resolve = Callable[[Any, PyTree, KeyPath], list[Any]]


class By(Rule):
    """A rule that gives each leaf the value of the first selector that picks it.

    Made by [`by`][pytreemod.by]; accepted wherever a prefix tree is. Called on a tree, it returns a
    tree of values, as optax's labels and masks are.
    """

    def __init__(self, items: Sequence[tuple[Selector, Any]]):
        self.items = tuple(items)

    def __call__(self, tree: PyTree) -> PyTree:
        """Return the tree with each leaf replaced by its value.

        Args:
            tree: any tree.

        Returns:
            A tree of the structure of `tree`, if no value is a container.

        Raises:
            SpecError: if no selector picks some leaf, or a path in the rule matches nothing.

        Examples:
            >>> import pytreemod as pm
            >>> pm.by({"a": "slow", ...: "fast"})({"a": [1, None], "b": 2.0})
            {'a': ['slow', None], 'b': 'fast'}
        """
        return jtu.tree_structure(tree).unflatten(self.values(tree))

    def values(
        self, tree: PyTree, is_leaf: IsLeaf = None, root: str = "", strict: bool = True
    ) -> list[Any]:
        """Return the value for each leaf of `tree`, in JAX's order.

        With `strict=False`, a path may match nothing: it may be meant for another tree that the
        rule applies to. The caller has asked `refuse_unmatched` about all of them.

        Raises:
            SpecError: if no selector picks some leaf, or a path in the rule matches nothing.
        """
        if strict:
            refuse_unmatched(self.selectors, [tree], is_leaf)
        locs = Locations(locations(tree, is_leaf))
        picks = [selector.pick(locs, tree, is_leaf) for selector in self.selectors]
        entries = first_of(picks, len(locs))
        lost = [loc for loc, entry in zip(locs, entries, strict=True) if entry is None]
        if lost:
            raise SpecError(
                f"by: {len(lost)} of {len(locs)} leaves have no value",
                at=[path_text(x.path, root) for x in lost],
                hint="pm.by({..., ...: default})",
            )
        return [None if entry is None else self.items[entry][1] for entry in entries]

    @property
    def selectors(self) -> list[Selector]:
        """The selectors, in order."""
        return [selector for selector, _ in self.items]

    def __repr__(self) -> str:
        keys = ["..." if s == _DEFAULT else repr(s) for s in self.selectors]
        values = [tree_pformat(value, width=10**6) for _, value in self.items]
        return f"by({{{', '.join(map('{}: {}'.format, keys, values))}}})"


_DEFAULT = as_selector(...)


def first_of(picks: Sequence[Sequence[bool]], count: int) -> list[int | None]:
    """Return for each of `count` leaves the index of the first selector that picks it, or None."""
    found: list[int | None] = [None] * count
    for index, picked in reversed([*enumerate(picks)]):
        found = [index if hit else old for hit, old in zip(picked, found, strict=True)]
    return found


def by(rules: dict[Any, Any]) -> By:
    """Return a prefix tree as a rule: `pm.by({selector: value, ..., ...: default})`.

    The rule is resolved against the tree that it is given for: the first selector that picks a leaf
    gives its value, and a leaf that nothing picks raises an error that names it. Selectors are
    written as everywhere: `select.path(...)` or a string, a class for `select.type`, a predicate.
    The key `...` is the default, wherever it is written. Called on a tree, the rule returns the
    tree of values, so that it can be passed to optax as labels or masks.

    Write special entries before general ones, because the first match wins.

    Args:
        rules: a dict from selectors to values.

    Returns:
        A value to pass as `in_axes`, `out_axes`, or any other prefix; it may be anywhere
        inside a prefix tree.

    Raises:
        SpecError: if a key is no selector.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> axes = pm.by({"x": 0, ...: None})
        >>> f = pm.filter_vmap(lambda d: d["x"] * d["y"], in_axes=(axes,))
        >>> f({"x": jnp.arange(3.0), "y": jnp.asarray(2.0)})
        Array([0., 2., 4.], dtype=float32)
    """
    # The default goes last, wherever it is written.
    ordered = sorted(rules.items(), key=lambda item: item[0] is ...)
    return By([(as_selector(key), value) for key, value in ordered])


def spread(
    spec: Any,
    tree: PyTree,
    resolve: Resolve,
    stops: Callable[[Any], bool],
    where: str,
    path: KeyPath = (),
    root: str = "",
) -> list[Any]:
    """Return the value that `spec`, a prefix of `tree`, has for each leaf.

    Args:
        spec: the prefix.
        tree: the tree.
        resolve: maps a leaf of the prefix, the subtree that it applies to and that subtree's
            path to a list with one value for each leaf of the subtree.
        stops: which nodes of `spec` are its leaves.
        where: the name of the prefix in errors.
        path: the location of `tree` in the root.
        root: the name of the root in errors.

    Returns:
        One value for each leaf.

    Raises:
        SpecError: if `spec` is not a prefix of `tree`; the error names the path.
    """
    inner = None if stops(spec) else children_of(spec)
    if inner is None:
        return resolve(spec, tree, path)
    children = children_of(tree)
    if children is None or own_class(spec) is not own_class(tree):
        odd = [path]
    elif not is_module(tree):
        # The same keys: a part must not apply to another's child.
        odd = [(*path, key) for key in dict(inner).keys() ^ dict(children).keys()]
    else:
        # By name: the fields of a spec, with other values, may divide differently. The spec may be
        # of the model without its rules around calls, which mostly hold no leaves.
        odd = []
        with reading_stored():
            children = [x for x in children if hasattr(spec, x[0].name) or jtu.tree_leaves(x[1])]
            inner = [(key.name, getattr(spec, key.name, None)) for key, _ in children]
    if odd:
        fact = f"{where}: {side_text(spec)} is no prefix of {side_text(tree)}"
        raise SpecError(fact, at=sorted(path_text(each, root) for each in odd))
    values: list[Any] = []
    for (_, part), (key, child) in zip(inner, children or (), strict=True):
        values += spread(part, child, resolve, stops, where, (*path, key), root)
    return values


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
        return as_selector(value).mask(subtree, is_leaf)

    return spread(spec, tree, resolve, _is_filter_leaf, where, root=root)
