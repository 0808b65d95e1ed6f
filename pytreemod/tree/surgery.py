"""Out-of-place surgery: new trees that differ from an old one in the nodes that were named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from pytreemod.errors import ArgumentError, SpecError, describe, explain
from pytreemod.tree.locating import locate
from pytreemod.tree.nodes import children_of, record_of, stop_below
from pytreemod.tree.paths import path_text, step_name
from pytreemod.typing import IsLeaf, PyTree, jtu

_T = TypeVar("_T")


class _Missing:
    def __repr__(self) -> str:
        return "<not given>"


MISSING: Any = _Missing()


class _New:
    """Marks, in a trie of paths, the value that takes a node's place."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


def tree_at(
    where: Callable[[_T], Any] | str,
    pytree: _T,
    replace: Any = MISSING,
    replace_fn: Callable[[Any], Any] = MISSING,
    is_leaf: IsLeaf = None,
) -> _T:
    """A copy of `pytree` in which the nodes that `where` names are replaced.

    Only the nodes between the root and the targets are rebuilt; all else is shared. Neither
    `__init__` nor converters nor checks run. Configuration fields can be replaced too.

    **Law.** `tree_at(w, t, replace=x)` differs from `t` in the named nodes and nowhere else, and
    `w(tree_at(w, t, replace=x))` is `x`.

    Args:
        where: a function from the tree to a node of it, or to a sequence of nodes:
            `lambda m: m.layers[0].weight`. Or a path: `"layers.*.weight"`.
        pytree: any tree.
        replace: the new node; for a sequence of nodes, a sequence as long.
        replace_fn: instead of `replace`: called on each old node, gives the new one.
        is_leaf: nodes to treat as leaves.

    Returns:
        A new tree.

    Raises:
        SpecError: `where` computes instead of picking, names something that is not in the tree,
            or names a node twice (or a node and something inside it).
        ArgumentError: not exactly one of `replace` and `replace_fn`, or `replace` has the wrong
            length.

    Examples:
        >>> tree_at(lambda t: t["a"][1], {"a": [1, 2], "b": 3}, 20)
        {'a': [1, 20], 'b': 3}
        >>> tree_at("a.*", {"a": [1, 2], "b": 3}, replace_fn=lambda x: x + 1)
        {'a': [2, 3], 'b': 3}
    """
    if (replace is MISSING) == (replace_fn is MISSING):
        got = "neither" if replace is MISSING else "both"
        raise ArgumentError(
            explain(
                "tree_at",
                "exactly one of replace and replace_fn",
                got,
                cure=[
                    "write one of",
                    "tree_at(where, tree, new)",
                    "tree_at(where, tree, replace_fn=f)",
                ],
            )
        )
    found = locate(where, pytree, is_leaf, "tree_at(where)")
    paths = [target.path for target in found.targets]
    _check_disjoint(paths)
    if replace is MISSING:
        news = [replace_fn(node_at(pytree, path)) for path in paths]
    elif isinstance(where, str) and not found.single:
        raise ArgumentError(
            explain(
                "tree_at",
                "replace_fn for a path that matches several nodes",
                f"replace, for {len(paths)} nodes",
                cure=["write", f"tree_at({where!r}, tree, replace_fn=lambda old: new)"],
            )
        )
    else:
        news = [replace] if found.single else _as_many(replace, len(paths))
    return replace_at(pytree, list(zip(paths, news, strict=True)))


def _as_many(replace: Any, count: int) -> list[Any]:
    news: Sequence[Any] = replace
    if not isinstance(replace, (list, tuple)):
        raise ArgumentError(
            explain("tree_at(replace)", f"a sequence of {count} nodes", describe(replace))
        )
    if len(news) != count:
        raise ArgumentError(
            explain("tree_at(replace)", f"{count} nodes, as where names", f"{len(news)}")
        )
    return list(news)


def _check_disjoint(paths: list[tuple[Any, ...]]) -> None:
    ordered = sorted(paths, key=lambda path: tuple(map(step_name, path)))
    for first, second in pairwise(ordered):
        if second[: len(first)] == first:
            got = "the same node twice" if first == second else "a node and something inside it"
            raise SpecError(
                explain(
                    "tree_at(where)",
                    "each node once",
                    got,
                    places=dict.fromkeys([path_text(first), path_text(second)]),
                )
            )


def node_at(tree: PyTree, path: tuple[Any, ...]) -> Any:
    """The node of `tree` at a key path, configuration included."""
    for key in path:
        if record_of(tree) is not None:
            tree = getattr(tree, key.name)
        else:
            tree = dict(_keyed(tree))[key]
    return tree


def _keyed(node: Any) -> list[tuple[Any, Any]]:
    return children_of(node) or []


def replace_at(tree: PyTree, changes: Sequence[tuple[tuple[Any, ...], Any]]) -> PyTree:
    """A copy of `tree` with new nodes at the given key paths, which must not overlap."""
    trie: dict[Any, Any] = {}
    for path, value in changes:
        if not path:
            return value
        level = trie
        for key in path[:-1]:
            level = level.setdefault(key, {})
        level[path[-1]] = _New(value)
    return _rebuild(tree, trie)


def _rebuild(node: Any, trie: dict[Any, Any]) -> Any:
    record = record_of(node)
    if record is not None:
        changes = {key.name: _renew(getattr(node, key.name), below) for key, below in trie.items()}
        return record.rebuild(node, changes)
    parts = [_renew(child, trie[key]) if key in trie else child for key, child in _keyed(node)]
    if type(node) is list:
        return parts
    return jtu.tree_structure(node, is_leaf=stop_below(node)).unflatten(parts)


def _renew(old: Any, below: Any) -> Any:
    return below.value if isinstance(below, _New) else _rebuild(old, below)


def replace_fields(tree: PyTree, changes: dict[str, Any]) -> tuple[PyTree, dict[str, int]]:
    """A copy in which every record's *configuration* fields with the given names are changed.

    Args:
        tree: any tree.
        changes: from field names to new values.

    Returns:
        The new tree, and how many fields of each name were found.
    """
    counts = dict.fromkeys(changes, 0)

    def visit(node: Any) -> Any:
        children = children_of(node)
        if children is None:
            return node
        parts = [visit(child) for _, child in children]
        same = all(new is old for new, (_, old) in zip(parts, children, strict=True))
        record = record_of(node)
        if record is None:
            if same:
                return node
            if type(node) is list:
                return parts
            return jtu.tree_structure(node, is_leaf=stop_below(node)).unflatten(parts)
        new = {} if same else {k.name: p for (k, _), p in zip(children, parts, strict=True)}
        data = record.data_names(node)
        for name in record.names(node):
            if name in changes and name not in data:
                counts[name] += 1
                new[name] = changes[name]
        return record.rebuild(node, new) if new else node

    return visit(tree), counts
