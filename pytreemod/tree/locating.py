"""From an access function to paths: which nodes does `where` return?

`where` is called on the tree, and on a copy of it that has the same containers and classes, but a
mark instead of each leaf. What it returns for the copy is recognized by identity, so two equal
nodes are never confused. It names a node if it returns that very node for the tree: a part of a
leaf, such as `stack[0].weight`, is another object there.

Configuration, `None` and `()` have their values in the copy, because `where` may branch on them.
Only if the result is not recognized is `where` called again, on a copy with marks for these, too.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple, NoReturn

from pytreemod.errors import SpecError, describe
from pytreemod.tree.instances import all_stored, flat_of, reading_stored, set_cached, set_flat
from pytreemod.tree.nodes import (
    children_of,
    is_module,
    leaves_shown,
    locations,
    nearest_path,
    node_like,
)
from pytreemod.tree.paths import matches, parse_pattern, step_names
from pytreemod.typing import IsLeaf, KeyPath, PyTree, Where, class_of, is_instance, jtu


class Target(NamedTuple):
    """One node that `where` returned, and its path."""

    path: KeyPath
    node: Any


class Found(NamedTuple):
    """The nodes that `where` returned: one node, or a sequence of nodes."""

    targets: Sequence[Target]
    single: bool


def locate(where: Where | str, tree: PyTree, is_leaf: IsLeaf, name: str) -> Found:
    """Return the nodes that `where` names.

    Args:
        where: an access function, or a path pattern.
        tree: the tree.
        is_leaf: nodes to treat as leaves.
        name: the name of `where` in errors.

    Returns:
        The targets, in the order of `where`.

    Raises:
        SpecError: if `where` computes, or returns something that is not in the tree.
    """
    if isinstance(where, str):
        return _locate_pattern(where, tree, name)
    with reading_stored():
        # First, because an error that it raises here is the error to show.
        actual = where(tree)
        for everything in (False, True):
            copy = _Copy(is_leaf, everything)
            marked = copy.make(tree, ())
            try:
                found = copy.recognize(where(marked), actual)
            except Exception as error:
                if everything:
                    break  # With marks for everything, it says nothing about the function.
                fact = f"{name} may only pick nodes, but it needs the values of leaves"
                raise SpecError(fact, hint=_HINT) from error
            finally:
                # No cycle, or the tree would outlive its last use.
                copy.targets.clear()
            if found is not None:
                return found
    raise SpecError(f"{name} picks no nodes of the tree: it returns {describe(actual)}", hint=_HINT)


_HINT = "tree_at(where, tree, replace_fn=lambda old: old.at[i].set(new))"


class Leaf:
    """Marks the path of a leaf. Python itself refuses nearly all that is done with one."""

    __slots__ = ("target",)

    def __init__(self, target: Target):
        self.target = target

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("a function that picks nodes cannot choose by the value of a leaf")

    __bool__ = __eq__ = __ne__ = _refuse  # pyright: ignore[reportAssignmentType]  (it never returns)
    # Hashing, as a set or dict does, asks nothing of the leaf.
    __hash__ = object.__hash__


class _Later:
    """Stands for the fields of a Module until one is read (see `tree.instances`)."""

    containers = None

    def __init__(self, assemble: Callable[[], Any]):
        self.assemble = assemble


class _Copy:
    """A copy of a tree with marks, and the target of each of its nodes.

    The fields of a Module are made when `where` reads one: the cost depends on the access and not
    on the tree.

    Args:
        is_leaf: nodes to treat as leaves.
        everything: whether configuration, None and empty tuples have marks, too.
    """

    def __init__(self, is_leaf: IsLeaf, everything: bool):
        self.is_leaf, self.everything = is_leaf, everything
        # With the nodes, which must stay alive: a later one could get the same id.
        self.targets: dict[int, tuple[Any, Target]] = {}

    def make(self, node: Any, path: KeyPath) -> Any:
        """Return the copy of a node."""
        is_end = self.is_leaf is not None and self.is_leaf(node)
        if not is_end and is_module(node):
            made = object.__new__(class_of(node))
            set_cached(made, _Later(ft.partial(self.with_fields, node, path)))
        else:
            children = None if is_end else children_of(node)
            if children is None:
                return Leaf(Target(path, node))
            parts: list[Any] = []
            # No comprehension: it would add a frame for each level of the tree.
            for key, child in children:
                parts.append(self.make(child, (*path, key)))
            made = node_like(node, children, parts)
            if made is node:
                # None, `()`, the only instance of a class: not told from itself at another path.
                return Leaf(Target(path, node)) if self.everything else node
        self.targets[id(made)] = made, Target(path, node)
        return made

    def with_fields(self, node: Any, path: KeyPath) -> Any:
        """Return the copy of a Module with its fields."""
        children, (split, notes, *config) = flat_of(node)
        keys = zip(split.keys, children, strict=True)
        marks = tuple([self.make(child, (*path, key)) for key, child in keys])
        if self.everything:
            pairs = zip(split.config, config, strict=True)
            config = [Leaf(Target((*path, jtu.GetAttrKey(n)), value)) for n, value in pairs]
        made = object.__new__(class_of(node))
        set_flat(made, (marks, (split, notes, *config)))
        return made

    def recognize(self, answer: Any, actual: Any) -> Found | None:
        """The nodes that a result names, where `actual` is the result for the tree itself."""
        is_leaf = is_instance(answer, Leaf)
        known = (answer, answer.target) if is_leaf else self.targets.get(id(answer))
        if known is not None:
            target = known[1]
            return Found([target], single=True) if _is_same(target.node, actual) else None
        sequences = (list, tuple)
        if not (is_instance(answer, sequences) and is_instance(actual, sequences)):
            return None
        # An empty tuple may be a node, which the second copy shows.
        if len(answer) != len(actual) or (answer == () and not self.everything):
            return None
        targets: list[Target] = []
        for item, other in zip(answer, actual, strict=True):
            found = self.recognize(item, other)
            if found is None:
                return None
            targets += found.targets
        return Found(targets, single=False)


def _is_same(node: Any, actual: Any) -> bool:
    """Whether two nodes are the same object, or have one structure with the same leaves."""
    if node is actual:
        return True
    leaves, treedef = jtu.tree_flatten(node)
    others, structure = jtu.tree_flatten(actual)
    return treedef == structure and all(map(is_, leaves, others))


def _locate_pattern(pattern: str, tree: PyTree, name: str) -> Found:
    steps = parse_pattern(pattern)
    targets = list(_matching(steps, tree, ()))
    if not targets:
        locs = list(locations(tree))
        fact = f"{name}: {pattern!r} matches no node{nearest_path(steps, locs)}"
        raise SpecError(fact, hint=leaves_shown(locs))
    return Found(targets, single=len(targets) == 1)


def _matching(steps: tuple[str, ...], node: Any, path: KeyPath) -> Iterator[Target]:
    """Yield the outermost nodes whose paths match, configuration included."""
    own = all_stored(node).items() if is_module(node) else None
    pairs = children_of(node) or () if own is None else [(jtu.GetAttrKey(n), x) for n, x in own]
    for key, child in pairs:
        below = (*path, key)
        names = step_names(below)
        start = steps[: len(names)]
        if matches(steps, names):
            yield Target(below, child)
        # Only where the pattern leads.
        elif "**" in start or matches(start, names, exactly=True):
            yield from _matching(steps, child, below)
