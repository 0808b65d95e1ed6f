"""Surgery: new trees that differ from an old one in selected nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, overload

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.tree.instances import MISSING, schema_of, stored
from pytreemod.tree.locating import Found, Target, locate
from pytreemod.tree.nodes import (
    children_of,
    found_in,
    locations,
    node_like,
    tied_paths,
    with_new_containers,
)
from pytreemod.tree.paths import path_text
from pytreemod.tree.selecting import Selector, is_function
from pytreemod.typing import IsLeaf, KeyPath, PyTree, is_instance

_T = TypeVar("_T")


@overload
def tree_at(
    where: Callable[[_T], Any],
    pytree: _T,
    replace: Any = MISSING,
    replace_fn: Callable[[Any], Any] = MISSING,
    is_leaf: IsLeaf = None,
) -> _T: ...


@overload
def tree_at(
    where: str | type[Any] | Selector,
    pytree: _T,
    replace: Any = MISSING,
    replace_fn: Callable[[Any], Any] = MISSING,
    is_leaf: IsLeaf = None,
) -> _T: ...


def tree_at(
    where: Any,
    pytree: _T,
    replace: Any = MISSING,
    replace_fn: Callable[[Any], Any] = MISSING,
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
    if (replace is MISSING) == (replace_fn is MISSING):
        raise ArgumentError("tree_at takes either replace or replace_fn")
    targets, is_single = _found(where, pytree, is_leaf)
    if any(target.node is None for target in targets):
        ties = tied_paths(pytree)
        for place in ties.keys() & {target.path for target in targets}:
            refuse_tied(place, ties[place])
    if replace is MISSING:
        news = [with_new_containers(replace_fn(target.node)) for target in targets]
    elif is_single:
        news = [replace]
    else:
        news = _one_for_each(replace, targets, not isinstance(where, (str, type, Selector)))
    edits = [(target.path, new) for target, new in zip(targets, news, strict=True)]
    return _rebuild(with_new_containers(pytree), edits, 0, is_given=True)


def _found(where: Any, tree: PyTree, is_leaf: IsLeaf) -> Found:
    """Return the nodes that `where` names."""
    # Classes and selectors first, because they can be called, too.
    if isinstance(where, Selector):
        hits = zip(locations(tree, is_leaf), where.mask(tree, is_leaf), strict=True)
        targets = [Target(loc.path, loc.leaf) for loc, hit in hits if hit]
    elif isinstance(where, type):
        pairs = found_in(tree, lambda node: isinstance(node, where), is_leaf)
        targets = [Target(path, node) for path, node in pairs]
    elif isinstance(where, str) or is_function(where):
        return locate(where, tree, is_leaf, "tree_at(where)")
    else:
        expected = "a function from the tree to a node, a path, a class or a selector"
        raise SpecError("tree_at(where)", expected, describe(where))
    return Found(targets, single=len(targets) == 1)


def _one_for_each(replace: Any, targets: Sequence[Target], is_access: bool) -> Sequence[Any]:
    """Return `replace`, if it has a node for each target, in an order that the reader can see."""
    # An array has a length, too, but is one node.
    is_sequence = is_access and is_instance(replace, (list, tuple))
    if is_sequence and len(replace) == len(targets):
        return replace
    fact = f"tree_at: replace does not fit the {len(targets)} nodes that where names"
    raise ArgumentError(fact, hint="tree_at(where, tree, replace_fn=lambda old: new)")


def refuse_tied(place: KeyPath, source: KeyPath) -> NoReturn:
    """Raise the error for an edit of a path that has its value from another one."""
    at, other = path_text(place), path_text(source)
    hint = f"pm.untie(model, {at!r}), or edit {other}"
    raise SpecError(f"{at} is tied to {other}, and has no value of its own", hint=hint)


def replace_at(tree: PyTree, changes: Sequence[tuple[KeyPath, Any]]) -> PyTree:
    """Copy `tree` with new nodes at the given key paths, which must not overlap.

    The new nodes are stored unchanged.
    """
    return _rebuild(tree, changes, 0, is_given=False)


def _rebuild(
    node: PyTree, edits: Sequence[tuple[KeyPath, Any]], depth: int, is_given: bool
) -> PyTree:
    """Copy a node with new nodes below it, of which each path has `depth` keys down to this one."""
    # No comprehensions: each would add a frame per level of the tree, and Python allows a thousand.
    below: dict[Any, list[tuple[KeyPath, Any]]] = {}
    for path, new in edits:
        if len(path) > depth:
            below.setdefault(path[depth], []).append((path, new))
        elif len(edits) == 1:
            return new
        else:
            at = [path_text(each) for each, _ in edits]
            raise SpecError("tree_at(where) names a node twice, or something inside it", at=at)
    schema = schema_of(node)
    if schema is not None:
        changes: dict[str, Any] = {}
        # No other field of a Module is read.
        for key, inner in below.items():
            changes[key.name] = _rebuild(stored(node, key.name), inner, depth + 1, is_given)
        return schema.rebuild(node, changes, is_given) if changes else node
    children, parts = children_of(node) or [], list[Any]()
    for key, child in children:
        inner = below.get(key)
        parts.append(_rebuild(child, inner, depth + 1, is_given) if inner else child)
    return node_like(node, children, parts) if below else node
