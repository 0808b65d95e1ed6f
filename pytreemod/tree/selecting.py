"""Selectors: one language for "which leaves".

A selector is a value that says, for every leaf of a tree, whether it picks that leaf. Selectors
form a Boolean algebra under `&`, `|` and `~`: for every tree, the mask of `a & b` is the
leaf-wise *and* of the masks of `a` and `b`, and so on. The functions that users write are in
[`selectors`][pytreemod.tree.selectors].
"""

from __future__ import annotations

import functools as ft
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import EllipsisType
from typing import Any, ClassVar, NoReturn

import jax
import numpy as np

from pytreemod.errors import FrozenError, SpecError, describe
from pytreemod.tree.instances import notes_of, record_of
from pytreemod.tree.locating import locate, refuse_model
from pytreemod.tree.members import holds_of
from pytreemod.tree.nodes import Location, children_of, is_of, leaves_shown, locations, nearest_path
from pytreemod.tree.paths import matches, parse_pattern, pattern_text, step_names
from pytreemod.tree.predicates import is_inexact_array
from pytreemod.typing import IsLeaf, PyTree, Tracer, Where, jtu


class Rule(ABC):
    """A rule for the leaves of a tree: a selector, or a [`by`][pytreemod.by].

    It is called on a tree, as optax calls masks and labels. It is neither a function on leaves nor
    a truth value; using it as one raises an error with the code to write instead.
    """

    __slots__ = ()

    @abstractmethod
    def __call__(self, tree: PyTree) -> PyTree:
        """Return the tree with each leaf replaced by the rule's value for it."""

    def __bool__(self) -> NoReturn:
        raise SpecError(
            repr(self),
            "a call with a tree",
            "a conversion to bool",
            hint=["for the value of each leaf, write", "rule(tree)"],
        )


class Selector(Rule):
    """Picks leaves of a tree; combine with `&`, `|` and `~`.

    Called on a tree, it returns a tree of bools of the same structure, as optax's masks are:
    `optax.adamw(1e-3, mask=~pm.select.path("**.bias"))`.

    Examples:
        >>> import pytreemod as pm
        >>> pm.filter({"a": 1, "b": 2.0}, ~pm.select.path("a") & pm.select.type(float))
        {'a': None, 'b': 2.0}
    """

    __slots__ = ()
    structural: ClassVar[bool] = False

    @abstractmethod
    def pick(self, locs: Sequence[Location], tree: PyTree, is_leaf: IsLeaf) -> list[bool]:
        """Return one bool for each leaf of `tree`, whose locations are `locs`."""

    def terms(self) -> Iterator[Selector]:
        """Yield the selectors that this one is composed of; only itself if it is not composed."""
        yield self

    def paths(self) -> Iterator[PathSelector]:
        """The path patterns in this selector: if one matches nothing at all, it is a mistake."""
        return (term for term in self.terms() if isinstance(term, PathSelector))

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

    def is_structural(self) -> bool:
        """Whether the selection depends on the structure of a tree alone, and on no array in it."""
        return self.structural

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
        return _Both(self, as_selector(other))

    def __rand__(self, other: Any) -> Selector:
        return _Both(as_selector(other), self)

    def __or__(self, other: Any) -> Selector:
        return _Either(self, as_selector(other))

    def __ror__(self, other: Any) -> Selector:
        return _Either(as_selector(other), self)

    def __invert__(self) -> Selector:
        return _Without(self)


def refuse_unmatched(
    selectors: Sequence[Selector], trees: Sequence[PyTree], is_leaf: IsLeaf = None
) -> None:
    """Refuse a path pattern that matches nothing in any of the trees, and a misspelt role.

    Negated or combined, such a pattern would silently pick everything, or nothing. A path to a node
    without leaves is in the tree, and so is a path without wildcards below one: gradients and
    masked trees have a None, or another empty node, where a model has leaves.

    Raises:
        SpecError: if there is one; the error lists the leaves of the trees.
    """
    patterns = [path for selector in selectors for path in selector.paths()]
    if not patterns:
        return
    locs = Locations(loc for tree in trees for loc in locations(tree, is_leaf))
    for pattern in patterns:
        # A pattern depends on nothing but paths.
        if any(pattern.pick(locs, None, is_leaf)):
            continue
        empty = [loc for tree in trees for loc in _empty_nodes(tree, is_leaf)]
        reached = [loc for loc in empty if pattern.leads_to(loc.path)]
        if reached and all(map(_is_tied, reached)):
            # It would do nothing: the leaves are elsewhere.
            raise SpecError(
                f"{pattern!r} is tied to another path, which has the leaf",
                at=[f"{pattern_text(loc.path)}: {describe(loc.leaf)}" for loc in reached],
            )
        if reached:
            continue
        near = nearest_path(pattern.steps, locs)
        raise SpecError(f"{pattern!r} matches no leaf{near}", hint=leaves_shown(locs))


