"""The Modules in a call's arguments that a selector chooses, and the paths that name them.

Elsewhere, a selector chooses leaves. Here, each Module that has the method in question is offered
as if it were a leaf. So a path is that of the Module itself, and a class means its instances, not
the leaves below them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

from pytreemod.errors import SpecError, explain
from pytreemod.module.classes import Module
from pytreemod.module.methods import BoundMethod
from pytreemod.transform.boundary.wrapping import Transformed
from pytreemod.tree.nodes import InheritedRole, Location, children_of, nearest_path, record_of
from pytreemod.tree.paths import path_text, pattern_text, some_of
from pytreemod.tree.predicates import is_array
from pytreemod.tree.prefixes import By, decide, refuse_shadowed
from pytreemod.tree.selecting import Locations, Selector
from pytreemod.tree.surgery import with_children
from pytreemod.typing import PyTree, class_of, jtu

Path = tuple[Any, ...]


def choose_modules(
    where: str, selector: Selector, trees: Sequence[PyTree], has_method: Callable[[Any], bool]
) -> list[dict[Path, str]]:
    """Choose Modules in the arguments of a call.

    Args:
        where: the name of the caller, for errors.
        selector: chooses Modules.
        trees: the arguments, with the function itself as the first.
        has_method: whether a Module has the method in question.

    Returns:
        For each argument, the names of the chosen Modules by their paths. A name is a path in the
        model. It does not include wrappers of the argument (a method of a model, or a jitted
        model).

    Raises:
        SpecError: if none is chosen, or a path matches none.
    """
    arguments = [_Argument(tree, has_method) for tree in trees]
    errors: list[SpecError] = []
    for argument in arguments:
        try:
            argument.choose_modules(selector)
        except SpecError as error:
            # An access that may fit another argument.
            errors.append(error)
    places = Locations(place for argument in arguments for place in argument.candidates)
    for pattern in selector.paths():
        if not any(pattern.pick(places, None, None)):
            raise SpecError(_explain_none(where, repr(pattern), places, pattern.steps))
    if not any(argument.names for argument in arguments):
        raise errors[0] if errors else SpecError(_explain_none(where, repr(selector), places))
    _align(arguments)
    return [argument.names_by_path() for argument in arguments]


def choose_first(
    where: str, rule: By, trees: Sequence[PyTree], has_method: Callable[[Any], bool]
) -> list[list[dict[Path, str]]]:
    """Choose Modules in the arguments of a call by a rule: the first selector that picks one.

    Args:
        where: the name of the caller, for errors.
        rule: from selectors to values.
        trees: the arguments, with the function itself as the first.
        has_method: whether a Module has the method in question.

    Returns:
        For each entry, what `choose_modules` returns, without the Modules of earlier entries.

    Raises:
        SpecError: if an entry picks no Module, or none first.
    """
    every = [choose_modules(where, selector, trees, has_method) for selector in rule.selectors]
    keys = [[(i, path) for i, found in enumerate(chosen) for path in found] for chosen in every]
    places = {
        (i, (*argument.prefix, *place.path)): place
        for i, argument in enumerate(_Argument(tree, has_method) for tree in trees)
        for place in argument.candidates
    }
    picks = [[key in picked for key in places] for picked in map(set, keys)]
    entries, shadowed = decide(picks, len(places))
    refuse_shadowed(where, rule.items, entries, shadowed, [*places.values()])
    first = dict(zip(places, entries, strict=True))
    return [
        [
            {p: name for p, name in found.items() if first[i, p] == entry}
            for i, found in enumerate(chosen)
        ]
        for entry, chosen in enumerate(every)
    ]


def unwrapped(tree: PyTree) -> tuple[Path, PyTree]:
    """Return the callable inside wrappers, and its path in them.

    Paths start at the model, however it is called: as a method, or under a transform.

    Args:
        tree: a function, or an argument of one.
    """
    path: Path = ()
    while isinstance(tree, (BoundMethod, Transformed)):
        # The first child is the callable; others are its arguments.
        key, child = next(iter(children_of(tree) or [(None, None)]))
        path, tree = (*path, key), child
    return path, tree


def choose_values(
    where: str, rule: By, tree: PyTree, is_offered: Callable[[Any], bool]
) -> dict[Path, Any]:
    """Return the values that a rule has for Modules themselves, by their paths.

    Args:
        where: the name of the caller, for errors.
        rule: from selectors to values; the first selector that chooses a Module gives its value.
        tree: a model, or any tree that contains some.
        is_offered: whether a Module is offered to the selectors.

    Raises:
        SpecError: if an entry picks none, or none that earlier entries leave.
    """
    argument = _Argument(tree, is_offered)
    places = argument.candidates
    picks: list[list[bool]] = []
    for selector in rule.selectors:
        for pattern in selector.paths():
            if not any(pattern.pick(places, None, None)):
                raise SpecError(_explain_none(where, repr(pattern), places, pattern.steps))
        picks.append(selector.pick(places, argument.inner, None))
        if not any(picks[-1]):
            raise SpecError(_explain_none(where, repr(selector), places))
    entries, shadowed = decide(picks, len(places))
    refuse_shadowed(where, rule.items, entries, shadowed, places)
    return {
        (*argument.prefix, *place.path): rule.items[entry][1]
        for place, entry in zip(places, entries, strict=True)
        if entry is not None
    }


def rebuilt(
    tree: PyTree,
    change: Callable[[Any, Path], Any],
    path: Path = (),
    within: Container[Path] | None = None,
) -> PyTree:
    """Return a tree with its nodes changed, those below a node before the node itself.

    Args:
        tree: any tree.
        change: from a node and its path to the new node.
        path: the path of the tree itself.
        within: the paths of the nodes to change and of their parents; others are unchanged. None
            for all nodes.
    """
    if within is not None and path not in within:
        return tree
    children = _children(tree)
    if children is None:
        return tree
    parts = [rebuilt(child, change, (*path, key), within) for key, child in children]
    return change(with_children(tree, children, parts), path)


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    # A State contains the values of tokens, and an optimizer those of parameters. Neither contains
    # Modules that are called.
    kind = class_of(node)
    is_closed = hasattr(kind, "__child_kinds__") or hasattr(kind, "__holds_values__")
    return None if is_closed else children_of(node)


# ---- one argument


class _Candidate(NamedTuple):
    """A node, its path, and the number of other libraries' nodes above it."""

    path: Path
    node: Any
    depth: int
    role: str


