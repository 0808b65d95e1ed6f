"""Surgery: new trees that differ from an old one in selected nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar, overload

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.tree.instances import record_of, stored
from pytreemod.tree.locating import Found, Target, locate
from pytreemod.tree.nodes import all_ties, children_of, locations, stop_below
from pytreemod.tree.paths import path_text
from pytreemod.tree.renewing import with_new_containers
from pytreemod.tree.selecting import Rule, Selector
from pytreemod.typing import IsLeaf, KeyPath, PyTree, class_of, jtu

_T = TypeVar("_T")


class _NotGiven:
    def __repr__(self) -> str:
        return "<not given>"


_NOT_GIVEN: Any = _NotGiven()


@overload
def tree_at(
    where: Callable[[_T], Any],
    pytree: _T,
    replace: Any = _NOT_GIVEN,
    replace_fn: Callable[[Any], Any] = _NOT_GIVEN,
    is_leaf: IsLeaf = None,
) -> _T: ...


@overload
def tree_at(
    where: str | type[Any] | Selector,
    pytree: _T,
    replace: Any = _NOT_GIVEN,
    replace_fn: Callable[[Any], Any] = _NOT_GIVEN,
    is_leaf: IsLeaf = None,
) -> _T: ...


def tree_at(
    where: Any,
    pytree: _T,
    replace: Any = _NOT_GIVEN,
    replace_fn: Callable[[Any], Any] = _NOT_GIVEN,
    is_leaf: IsLeaf = None,
) -> _T:
    """Copy `pytree` with the nodes that `where` names replaced.

    Only the nodes between the root and the targets are rebuilt; everything else is shared, except
    for lists and dicts, which are new: editing them does not change the old tree. Neither
    `__init__` nor converters nor checks run. Configuration fields can be replaced too.

    **Law.** `tree_at(w, t, replace=x)` differs from `t` in the named nodes and nowhere else, and
    `w(tree_at(w, t, replace=x))` is `x`.

    Args:
        where: a function from the tree to a node of it, or to a sequence of nodes:
            `lambda m: m.layers[0].weight`. Or a value that names any number of nodes: a path
            (`"layers.*.weight"`: the outermost nodes that match, configuration included), a class
            (`nn.Linear`: the outermost nodes of that type), or a selector
            (`pm.select.role("lora")`: every leaf that it picks).
        pytree: any tree.
        replace: the new node; for a sequence of nodes, a sequence of the same length.
        replace_fn: instead of `replace`: a function from each old node to the new one.
        is_leaf: nodes to treat as leaves.

    Returns:
        A new tree.

    Raises:
        SpecError: if `where` computes instead of picking, names something that is not in the tree,
            or names a node twice (or a node and something inside it).
        ArgumentError: if not exactly one of `replace` and `replace_fn` is given, or `replace` has
            the wrong length.

    Examples:
        >>> tree_at(lambda t: t["a"][1], {"a": [1, 2], "b": 3}, 20)
        {'a': [1, 20], 'b': 3}
        >>> tree_at("a.*", {"a": [1, 2], "b": 3}, replace_fn=lambda x: x + 1)
        {'a': [2, 3], 'b': 3}
        >>> tree_at(list, {"a": [1, 2], "b": 3}, replace_fn=sum)
        {'a': 3, 'b': 3}
    """
    if (replace is _NOT_GIVEN) == (replace_fn is _NOT_GIVEN):
        got = "neither" if replace is _NOT_GIVEN else "both"
        raise ArgumentError(
            "tree_at",
            "exactly one of replace and replace_fn",
            got,
            hint=[
                "write one of",
                "tree_at(where, tree, new)",
                "tree_at(where, tree, replace_fn=f)",
            ],
        )
    found = _found(where, pytree, is_leaf)
    # Before `replace_fn` is called: overlapping targets are refused before anything is done.
    trie = _trie_of([target.path for target in found.targets])
    if any(target.node is None for target in found.targets):
        ties = {(*path, *t.place): (*path, *t.source) for path, t in all_ties(pytree)}
        for place in ties.keys() & {target.path for target in found.targets}:
            refuse_tied(place, ties[place])
    if replace is _NOT_GIVEN:
        news = [with_new_containers(replace_fn(target.node)) for target in found.targets]
    elif found.single:
        news = [replace]
    # The tree decides how many nodes such a `where` names: a sequence would fit by chance.
    elif isinstance(where, (str, type, Selector)):
        shown = where.__qualname__ if isinstance(where, type) else repr(where)
        raise ArgumentError(
            f"tree_at: {shown} names {len(found.targets)} nodes, for which replace_fn is meant",
            hint=f"tree_at({shown}, tree, replace_fn=lambda old: new)",
        )
    else:
        news = _as_many(replace, len(found.targets))
    return _rebuild(with_new_containers(pytree), trie, news, is_given=True)


def _found(where: Any, tree: PyTree, is_leaf: IsLeaf) -> Found:
    """Return the nodes that `where` names. Called last: classes and selectors are callable, too."""
    if isinstance(where, Selector):
        mask = where.mask(tree, is_leaf)
        locs = locations(tree, is_leaf)
        targets = [Target(s.path, s.leaf) for s, hit in zip(locs, mask, strict=True) if hit]
    elif isinstance(where, type):
        targets = list(_instances(where, tree, (), is_leaf))
    elif isinstance(where, str) or (callable(where) and not isinstance(where, Rule)):
        return locate(where, tree, is_leaf, "tree_at(where)")
    else:
        raise SpecError(
            "tree_at(where)",
            "a function from the tree to a node, a path, a class or a selector",
            describe(where),
            hint=["for example:", "tree_at(lambda m: m.layers[0].weight, model, new)"],
        )
    return Found(tuple(targets), single=len(targets) == 1)


def _instances(cls: type, node: Any, path: tuple[Any, ...], is_leaf: IsLeaf) -> Iterator[Target]:
    """Yield the outermost nodes of a type."""
    if isinstance(node, cls):
        # Do not look inside it: targets must not overlap.
        yield Target(path, node)
        return
    is_end = is_leaf is not None and is_leaf(node)
    for key, child in () if is_end else children_of(node) or ():
        yield from _instances(cls, child, (*path, key), is_leaf)


def _as_many(replace: Any, count: int) -> list[Any]:
    news: Sequence[Any] = replace
    # An array has a length, too, but is one node.
    if not isinstance(replace, (list, tuple)):
        expected = f"a sequence of {count} nodes"
        raise ArgumentError("tree_at(replace)", expected, describe(replace), hint=_each(count))
    if len(news) != count:
        expected = f"{count} nodes, as where names"
        raise ArgumentError("tree_at(replace)", expected, f"{len(news)}", hint=_each(count))
    return list(news)


def _each(count: int) -> list[str]:
    news = ", ".join(f"new{i + 1}" for i in range(count)) if count < 5 else "new1, new2, ..."
    return ["one for each node:", f"tree_at(where, tree, ({news}))"]


def refuse_tied(place: KeyPath, source: KeyPath) -> NoReturn:
    """Raise the error for an edit of a path that has its value from another one."""
    at, hint = (
        path_text(place),
        f"pm.untie(model, {path_text(place)!r}), or edit {path_text(source)}",
    )
    raise SpecError(f"{at} is tied to {path_text(source)}, and has no value of its own", hint=hint)


def replace_at(tree: PyTree, changes: Sequence[tuple[tuple[Any, ...], Any]]) -> PyTree:
    """Copy `tree` with new nodes at the given key paths, which must not overlap.

    The new nodes are stored unchanged.
    """
    trie = _trie_of([path for path, _ in changes])
    return _rebuild(tree, trie, [new for _, new in changes], is_given=False)


def _trie_of(paths: Sequence[tuple[Any, ...]]) -> Any:
    """Paths as a trie, in which each ends in its number; overlapping paths are refused."""
    whole: Any = {}
    for number, path in enumerate(paths):
        # A key before the first, so that the root is a path like others.
        level: Any = whole
        key: Any = None
        for following in path:
            below: Any = level.get(key)
            if below is None:
                below = dict[Any, Any]()
                level[key] = below
            elif type(below) is int:
                _refuse_overlap(paths[below], path)
            level, key = below, following
        found: Any = level.setdefault(key, number)
        if found != number:
            # The error may name any of the paths below.
            while type(found) is not int:
                found = next(iter(found.values()))
            _refuse_overlap(path, paths[found])
    return whole.get(None, {})


def _refuse_overlap(outer: tuple[Any, ...], inner: tuple[Any, ...]) -> NoReturn:
    raise SpecError(
        "tree_at(where) names a node twice"
        if outer == inner
        else "tree_at(where) names a node and something inside it",
        at=dict.fromkeys([path_text(outer), path_text(inner)]),
        hint=_TWICE,
    )


_TWICE = "tree_at(where2, tree_at(where1, tree, new1), new2)"


def _rebuild(node: PyTree, trie: Any, news: Sequence[Any], is_given: bool) -> PyTree:
    # No comprehensions: each would add a frame per level of the tree, and Python allows a thousand.
    if type(trie) is int:
        return news[trie]
    record = record_of(node)
    if record is not None:
        changes: dict[str, Any] = {}
        # Only along the trie: no other field of a record is read or filled in.
        for key, below in trie.items():
            name = key.name
            # Most entries of a trie are ends, which need no call (0.2 us less for each).
            if type(below) is int:
                changes[name] = news[below]
            else:
                changes[name] = _rebuild(stored(node, name), below, news, is_given)
        return record.rebuild(node, changes, is_given)
    kind: Any = class_of(node)
    parts: list[Any] = []
    # These very types: a subclass may be registered differently.
    if kind is list or kind is tuple:
        parts.extend(node)
        for key, below in trie.items():
            parts[key.idx] = _rebuild(parts[key.idx], below, news, is_given)
        return parts if kind is list else tuple(parts)
    for key, child in children_of(node) or ():
        parts.append(_rebuild(child, trie[key], news, is_given) if key in trie else child)
    return jtu.tree_structure(node, is_leaf=stop_below(node)).unflatten(parts)
