"""Selectors: one language for "which leaves".

A selector is a value that says, for every leaf of a tree, whether it picks that leaf. Selectors
form a Boolean algebra under `&`, `|` and `~`: for every tree, the mask of `a & b` is the
leaf-wise *and* of the masks of `a` and `b`, and so on. The functions that users write are in
[`selectors`][pytreemod.tree.selectors].
"""

from __future__ import annotations

import functools as ft
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from types import EllipsisType
from typing import Any, NoReturn

import numpy as np

from pytreemod.errors import SpecError, describe
from pytreemod.tree.instances import is_module
from pytreemod.tree.locating import locate
from pytreemod.tree.members import layer_axes_of
from pytreemod.tree.nodes import (
    Location,
    children_of,
    leaves_shown,
    locations,
    nearest_path,
    tied_paths,
)
from pytreemod.tree.paths import matches, parse_pattern, path_text, step_names
from pytreemod.tree.predicates import is_array, is_inexact_array
from pytreemod.typing import IsLeaf, PyTree, Where, jtu


class Rule(ABC):
    """A rule for the leaves of a tree: a selector, or a [`by`][pytreemod.by].

    It is called on a tree, as optax calls masks and labels, and has no truth value.
    """

    @abstractmethod
    def __call__(self, tree: PyTree) -> PyTree:
        """Return the tree with each leaf replaced by the rule's value for it."""

    def __bool__(self) -> NoReturn:
        raise SpecError(f"{self!r} is neither true nor false", hint="rule(tree)  # for each leaf")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))


class Selector(Rule):
    """Picks leaves of a tree; combine with `&`, `|` and `~`.

    Called on a tree, it returns a tree of bools of the same structure, as optax's masks are:
    `optax.adamw(1e-3, mask=~pm.select.path("**.bias"))`.

    Examples:
        >>> import pytreemod as pm
        >>> pm.filter({"a": 1, "b": 2.0}, ~pm.select.path("a") & pm.select.type(float))
        {'a': None, 'b': 2.0}
    """

    @abstractmethod
    def pick(self, locs: Locations, tree: PyTree, is_leaf: IsLeaf) -> list[bool]:
        """Return one bool for each leaf of `tree`, whose locations are `locs`."""

    def paths(self) -> Iterable[PathSelector]:
        """The path patterns in this selector: if one matches nothing at all, it is a mistake."""
        return ()

    def __call__(self, tree: PyTree) -> PyTree:
        """Return a tree of bools: True for each leaf of `tree` that the selector picks.

        Args:
            tree: any tree.

        Returns:
            A tree of the structure of `tree`.

        Raises:
            SpecError: if a path or an access function names something that is not in the tree.

        Examples:
            >>> import pytreemod as pm
            >>> pm.select.path("a")({"a": [1, None], "b": 2.0})
            {'a': [True, None], 'b': False}
        """
        return jtu.tree_structure(tree).unflatten(self.mask(tree))

    def mask(self, tree: PyTree, is_leaf: IsLeaf = None) -> list[bool]:
        """Return one bool for each leaf of `tree`, in JAX's order.

        Args:
            tree: any tree.
            is_leaf: where to stop descending.

        Returns:
            A list as long as `jax.tree.leaves(tree, is_leaf)`.

        Raises:
            SpecError: if a path or an access function names something that is not in the tree.
        """
        # Once for the whole selector: a part does not know what it is combined with.
        refuse_unmatched([self], [tree], is_leaf)
        return self.pick(Locations(locations(tree, is_leaf)), tree, is_leaf)

    def __and__(self, other: Any) -> Selector:
        return _Joined("&", (self, as_selector(other)))

    def __or__(self, other: Any) -> Selector:
        return _Joined("|", (self, as_selector(other)))

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Selector:
        return _Joined("~", (self,))


class Locations(list[Location]):
    """Locations of leaves, with the names of their paths, for many selectors."""

    @ft.cached_property
    def names(self) -> list[tuple[str, ...]]:
        """The keys of the path to each leaf, as words."""
        return [step_names(loc.path) for loc in self]