def _candidates(node: Any, path: Path, depth: int, here: InheritedRole) -> Iterator[_Candidate]:
    children = _children(node)
    if children is None:
        return
    yield _Candidate(path, node, depth, here.role)
    is_own = record_of(node) is None and class_of(node) not in (tuple, list, dict)
    for key, child in children:
        yield from _candidates(child, (*path, key), depth + is_own, here.of_child(node, key))


class _Argument:
    """An argument of a call, or the function that is called."""

    def __init__(self, tree: PyTree, has_method: Callable[[Any], bool]):
        self.prefix, inner = unwrapped(tree)
        self.inner = inner
        self.locs = list(_candidates(inner, (), 0, InheritedRole()))
        self.candidates = Locations(
            Location(loc.path, loc.node, (), loc.role, is_node=True)
            for loc in self.locs
            if isinstance(loc.node, Module) and has_method(loc.node)
        )
        self.names: dict[Path, str] = {}

    def choose_modules(self, selector: Selector) -> None:
        if self.candidates:
            picked = selector.pick(self.candidates, self.inner, None)
            pairs = zip(self.candidates, picked, strict=True)
            self.names = {loc.path: path_text(loc.path) for loc, is_picked in pairs if is_picked}

    def names_by_path(self) -> dict[Path, str]:
        """Return the names, by the paths in the argument as it is wrapped."""
        return {(*self.prefix, *path): name for path, name in self.names.items()}


# ---- models in the state of an optimizer


def _align(arguments: Sequence[_Argument]) -> None:
    """Name Modules in an optimizer's state like those in the model it is for.

    They are never called, but `jax.tree.map` over model and moments needs trees of one structure.
    Such states are nodes of other libraries, and their contents have the structure of the model.
    """
    everywhere = [(argument, loc) for argument in arguments for loc in argument.locs]
    # Only another library's node can contain such a state; otherwise all pairs would be compared.
    if not any(loc.depth for _, loc in everywhere):
        return
    models = [
        (loc, names)
        for argument, loc in everywhere
        if (names := _names_below(argument.names, loc.path))
    ]
    done: list[tuple[_Argument, Path]] = []
    for argument, loc in everywhere:
        # Everything below an aligned model has its names already.
        if any(argument is other and loc.path[: len(path)] == path for other, path in done):
            continue
        for model, names in models:
            # Only nodes further inside a library's nodes: two models side by side are
            # independent.
            if model.depth < loc.depth and _is_alike(model.node, loc.node):
                for path in _names_below(argument.names, loc.path):
                    # It was chosen itself, by the names of the optimizer's fields.
                    del argument.names[(*loc.path, *path)]
                found = _names_alike(model.node, loc.node, names)
                argument.names.update({(*loc.path, *path): n for path, n in found.items()})
                done.append((argument, loc.path))
                break


def _names_below(names: dict[Path, str], start: Path) -> dict[Path, str]:
    return {p[len(start) :]: name for p, name in names.items() if p[: len(start)] == start}


def _is_alike(model: Any, other: Any) -> bool:
    """Whether every array of `other` is at a path where `model` has an array of its shape."""
    if class_of(model) is not class_of(other):
        return False
    shapes, others = _shapes(model), _shapes(other)
    # Without an array nothing can be compared. Some may be missing, such as masked ones.
    return bool(others) and all(shapes.get(path) == shape for path, shape in others.items())


def _shapes(node: Any) -> dict[Path, Any]:
    leaves = jtu.tree_leaves_with_path(node)
    return {path: leaf.shape for path, leaf in leaves if is_array(leaf)}


def _names_alike(model: Any, other: Any, names: dict[Path, str]) -> dict[Path, str]:
    return {p: name for p, name in names.items() if _classes(model, p) == _classes(other, p)}


def _classes(node: Any, path: Path) -> list[Any]:
    """Return the classes of the nodes along a path, as far as the path exists."""
    classes = [class_of(node)]
    for key in path:
        below = dict(children_of(node) or ())
        if key not in below:
            break
        node = below[key]
        classes.append(class_of(node))
    return classes


# ---- refusals


def _explain_none(
    where: str, what: str, places: Sequence[Location], steps: tuple[str, ...] = ()
) -> str:
    shown = some_of([pattern_text(place.path) for place in places])
    hint = f"the arguments have: {shown}" if shown else "the model is an argument, not a closure"
    fact = f"{where}: {what} picks no Module that can be called{nearest_path(steps, places)}"
    return explain(fact, hint=hint)
