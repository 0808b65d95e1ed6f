"""From an access function to paths: what did `where` point at?

`where` is called on a *stand-in* of the tree: the same containers and the same classes, so that
`isinstance`, iteration and methods work, but with a mark in the place of each leaf. Records are
filled in only where `where` looks, so that the cost follows the access and not the tree. What
comes back is recognized by identity, so two equal nodes are never confused.

Configuration and `None` keep their values at first, because `where` may branch on them. Only if
the answer is not recognized is `where` asked again with marks in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from pytreemod.errors import AccessError, SpecError, describe, explain
from pytreemod.tree.nodes import children_of, record_of, stop_below
from pytreemod.tree.paths import matches, parse_pattern, path_text, step_names
from pytreemod.tree.pending import PENDING, AbstractSource
from pytreemod.typing import IsLeaf, PyTree, Where, class_of, jtu


class _Mark:
    """Stands for one leaf; refuses every computation."""

    __slots__ = ("path",)

    def __init__(self, path: tuple[Any, ...]):
        self.path = path

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        refuse_computed(self.path)

    def __getattr__(self, name: str) -> NoReturn:
        refuse_computed((*self.path, jtu.GetAttrKey(name)))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __pow__ = __neg__ = __abs__ = __call__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __len__ = __iter__ = __getitem__ = _refuse
    __array__ = __jax_array__ = __float__ = __int__ = __index__ = __eq__ = __ne__ = _refuse  # pyright: ignore[reportAssignmentType]  (it never returns)
    __hash__ = object.__hash__


def refuse_computed(path: tuple[Any, ...]) -> NoReturn:
    """Raise the error for a `where` that looks inside a leaf or computes with it."""
    raise AccessError(
        explain(
            "where",
            "a function that only picks nodes of the tree",
            "one that computes with a leaf, or looks inside it",
            places=[path_text(path)],
            cure=[
                "pick the node, and compute in replace_fn:",
                "tree_at(where, tree, replace_fn=f)",
            ],
        )
    )


class _StandIns:
    """Makes stand-ins, and remembers which path each stands for."""

    def __init__(self, is_leaf: IsLeaf, mark_none: bool, mark_config: bool):
        self.is_leaf = is_leaf
        self.mark_none = mark_none
        self.mark_config = mark_config
        self.paths: dict[int, tuple[Any, ...]] = {}
        # Keeps every stand-in alive, or a later one could take its id.
        self.alive: list[Any] = []

    def make(self, node: Any, path: tuple[Any, ...]) -> Any:
        made = self._make(node, path)
        if made is not None and not (class_of(made) is tuple and not made):
            self.paths[id(made)] = path
            self.alive.append(made)
        return made

    def _make(self, node: Any, path: tuple[Any, ...]) -> Any:
        if self.is_leaf is not None and self.is_leaf(node):
            return _Mark(path)
        if node is None or (class_of(node) is tuple and not node):
            return _Mark(path) if self.mark_none else node
        record = record_of(node)
        if record is not None:
            return record.shadow(node, _Shadow(self, node, path))
        children = children_of(node)
        if children is None:
            return _Mark(path)
        parts = [self.make(child, (*path, key)) for key, child in children]
        if class_of(node) is list:
            return parts
        treedef = jtu.tree_structure(node, is_leaf=stop_below(node))
        return treedef.unflatten(parts)

    def field(self, node: Any, name: str, path: tuple[Any, ...]) -> Any:
        record = record_of(node)
        value = getattr(node, name)
        below = (*path, jtu.GetAttrKey(name))
        if record is None or name in record.data_names(node):
            return self.make(value, below)
        if self.mark_config:
            mark = _Mark(below)
            self.paths[id(mark)] = below
            self.alive.append(mark)
            return mark
        return value


class _Shadow(AbstractSource):
    """The fields of one record's stand-in."""

    __slots__ = ("makers", "node", "path")

    def __init__(self, makers: _StandIns, node: Any, path: tuple[Any, ...]):
        self.makers = makers
        self.node = node
        self.path = path

    def read(self, node: Any, name: str) -> None:
        record = record_of(self.node)
        if record is not None and name in record.names(self.node):
            node.__dict__[name] = self.makers.field(self.node, name, self.path)

    def settle(self, node: Any) -> None:
        record = record_of(self.node)
        for name in () if record is None else record.names(self.node):
            if name not in node.__dict__:
                self.read(node, name)
        node.__dict__.pop(PENDING, None)