class PathSelector(Selector):
    """Leaves whose path, or the path of a node above them, matches a pattern."""

    def __init__(self, pattern: str):
        self.pattern, self.steps = pattern, parse_pattern(pattern)

    def pick(self, locs: Locations, tree: PyTree, is_leaf: IsLeaf) -> list[bool]:
        """Pick leaves at or below a node whose path matches."""
        pairs = zip(locs, locs.names, strict=True)
        return [matches(self.steps, names, loc.is_node) for loc, names in pairs]

    def paths(self) -> Iterable[PathSelector]:
        """Only itself."""
        return (self,)

    def __repr__(self) -> str:
        return f"select.path({self.pattern!r})"


class LeafSelector(Selector):
    """Leaves that pass a test of one leaf's [`Location`][pytreemod.tree.nodes.Location].

    Args:
        text: how the selector is printed.
        test: a function from a location, and the arguments, to a bool.
        *arguments: hashable values; selectors of one test with equal arguments are equal.
    """

    def __init__(self, text: str, test: Callable[..., bool], *arguments: Any):
        self.text, self.test, self.arguments = text, test, arguments

    def pick(self, locs: Locations, tree: PyTree, is_leaf: IsLeaf) -> list[bool]:
        """Pick leaves that pass the test."""
        return [self.test(loc, *self.arguments) for loc in locs]

    def __repr__(self) -> str:
        return self.text


def type_selector(types: tuple[type, ...]) -> Selector:
    """Return the selector of leaves of the given types, and of all leaves below such nodes."""
    text = f"select.type({', '.join(t.__qualname__ for t in types)})"
    return LeafSelector(text, _is_below, types)


def _is_below(loc: Location, types: tuple[type, ...]) -> bool:
    is_represented = any(isinstance(x, type) and issubclass(x, types) for x in loc.nodes)
    return is_represented or any(isinstance(node, types) for node in (loc.leaf, *loc.nodes))


def role_selector(roles: tuple[str, ...]) -> Selector:
    """Return the selector of leaves that have one of the given roles."""
    text = f"select.role({', '.join(map(repr, roles))})"
    return LeafSelector(text, _has_role, roles)


def _has_role(loc: Location, roles: tuple[str, ...]) -> bool:
    return loc.role in roles


def is_matrix(loc: Location) -> bool:
    """Whether a leaf is a floating array with two axes beside those of layers and members."""
    return is_inexact_array(loc.leaf) and np.ndim(loc.leaf) - len(layer_axes_of(loc)) == 2


def _passes(loc: Location, predicate: Callable[[Any], Any], text: str) -> bool:
    return as_bool(predicate(loc.leaf), text)


def _is_anywhere(_: Location, value: bool) -> bool:
    return value


class AccessSelector(Selector):
    """Leaves at or below the nodes that an access function returns."""

    def __init__(self, where: Where):
        self.where = where

    def pick(self, locs: Locations, tree: PyTree, is_leaf: IsLeaf) -> list[bool]:
        """Pick leaves at or below the nodes that the function returns."""
        found = locate(self.where, tree, is_leaf, "select.at(where)")
        # A node instead of a leaf is picked by its own path, not by one above it.
        starts = {target.path for target in found.targets}
        lengths = {len(start) for start in starts}
        return [
            loc.path in starts if loc.is_node else any(loc.path[:n] in starts for n in lengths)
            for loc in locs
        ]

    def __repr__(self) -> str:
        return f"select.at({getattr(self.where, '__qualname__', self.where)})"


