"""From an access function to paths: which nodes does `where` return?

`where` is called on a proxy of the tree: the same containers and the same classes, so that
`isinstance`, iteration and methods work, but with a mark instead of each leaf. Records are
filled in only where `where` looks, so that the cost depends on the access and not on the tree. The
result is recognized by identity, so two equal nodes are never confused.

A mark may be returned where `where` does not return the leaf itself: `stack[0].weight` is a mark,
but a slice of the array. So `where` is called on the tree itself, too, and names a node only if it
returns that very node there.

Configuration, `None` and `()` have their values at first, because `where` may branch on them. Only
if the result is not recognized is `where` called again, with marks instead of them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple, NoReturn

from pytreemod.errors import SpecError, describe
from pytreemod.tree.nodes import (
    AbstractRecord,
    children_of,
    leaves_shown,
    locations,
    nearest_path,
    own_class,
    record_of,
    stop_below,
)
from pytreemod.tree.paths import matches, parse_pattern, path_text, step_names
from pytreemod.tree.pending import PRIVATE, AbstractSource, source_of
from pytreemod.tree.predicates import is_array
from pytreemod.tree.stored_fields import reading_stored, stored
from pytreemod.typing import IsLeaf, KeyPath, PyTree, Where, class_of, jtu


class Target(NamedTuple):
    """One node that `where` returned, and its path."""

    path: tuple[Any, ...]
    node: Any


class _Mark:
    """Represents one leaf; refuses every computation."""

    # Names that no leaf has: any other attribute of a mark is meant to be that of the leaf.
    __slots__ = ("makers_", "node_", "path_")

    def __init__(self, makers: _Proxies, path: tuple[Any, ...], node: Any):
        self.makers_ = makers
        self.path_ = path
        self.node_ = node

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        refuse_computed(self.path_)

    def __getattr__(self, name: str) -> NoReturn:
        refuse_computed((*self.path_, jtu.GetAttrKey(name)))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __pow__ = __neg__ = __abs__ = __call__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __len__ = __iter__ = __getitem__ = _refuse
    __array__ = __jax_array__ = __float__ = __int__ = __index__ = __eq__ = __ne__ = _refuse  # pyright: ignore[reportAssignmentType]  (it never returns)
    # Hashing, as a set or dict does, asks nothing of the leaf.
    __hash__ = object.__hash__


def refuse_computed(path: tuple[Any, ...]) -> NoReturn:
    """Raise the error for a `where` that looks inside a leaf or computes with it."""
    raise SpecError(
        "`where` may only pick nodes, but it computes with a leaf, or looks inside it",
        at=[path_text(path)],
        hint="tree_at(where, tree, replace_fn=f)",
    )


class Found(NamedTuple):
    """The nodes that `where` returned: one node, or a sequence of nodes."""

    targets: tuple[Target, ...]
    single: bool


class _Marked(NamedTuple):
    """The nodes that marks replace, besides the leaves."""

    none: bool = False
    empty: bool = False
    config: bool = False


# With the fewest marks first: every mark makes the proxy less like the tree.
_MODES = tuple(_Marked(n, e, c) for c, e, n in product((False, True), repeat=3))


class _Proxies:
    """Makes proxies, and records the target of each."""

    def __init__(self, is_leaf: IsLeaf, marked: _Marked):
        self.is_leaf = is_leaf
        self.marked = marked
        self.leaf_classes: set[Any] = set()
        # The targets of nodes that cannot record them: containers, and records that are filled in.
        # The nodes stay alive, or a later one could get the same id.
        self.nodes: dict[int, tuple[Any, Target]] = {}

    def make(self, node: Any, path: tuple[Any, ...]) -> Any:
        kind = class_of(node)
        # A known class of leaves need not be looked up in JAX's registry again.
        if kind in self.leaf_classes or (self.is_leaf is not None and self.is_leaf(node)):
            return _Mark(self, path, node)
        if node is None or (kind is tuple and not node):
            is_marked = self.marked.none if node is None else self.marked.empty
            return _Mark(self, path, node) if is_marked else node
        record = record_of(node)
        if record is not None:
            return record.proxy(node, _ProxySource(self, record, node, path))
        children = children_of(node)
        if children is None:
            self.leaf_classes.add(kind)
            return _Mark(self, path, node)
        made: Any = []
        # No comprehension: it would add a frame for each level of the tree (Python allows 1000).
        for key, child in children:
            made.append(self.make(child, (*path, key)))
        if kind is dict:
            # In the dict's own order, in which `where` may iterate; JAX sorts the keys.
            by_name = {key.key: part for (key, _), part in zip(children, made, strict=True)}
            made = {name: by_name[name] for name in node}
        elif kind is not list:
            # By JAX, so that it has the node's own class.
            made = jtu.tree_structure(node, is_leaf=stop_below(node)).unflatten(made)
        if id(made) in self.nodes:
            # A class with a single instance: identity could not distinguish its paths.
            return _Mark(self, path, node)
        return self.remember(made, path, node)

    def remember(self, made: Any, path: tuple[Any, ...], node: Any) -> Any:
        """Record a proxy, to recognize it later, and return it."""
        self.nodes[id(made)] = made, Target(path, node)
        return made

    def target(self, answer: Any) -> Target | None:
        """Return the target of a proxy; None for anything else."""
        if type(answer) is _Mark:
            return Target(answer.path_, answer.node_) if answer.makers_ is self else None
        _, target = self.nodes.get(id(answer), (None, None))
        if target is None and record_of(answer) is not None:
            # A class's own `__getattribute__` would take this for reading a field.
            source = source_of(object.__getattribute__(answer, "__stored__"))
            if isinstance(source, _ProxySource) and source.makers is self:
                target = Target(source.path, source.node)
        return target

    def recognize(self, answer: Any, actual: Any) -> Found | None:
        """The nodes that a result names, where `actual` is the result for the tree itself."""
        target = self.target(answer)
        if target is not None:
            return Found((target,), single=True) if _is_same(target.node, actual) else None
        items, others = _items(answer), _items(actual)
        # An empty tuple may be a node: Python has only one.
        is_unclear = class_of(answer) is tuple and not answer and not self.marked.empty
        if items is None or others is None or len(items) != len(others) or is_unclear:
            return None
        targets: list[Target] = []
        for item, other in zip(items, others, strict=True):
            target = self.target(item)
            if target is not None and target.node is other:
                targets.append(target)
                continue
            found = None if item is answer else self.recognize(item, other)
            if found is None:
                return None
            targets += found.targets
        return Found(tuple(targets), single=False)

    def refuse_made(self, answer: Any, actual: Any, name: str) -> None:
        """Refuse a result that is made of nodes, and depends on the values of leaves."""
        items, others = _items(answer), _items(actual)
        if items is not None and others is not None and len(items) != len(others):
            raise SpecError(
                name,
                "a function that picks the same nodes for all values of leaves",
                f"one that picks {len(others)}, and {len(items)} without the values",
                hint=[
                    "to choose leaves by their values, use a selector:",
                    "select.type(jax.Array) & (lambda leaf: leaf.ndim > 1)",
                ],
            )
        leaves, others = jtu.tree_leaves_with_path(answer), jtu.tree_leaves(actual)
        if len(leaves) != len(others):
            return
        for (below, leaf), other in zip(leaves, others, strict=True):
            target = self.target(leaf)
            if target is not None and not _is_same(target.node, other):
                # For a member of a stack, all leaves are such parts.
                ends = target.path[len(target.path) - len(below) :] == below
                above = target.path[: -len(below)] if below and ends else None
                _refuse_made(target, other, name, above)


class _ProxySource(AbstractSource):
    """The fields of one proxy."""

    __slots__ = ("makers", "node", "path", "record")

    def __init__(self, makers: _Proxies, record: AbstractRecord, node: Any, path: tuple[Any, ...]):
        self.makers = makers
        self.record = record
        self.node = node
        self.path = path

    def read(self, node: Any, name: str) -> None:
        is_data = name in self.record.data_names(self.node)
        if not is_data and name not in self.record.names(self.node):
            return
        value, path = stored(self.node, name), (*self.path, jtu.GetAttrKey(name))
        if is_data:
            node.__stored__[name] = self.makers.make(value, path)
        else:
            is_marked = self.makers.marked.config
            node.__stored__[name] = _Mark(self.makers, path, value) if is_marked else value

    def fill_in(self, node: Any) -> None:
        for name in self.record.names(self.node):
            if name not in node.__stored__:
                self.read(node, name)
        node.__stored__[PRIVATE].source = None
        # Without a source it no longer records its own target.
        self.makers.remember(node, self.path, self.node)


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
        return _locate_access(where, tree, is_leaf, name)


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


def _locate_access(where: Where, tree: PyTree, is_leaf: IsLeaf, name: str) -> Found:
    # First, because an error that it raises here is the error to show.
    actual = where(tree)
    for marked in _MODES:
        is_first = marked is _MODES[0]
        proxies = _Proxies(is_leaf, marked)
        try:
            answer = where(proxies.make(tree, ()))
            found = proxies.recognize(answer, actual)
            if found is not None:
                return found
            if is_first:
                proxies.refuse_made(answer, actual, name)
        # With marks for more than leaves, an error says nothing about the original function.
        except SpecError:
            if is_first:
                raise
        except Exception as error:
            if is_first and isinstance(error, RecursionError):
                raise SpecError(f"{name}: the tree is too deep for Python: {error}") from error
            if is_first:
                raise SpecError(
                    name,
                    "a function that only picks nodes of the tree",
                    f"one that needs the values of leaves ({type(error).__name__})",
                    hint=[
                        "pick the complete leaf, and compute in replace_fn, also for one "
                        "member of a "
                        "stack:",
                        "tree_at(where, tree, replace_fn=lambda old: old.at[i].set(new))",
                    ],
                ) from error
        finally:
            # They refer to the tree; break the cycle, or the tree would outlive its last use.
            proxies.nodes.clear()
    raise SpecError(
        name,
        "a function that returns nodes of the tree",
        f"one that returns {describe(actual)}",
        hint=["return the node, for example:", "lambda tree: tree.layers[0].weight"],
    )


def _refuse_made(target: Target, made: Any, name: str, above: KeyPath | None) -> NoReturn:
    """Refuse a result that is made of a leaf, or of all leaves of a node `above`."""
    pattern = path_text(target.path)
    if name.startswith("tree_at") and above:
        call = "lambda old: jax.tree.map(lambda a, b: a.at[i].set(b), old, new)"
        hint = [
            "pick the complete node, and change one member in replace_fn:",
            f"tree_at({path_text(above)!r}, tree, replace_fn={call})",
        ]
    elif name.startswith("tree_at"):
        call = f"tree_at({pattern!r}, tree, replace_fn=lambda old: old.at[i].set(new))"
        hint = ["pick the complete leaf, and change a part of it in replace_fn:", call]
    else:
        hint = ["a selector picks complete leaves:", f"select.path({pattern!r})"]
    raise SpecError(
        name,
        "a function that only picks nodes of the tree",
        f"one that computes {describe(made)} from a leaf",
        at=[f"{pattern}: {describe(target.node)}"],
        hint=hint,
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