class Target(NamedTuple):
    """One node that `where` named."""

    path: tuple[Any, ...]


class Found(NamedTuple):
    """What `where` named: one node, or a sequence of nodes."""

    targets: tuple[Target, ...]
    single: bool


_MODES = ((False, False), (True, False), (False, True), (True, True))


def locate(where: Where | str, tree: PyTree, is_leaf: IsLeaf, name: str) -> Found:
    """The paths of the nodes that `where` names.

    Args:
        where: an access function, or a path pattern.
        tree: the tree.
        is_leaf: nodes to treat as leaves.
        name: what to call `where` in errors.

    Returns:
        The targets, in the order in which they were named.

    Raises:
        SpecError: `where` computes, names something that is not in the tree, or a node twice.
    """
    if isinstance(where, str):
        return _locate_pattern(where, tree, name)
    answer: Any = None
    for mark_none, mark_config in _MODES:
        makers = _StandIns(is_leaf, mark_none, mark_config)
        try:
            answer = where(makers.make(tree, ()))
        except Exception as error:
            if mark_config or mark_none:
                continue
            where(tree)  # If the real tree fails in the same way, that error is the one to show.
            if isinstance(error, SpecError):
                raise
            raise SpecError(_computed_text(name, error)) from error
        found = _recognize(answer, makers.paths)
        if found is not None and (found.targets or mark_none):
            return found
    raise SpecError(
        explain(
            name,
            "a function that returns nodes of the tree",
            f"one that returns {describe(answer)}",
            cure=["return what you access, for instance", "lambda tree: tree.layers[0].weight"],
        )
    )


def _computed_text(name: str, error: Exception) -> str:
    return explain(
        name,
        "a function that only picks nodes of the tree",
        f"one that needs the values of leaves ({type(error).__name__})",
        cure=["pick the node, and compute in replace_fn:", "tree_at(where, tree, replace_fn=f)"],
    )


def _recognize(answer: Any, paths: dict[int, tuple[Any, ...]]) -> Found | None:
    if id(answer) in paths:
        return Found((Target(paths[id(answer)]),), single=True)
    items: Sequence[Any] = answer
    if not isinstance(answer, (list, tuple)):
        return None
    targets: list[Target] = []
    for item in items:
        if id(item) in paths:
            targets.append(Target(paths[id(item)]))
            continue
        nested = _recognize(item, paths) if item is not answer else None
        if nested is None or nested.single:
            return None
        targets += nested.targets
    return Found(tuple(targets), single=False)


def _locate_pattern(pattern: str, tree: PyTree, name: str) -> Found:
    from_pattern = tuple(Target(path) for path in _matching(pattern, tree))
    if not from_pattern:
        raise SpecError(
            explain(name, "a path that is in the tree", f"{pattern!r}, which matches no node")
        )
    return Found(from_pattern, single=len(from_pattern) == 1)


def _matching(pattern: str, tree: PyTree) -> list[tuple[Any, ...]]:
    steps = parse_pattern(pattern)
    found: list[tuple[Any, ...]] = []

    def visit(node: Any, path: tuple[Any, ...]) -> None:
        names = step_names(path)
        if names and matches(steps, names):
            found.append(path)
            return
        record = record_of(node)
        children = children_of(node) or []
        if record is not None:
            children = [(jtu.GetAttrKey(n), getattr(node, n)) for n in record.names(node)]
        for key, child in children:
            visit(child, (*path, key))

    visit(tree, ())
    return found