class _Joined(Selector):
    """Selectors with an operator of sets between them, or before one."""

    def __init__(self, sign: str, parts: tuple[Selector, ...]):
        self.sign, self.parts = sign, parts

    def paths(self) -> Iterable[PathSelector]:
        return (path for part in self.parts for path in part.paths())

    def pick(self, locs: Locations, tree: PyTree, is_leaf: IsLeaf) -> list[bool]:
        picks = [part.pick(locs, tree, is_leaf) for part in self.parts]
        if self.sign == "~":
            return [not hit for hit in picks[0]]
        return list(map(all if self.sign == "&" else any, zip(*picks, strict=True)))

    def __repr__(self) -> str:
        if self.sign == "~":
            return f"~{self.parts[0]!r}"
        return f"({f' {self.sign} '.join(map(repr, self.parts))})"


def refuse_unmatched(
    selectors: Sequence[Selector], trees: Sequence[PyTree], is_leaf: IsLeaf = None
) -> None:
    """Refuse a path pattern that matches nothing in any of the trees.

    Negated or combined, such a pattern would silently pick everything, or nothing. A path to a node
    without leaves is in the tree, and so is a path without wildcards below one: gradients and
    masked trees have a None, or another empty node, where a model has leaves.

    Raises:
        SpecError: if there is one; the error lists the leaves of the trees.
    """
    patterns = [path for selector in selectors for path in selector.paths()]
    if not patterns:
        return
    locs = Locations(loc for tree in trees for loc in locations(tree, is_leaf, with_empty=True))
    for pattern in patterns:
        # A pattern depends on nothing but paths.
        hits = [*compress(locs, pattern.pick(locs, None, is_leaf))]
        hits = hits or [loc for loc in locs if _is_empty_above(loc, pattern.steps)]
        if not hits:
            near = nearest_path(pattern.steps, locs)
            raise SpecError(f"{pattern!r} matches no leaf{near}", hint=leaves_shown(locs))
        if all(loc.leaf is None for loc in hits):
            sources = {place: at for tree in trees for place, at in tied_paths(tree).items()}
            if all(loc.path in sources for loc in hits):
                # It would do nothing: the leaves are elsewhere.
                at = path_text(sources[hits[0].path])
                raise SpecError(f"{pattern!r} is tied to {at}, which has the leaf")


def _is_empty_above(loc: Location, steps: tuple[str, ...]) -> bool:
    names = step_names(loc.path)
    return bool(names) and steps[: len(names)] == names and children_of(loc.leaf) == []


def as_bool(value: Any, where: str) -> bool:
    """Return a predicate's result as a bool; others are refused, and by JAX a traced one."""
    # Not by `bool` alone, which would hide a mistake for a number.
    if isinstance(value, bool) or (getattr(value, "dtype", None) == np.bool_ and value.shape == ()):
        return bool(value)
    raise SpecError(f"{where}: {describe(value)} for a leaf is not True or False")


def as_selector(spec: Any) -> Selector:
    """Return a selector from any value that converts to one.

    Args:
        spec: a Selector; a class (`select.type`); a string (`select.path`); `True`, `False` or
            `...`; a predicate on leaves.

    Returns:
        The selector.

    Raises:
        SpecError: if `spec` is none of these, or a Module that contains arrays: a model.
    """
    if isinstance(spec, Selector):
        return spec
    if isinstance(spec, str):
        return PathSelector(spec)
    if isinstance(spec, bool | EllipsisType):
        value = spec is not False
        return LeafSelector(repr(value), _is_anywhere, value)
    # Before callables, because a class can be called.
    if isinstance(spec, type):
        return type_selector((spec,))
    if is_function(spec):
        text = getattr(spec, "__qualname__", repr(spec))
        return LeafSelector(text, _passes, spec, text)
    hint = 'pm.select.path("weight") | pm.select.path("bias")'
    raise SpecError("selector", "a path, class, predicate or bool", describe(spec), hint=hint)


def is_function(spec: Any) -> bool:
    """Whether an argument can be called, and is neither a rule nor a Module that holds arrays.

    Such a Module is a model in another argument's position.
    """
    if is_module(spec) and any(map(is_array, jtu.tree_leaves(spec))):
        return False
    return callable(spec) and not isinstance(spec, Rule)
