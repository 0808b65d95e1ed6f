"""Optax transformations over layers: chained, mapped, or applied to a list of layers.

Each form is a transformation itself.
"""

from __future__ import annotations

import functools as ft
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from pytreemod.training.layered.lists import as_one, listed, only
from pytreemod.tree.members import without_axes
from pytreemod.typing import PyTree, jtu


class ChainedRule:
    """Transformations applied in turn, each in its own form."""

    def __init__(self, rules: Sequence[Any]):
        self.rules = rules

    def init(self, params: PyTree) -> Any:
        """Return the state."""
        return tuple(rule.init(params) for rule in self.rules)

    def update(self, updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Any:
        """Return the updates, and the new state."""
        news: list[Any] = []
        for rule, own in zip(self.rules, state, strict=True):
            updates, new = rule.update(updates, own, params, **extra)
            news.append(new)
        return updates, tuple(news)


class ListedRule:
    """A transformation that gets a list of layers, or for each leaf a list of its rows."""

    def __init__(self, rule: Any, by_leaf: bool = False):
        self.rule = rule
        self._listed = ft.partial(listed, by_leaf=by_leaf)

    def init(self, params: PyTree) -> Any:
        """Return the state."""
        shown = self._listed(params)
        with without_axes("all"):
            state = self.rule.init(shown)
        return as_one(state)

    def update(self, updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Any:
        """Return the updates, and the new state."""
        axis = _extra_axes(updates, params)
        extra = {name: self._extra(value, updates) for name, value in extra.items()}
        shown = None if params is None else self._listed(params)
        given, own = self._listed(updates, axis), self._listed(state)
        with without_axes("all"):
            made, new = self.rule.update(given, own, shown, **extra)
        return as_one(made), as_one(new)

    def _extra(self, value: Any, updates: PyTree) -> Any:
        if not _is_function(value, updates):
            return self._listed(value)

        @ft.wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            # The function knows the model, and no lists.
            with without_axes(None):
                return self._listed(value(*as_one(args), **as_one(kwargs)))

        return call


def _is_function(value: Any, updates: PyTree) -> bool:
    # The gradients of a callable model are callable, too.
    return callable(value) and jtu.tree_structure(value) != jtu.tree_structure(updates)


def _extra_axes(updates: PyTree, params: PyTree) -> int:
    """Return the number of axes that gradients have in addition: of examples, which come first."""
    pairs = zip(jtu.tree_leaves(updates), jtu.tree_leaves(params), strict=False)
    return max((jnp.ndim(one) - jnp.ndim(two) for one, two in pairs), default=0)


class RulePart(NamedTuple):
    """Leaves with the same axes, over which a transformation is mapped at once.

    Attributes:
        own: the numbers of the leaves.
        axes: the number of axes that are mapped over.
        axes_of_state: the same for each leaf of the state of these leaves.
        paths: of the leaves of the state.
        structure: of the state.
        rule: the transformation under the map.
        left_out: the axes that the map removes: those of `"members"`, or `"all"`.
    """

    own: tuple[int, ...]
    axes: int
    axes_of_state: tuple[int, ...]
    paths: tuple[Any, ...]
    structure: Any
    rule: Any
    left_out: Any

    def init(self, params: PyTree) -> list[Any]:
        """Return the state."""

        def make(params: PyTree) -> Any:
            with without_axes(self.left_out):
                return jtu.tree_leaves(self.rule.init(params))

        return self._mapped(make, [0], self._axes)(only(params, self.own))

    def update(self, updates: Any, state: Any, params: Any, extra: dict[str, Any]) -> Any:
        """Return the updates of its leaves, and the leaves of its state."""
        given = only(updates, self.own)
        shown = None if params is None else only(params, self.own)
        structure = jtu.tree_structure(given)
        whole = jtu.tree_structure(updates)
        like = [name for name, value in extra.items() if jtu.tree_structure(value) == whole]
        held = {name: only(extra[name], self.own) for name in like}
        others = {
            name: _uncallable(name, value) if _is_function(value, updates) else value
            for name, value in extra.items()
            if name not in held
        }

        def run(given: PyTree, state: list[Any], shown: PyTree, held: dict[str, Any]) -> Any:
            with without_axes(self.left_out):
                old = self.structure.unflatten(state)
                made, new = self.rule.update(given, old, shown, **others, **held)
            return structure.flatten_up_to(made), jtu.tree_leaves(new)

        # For gradients of each example, the first axis is that of examples.
        ins = [_extra_axes(given, shown), self._axes, 0, 0]
        return self._mapped(run, ins, (0, self._axes))(given, state, shown, held)

    @property
    def _axes(self) -> list[int | None]:
        return [0 if axes else None for axes in self.axes_of_state]

    def _mapped(self, fn: Any, ins: Sequence[Any], outs: Any) -> Any:
        for _ in range(self.axes):
            fn = jax.vmap(fn, in_axes=tuple(ins), out_axes=outs)
        return fn


def _uncallable(name: str, value: Any) -> Any:
    """Replaces a function of the model, which does not apply to one layer or member."""

    @ft.wraps(value)
    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"{name} is a function of the whole model")

    return call


class _PartedRule(ABC):
    """A transformation for each of several groups of leaves."""

    def __init__(self, parts: Sequence[RulePart]):
        self.parts = parts

    def init(self, params: PyTree) -> Any:
        """Return the state."""
        return self.together([part.init(params) for part in self.parts])

    def update(self, updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Any:
        """Return the updates, and the new state."""
        leaves, structure = jtu.tree_flatten(updates)
        news: list[Any] = []
        for part, own in zip(self.parts, self.apart(state), strict=True):
            made, new = part.update(updates, own, params, extra)
            news.append(new)
            for i, update in zip(part.own, made, strict=True):
                leaves[i] = update
        return structure.unflatten(leaves), self.together(news)

    @abstractmethod
    def apart(self, state: Any) -> list[list[Any]]:
        """Return the leaves of the state of each part."""

    @abstractmethod
    def together(self, news: list[list[Any]]) -> Any:
        """Return the state, from the leaves of that of each part."""


class MappedRule(_PartedRule):
    """A transformation that is mapped over layers: once for all leaves with the same axes."""

    def __init__(self, parts: Sequence[RulePart], structure: Any, paths: Sequence[Any]):
        super().__init__(parts)
        self.structure = structure
        self.paths = paths

    def apart(self, state: Any) -> list[list[Any]]:
        """Return the leaves by their paths."""
        leaves = dict(zip(self.paths, jtu.tree_leaves(state), strict=True))
        return [[leaves[path] for path in part.paths] for part in self.parts]

    def together(self, news: list[list[Any]]) -> Any:
        """The state; values common to all leaves, such as a count, are those of the first part."""
        found: dict[Any, Any] = {}
        for part, new in zip(self.parts, news, strict=True):
            found = dict(zip(part.paths, new, strict=True)) | found
        return self.structure.unflatten([found[path] for path in self.paths])


class GroupedRule(_PartedRule):
    """A transformation for each group of leaves: mapped for members; called once for the others."""

    def apart(self, state: Any) -> list[list[Any]]:
        """Return one state for each part; not a tuple if there is only one part."""
        return [jtu.tree_leaves(own) for own in ((state,) if len(self.parts) == 1 else state)]

    def together(self, news: list[list[Any]]) -> Any:
        """Return the states of the parts."""
        pairs = zip(self.parts, news, strict=True)
        made = tuple(part.structure.unflatten(new) for part, new in pairs)
        return made[0] if len(made) == 1 else made
