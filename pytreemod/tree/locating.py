"""From an access function to paths: which nodes does `where` return?

`where` is called on a copy of the tree that has the same containers and classes, but a mark instead
of each leaf. What it returns is recognized by identity, so two equal nodes are never confused. The
fields of a Module in the copy are made when `where` reads one, so the cost depends on the access
and not on the tree.

A mark may be returned where `where` does not return the leaf itself: `stack[0].weight` is a mark,
but a slice of the array. So `where` is called on the tree itself, too, and names a node only if it
returns that very node there.

Configuration, `None` and `()` have their values in the copy, because `where` may branch on them.
Only if the result is not recognized is `where` called again, on a copy with marks for these, too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from pytreemod.errors import SpecError, describe
from pytreemod.tree.instances import (
    flat_of,
    reading_stored,
    record_of,
    set_cached,
    set_flat,
    stored,
)
from pytreemod.tree.nodes import (
    children_of,
    leaves_shown,
    locations,
    nearest_path,
    own_class,
    stop_below,
)
from pytreemod.tree.paths import matches, parse_pattern, path_text, step_names
from pytreemod.tree.predicates import is_array
from pytreemod.typing import IsLeaf, KeyPath, PyTree, Where, class_of, jtu

_new: Any = object.__new__


class Target(NamedTuple):
    """One node that `where` returned, and its path."""

    path: KeyPath
    node: Any


class Found(NamedTuple):
    """The nodes that `where` returned: one node, or a sequence of nodes."""

    targets: tuple[Target, ...]
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
    refuse_model(where, name)
    with reading_stored():
        # First, because an error that it raises here is the error to show.
        actual = where(tree)
        for everything in (False, True):
            copy = _Copy(tree, is_leaf, everything)
            try:
                found = copy.ask(where, actual, name)
            finally:
                copy.forget()
            if found is not None:
                return found
    raise SpecError(
        f"{name} picks no nodes of the tree: it returns {describe(actual)}",
        hint="tree_at(where, tree, replace_fn=lambda old: old.at[i].set(new))",
    )


class _Mark:
    """Represents one leaf; refuses every computation."""

    # A name that no leaf has: any other attribute of a mark is meant to be that of the leaf.
    __slots__ = ("target_",)

    def __init__(self, target: Target):
        self.target_ = target

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise SpecError(
            "`where` may only pick nodes, but it computes with a leaf, or looks inside it",
            at=[path_text(self.target_.path)],
            hint="tree_at(where, tree, replace_fn=f)",
        )

    __getattr__ = __array__ = __jax_array__ = __call__ = __bool__ = __len__ = __iter__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __pow__ = __neg__ = __abs__ = __getitem__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __index__ = __eq__ = __ne__ = _refuse  # pyright: ignore[reportAssignmentType]  (it never returns)
    # Hashing, as a set or dict does, asks nothing of the leaf.
    __hash__ = object.__hash__


class _Copy:
    """A copy of a tree with marks, and the target of each of its nodes.

    Args:
        tree: the tree.
        is_leaf: nodes to treat as leaves.
        everything: whether configuration, None and empty tuples have marks, too.
    """

    def __init__(self, tree: PyTree, is_leaf: IsLeaf, everything: bool):
        self.is_leaf, self.everything = is_leaf, everything
        # With the nodes, which must stay alive: a later one could get the same id.
        self.targets: dict[int, tuple[Any, Target]] = {}
        self.tree = self.make(tree, ())

    def forget(self) -> None:
        """Break the cycle with the Modules of the copy, or the tree would outlive its last use."""
        self.targets.clear()
        self.tree = None

    def make(self, node: Any, path: KeyPath) -> Any:
        """Return the copy of a node."""
        target, kind = Target(path, node), class_of(node)
        is_end = self.is_leaf is not None and self.is_leaf(node)
        if not is_end and (node is None or (kind is tuple and not node)):
            return _Mark(target) if self.everything else node
        made: Any = None
        if not is_end and record_of(node) is not None:
            made = _new(kind)
            set_cached(made, _Fields(self, target))
        else:
            children = None if is_end else children_of(node)
            if children is None:
                return _Mark(target)
            parts: Any = []
            # No comprehension: it would add a frame for each level of the tree.
            for key, child in children:
                parts.append(self.make(child, (*path, key)))
            if kind is list:
                made = parts
            elif kind is dict:
                # In the dict's own order, in which `where` may iterate; JAX sorts the keys.
                by_name = {key.key: part for (key, _), part in zip(children, parts, strict=True)}
                made = {name: by_name[name] for name in node}
            else:
                made = jtu.tree_structure(node, is_leaf=stop_below(node)).unflatten(parts)
            if id(made) in self.targets:
                # A class with a single instance: identity could not distinguish its paths.
                return _Mark(target)
        self.targets[id(made)] = made, target
        return made

    def ask(self, where: Where, actual: Any, name: str) -> Found | None:
        """Call `where`; return the nodes that it names, None if these are not recognized.

        With marks for everything, an error says nothing about the function.

        Raises:
            SpecError: if it does more than pick.
        """
        try:
            return self.recognize(where(self.tree), actual)
        except Exception as error:
            if self.everything:
                return None
            if isinstance(error, SpecError):
                raise  # Of a mark.
            kind = type(error).__name__
            raise SpecError(
                f"{name} may only pick nodes, but it needs the values of leaves ({kind})",
                hint="tree_at(where, tree, replace_fn=lambda old: old.at[i].set(new))",
            ) from error

    def recognize(self, answer: Any, actual: Any) -> Found | None:
        """The nodes that a result names, where `actual` is the result for the tree itself."""
        is_mark = class_of(answer) is _Mark
        target: Target | None = answer.target_ if is_mark else self._target_of(answer)
        if target is not None:
            # A part of a leaf, such as one layer's of a Stack, is another object there.
            return Found((target,), single=True) if _is_same(target.node, actual) else None
        items, others = _items(answer), _items(actual)
        # An empty tuple may be a node, which the second copy shows.
        is_unclear = class_of(answer) is tuple and not answer and not self.everything
        if items is None or others is None or len(items) != len(others) or is_unclear:
            return None
        targets: list[Target] = []
        for item, other in zip(items, others, strict=True):
            found = None if item is answer else self.recognize(item, other)
            if found is None:
                return None
            targets += found.targets
        return Found(tuple(targets), single=False)

    def _target_of(self, answer: Any) -> Target | None:
        return self.targets.get(id(answer), (None, None))[1]


class _Fields:
    """Stands for the fields of a Module in a copy, until one is read (see `tree.instances`)."""

    __slots__ = ("copy", "target")

    containers = None

    def __init__(self, copy: _Copy, target: Target):
        self.copy, self.target = copy, target

    def assemble(self) -> Any:
        """Return the Module with its fields."""
        path, original = self.target
        children, (split, notes, *config) = flat_of(original)
        keys = zip(split.keys, children, strict=True)
        marks = tuple([self.copy.make(child, (*path, key)) for key, child in keys])
        if self.copy.everything:
            pairs = zip(split.config, config, strict=True)
            config = [_Mark(Target((*path, jtu.GetAttrKey(n)), value)) for n, value in pairs]
        made = _new(class_of(original))
        set_flat(made, (marks, (split, notes, *config)))
        return made


def _items(answer: Any) -> Sequence[Any] | None:
    items: Any = answer  # Type checkers would narrow `answer` to containers of unknown items.
    return items if isinstance(answer, (list, tuple)) else None


def _is_same(node: Any, actual: Any) -> bool:
    """Whether two nodes are the same object, or have one structure with the same leaves."""
    if node is actual:
        return True
    leaves, treedef = jtu.tree_flatten(node)
    others, structure = jtu.tree_flatten(actual)
    return treedef == structure and all(map(operator.is_, leaves, others))


def refuse_model(spec: Any, where: str) -> None:
    """Refuse a Module that contains arrays as the argument that selects nodes.

    Many Modules can be called, but here such a Module is a model in another argument's position.

    Args:
        spec: the argument: a function, or a Module.
        where: its name.

    Raises:
        SpecError: if it is such a Module.
    """
    if record_of(spec) is None or not any(map(is_array, jtu.tree_leaves(spec))):
        return
    raise SpecError(
        f"{where} is a selector of nodes, not a model ({own_class(spec).__qualname__})",
        hint="pm.tree_at(lambda m: m.layers[0].weight, model, new)",
    )


def _locate_pattern(pattern: str, tree: PyTree, name: str) -> Found:
    targets = tuple(_matching(parse_pattern(pattern), tree, ()))
    if not targets:
        locs = list(locations(tree))
        near = nearest_path(parse_pattern(pattern), locs)
        raise SpecError(f"{name}: {pattern!r} matches no node{near}", hint=leaves_shown(locs))
    return Found(targets, single=len(targets) == 1)


def _matching(steps: tuple[str, ...], node: Any, path: tuple[Any, ...]) -> Iterator[Target]:
    """Yield the outermost nodes whose paths match, configuration included."""
    record = record_of(node)
    if record is None:
        children = children_of(node) or ()
    else:
        children = [(jtu.GetAttrKey(n), stored(node, n)) for n in record.names(node)]
    for key, child in children:
        below = (*path, key)
        names = step_names(below)
        start = steps[: len(names)]
        if matches(steps, names):
            yield Target(below, child)
        # Only where the pattern leads.
        elif "**" in start or matches(start, names, exactly=True):
            yield from _matching(steps, child, below)