def _is_tied(loc: Location) -> bool:
    """Whether a node without children is a path that has its value from another one."""
    return any(
        tie.place == loc.path[i:]
        for i, node in enumerate(loc.nodes)
        if record_of(node) is not None
        for tie in notes_of(node).ties
    )


def _empty_nodes(tree: PyTree, is_leaf: IsLeaf) -> Iterator[Location]:
    """Return the nodes that have no children."""

    def stops(node: Any) -> bool:
        return (is_leaf is not None and is_leaf(node)) or children_of(node) == []

    return (loc for loc in locations(tree, stops) if children_of(loc.leaf) == [])


class _Term(Selector):
    """A selector that is defined by its parts: two of a class are equal if their parts are.

    It behaves as a frozen dataclass. It is not one, because generating the code for nine of them
    took a tenth of the time of importing the package.
    """

    __slots__ = ()

    def __init__(self, *parts: Any):
        for name, part in zip(self.__slots__, parts, strict=True):
            # Bypass the class's own, which refuses.
            object.__setattr__(self, name, part)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        expected = "no assignment, because a selector is immutable"
        raise FrozenError(f"{self!r}.{name}", expected, describe(value))

    def _parts(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __eq__(self, other: object) -> bool:
        # `a & b` and `a | b` have the same parts.
        if type(other) is not type(self):
            return NotImplemented
        return self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash((type(self), self._parts()))

    def __reduce__(self) -> Any:
        # Pickle would set attributes, which is refused.
        return type(self), self._parts()


class Locations(list[Location]):
    """Locations of leaves, with a cache of the names of their paths, for many selectors."""

    @ft.cached_property
    def names(self) -> list[tuple[str, ...]]:
        """The keys of the path to each leaf, as words."""
        return [step_names(loc.path) for loc in self]

    @ft.cached_property
    def below(self) -> dict[tuple[str, ...], list[int]]:
        """The indices of the leaves at or below each path, for patterns without wildcards."""
        found: dict[tuple[str, ...], list[int]] = {}
        for i, (loc, names) in enumerate(zip(self, self.names, strict=True)):
            for n in range(len(names) if loc.is_node else 0, len(names) + 1):
                found.setdefault(names[:n], []).append(i)
        return found


_WILD = frozenset("*?[")


class PathSelector(_Term):
    """Leaves whose path, or the path of a node above them, matches a pattern."""

    __slots__ = ("pattern", "steps")
    structural = True
    pattern: str
    steps: tuple[str, ...]

    def pick(self, locs: Sequence[Location], tree: PyTree, is_leaf: IsLeaf) -> list[bool]:
        """Pick leaves at or below a node whose path matches."""
        index = locs if isinstance(locs, Locations) else Locations(locs)
        if _WILD.intersection("".join(self.steps)):
            pairs = zip(index.names, locs, strict=True)
            return [matches(self.steps, names, loc.is_node) for names, loc in pairs]
        picked = [False] * len(locs)
        for i in index.below.get(self.steps, ()):
            picked[i] = True
        return picked

    def leads_to(self, path: tuple[Any, ...]) -> bool:
        """Whether the pattern matches a node or one above it, or names something below it."""
        names = step_names(path)
        return matches(self.steps, names) or (bool(names) and self.steps[: len(names)] == names)

    def __repr__(self) -> str:
        return f"select.path({self.pattern!r})"


class TypeSelector(_Term):
    """Leaves of the given types, and all leaves below nodes of these types."""

    __slots__ = ("types",)
    types: tuple[type, ...]

    def is_structural(self) -> bool:
        """False if the types distinguish kinds of arrays."""
        return all(len({issubclass(kind, t) for kind in _KINDS_OF_ARRAYS}) == 1 for t in self.types)

    def pick(self, locs: Sequence[Location], tree: PyTree, is_leaf: IsLeaf) -> list[bool]:
        """Pick leaves of the types, and leaves below nodes of the types."""
        return [
            # Of the nodes above, too: a class picks everything inside its instances.
            isinstance(loc.leaf, self.types) or any(is_of(n, self.types) for n in loc.nodes)
            for loc in locs
        ]

    def __repr__(self) -> str:
        return f"select.type({', '.join(t.__qualname__ for t in self.types)})"


# An array of one kind may replace one of another.
_KINDS_OF_ARRAYS = (jax.Array, np.ndarray, *np.sctypeDict.values())


class RoleSelector(_Term):
    """Leaves that declare one of the given roles."""

    __slots__ = ("roles",)
    structural = True
    roles: tuple[str, ...]

    def pick(self, locs: Sequence[Location], tree: PyTree, is_leaf: IsLeaf) -> list[bool]:
        """Pick leaves with one of the roles."""
        return [loc.role in self.roles for loc in locs]

    def __repr__(self) -> str:
        return f"select.role({', '.join(map(repr, self.roles))})"


class MatrixSelector(_Term):
    """Floating arrays that have two axes in each layer and each member."""

    __slots__ = ()

    def pick(self, locs: Sequence[Location], tree: PyTree, is_leaf: IsLeaf) -> list[bool]:
        """Pick arrays with two axes more than those of layers and members."""
        return [
            is_inexact_array(loc.leaf) and np.ndim(loc.leaf) - len(holds_of(loc)) == 2
            for loc in locs
        ]

    def __repr__(self) -> str:
        return "matrices"


class AccessSelector(_Term):
    """Leaves at or below the nodes that an access function returns."""

    __slots__ = ("where",)
    # The function cannot look inside a leaf.
    structural = True
    where: Where

    def pick(self, locs: Sequence[Location], tree: PyTree, is_leaf: IsLeaf) -> list[bool]:
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


class _Predicate(_Term):
    __slots__ = ("predicate",)
    # Not structural: it may look at an array's shape or dtype.
    predicate: Any

    def pick(self, locs: Sequence[Location], tree: PyTree, is_leaf: IsLeaf) -> list[bool]:
        answers = ask(self.predicate, [loc.leaf for loc in locs])
        return [as_bool(answer, repr(self)) for answer in answers]

    def __repr__(self) -> str:
        return getattr(self.predicate, "__qualname__", repr(self.predicate))


class _Constant(_Term):
    __slots__ = ("value",)
    structural = True
    value: bool

    def pick(self, locs: Sequence[Location], tree: PyTree, is_leaf: IsLeaf) -> list[bool]:
        return [self.value] * len(locs)

    def __repr__(self) -> str:
        return repr(self.value)


class _Joined(_Term):
    """Two selectors with an operator of sets between them."""

    __slots__ = ()
    left: Selector
    right: Selector
    sign: ClassVar[str]
    join: ClassVar[Callable[[Iterable[bool]], bool]]

    def terms(self) -> Iterator[Selector]:
        yield from self.left.terms()
        yield from self.right.terms()

    def is_structural(self) -> bool:
        return self.left.is_structural() and self.right.is_structural()

    def pick(self, locs: Sequence[Location], tree: PyTree, is_leaf: IsLeaf) -> list[bool]:
        left, right = (part.pick(locs, tree, is_leaf) for part in (self.left, self.right))
        return list(map(type(self).join, zip(left, right, strict=True)))

    def __repr__(self) -> str:
        return f"({self.left!r} {self.sign} {self.right!r})"


class _Both(_Joined):
    __slots__ = ("left", "right")
    sign = "&"
    join = all


class _Either(_Joined):
    __slots__ = ("left", "right")
    sign = "|"
    join = any


class _Without(_Term):
    __slots__ = ("inner",)
    inner: Selector

    def terms(self) -> Iterator[Selector]:
        yield from self.inner.terms()

    def is_structural(self) -> bool:
        return self.inner.is_structural()

    def pick(self, locs: Sequence[Location], tree: PyTree, is_leaf: IsLeaf) -> list[bool]:
        return [not a for a in self.inner.pick(locs, tree, is_leaf)]

    def __repr__(self) -> str:
        return f"~{self.inner!r}"


def ask(predicate: Any, leaves: Sequence[Any]) -> list[Any]:
    """Return the result of a predicate for each leaf.

    Raises:
        SpecError: if it was written for a tree, as for `tree_at`.
    """
    try:
        return [predicate(leaf) for leaf in leaves]
    except AttributeError as error:
        if isinstance(error, SpecError):
            raise
        named = f", {error.name!r}" if error.name else ""
        raise SpecError(
            f"predicate {getattr(predicate, '__qualname__', repr(predicate))}",
            "a function of one leaf that returns True or False",
            f"one that reads an attribute that a leaf lacks{named}",
            hint=["to select a node by access, write", "pm.select.at(lambda m: m.head)"],
        ) from error


def as_bool(value: Any, where: str) -> bool:
    """Return a predicate's result as a bool; tracers and non-bools are refused."""
    if isinstance(value, bool):
        return value
    # Not by `bool`: it would wait for an array, and hide a mistake for a number.
    traced = isinstance(value, Tracer)
    if not traced and getattr(value, "dtype", None) == np.bool_ and value.shape == ():
        return bool(value)
    got = "a traced array" if traced else describe(value)
    raise SpecError(where, "True or False for each leaf", got)


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
        return path_selector(spec)
    if isinstance(spec, bool | EllipsisType):
        return _Constant(spec is not False)
    # Before callables, because a class can be called.
    if isinstance(spec, type):
        return TypeSelector((spec,))
    refuse_model(spec, "selector")
    if callable(spec) and not isinstance(spec, Rule):
        return _Predicate(spec)
    hint = ["for example:", 'select.path("layers.*.weight")']
    if isinstance(spec, (tuple, list)):
        hint = ["combine several with |:", 'select.path("weight") | select.path("bias")']
    expected = "a selector, a class, a path, a bool or a predicate"
    raise SpecError("selector", expected, describe(spec), hint=hint)


def path_selector(pattern: str) -> PathSelector:
    """Return the selector of a path pattern."""
    return PathSelector(pattern, parse_pattern(pattern))
