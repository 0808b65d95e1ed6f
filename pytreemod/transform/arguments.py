"""The arguments of a call: their names, their positions, and a spec for each of them.

A user gives one spec for all arguments, a tuple with one for each, or a dict by argument name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

from pytreemod.errors import ArgumentError, SpecError, describe, nearest
from pytreemod.tree.nodes import children_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.prefixes import By, spread
from pytreemod.tree.selecting import refuse_unmatched
from pytreemod.typing import PyTree, class_of, jtu

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Parameters(NamedTuple):
    """The parameters of a callable, as far as Python knows them.

    Attributes:
        names: of those that may be passed by position, in order.
        places: the keyword of each of these; None if it has none.
        every: the names of all parameters.
        is_open: whether there may be others: by `**kwargs`, or because Python knows none.
    """

    names: tuple[str, ...]
    places: tuple[str | None, ...]
    every: tuple[str, ...]
    is_open: bool

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Parameters:
        """Return the parameters of a callable."""
        try:
            found = [*inspect.signature(fn).parameters.values()]
        except (TypeError, ValueError):
            return cls((), (), (), True)
        placed = [p for p in found if p.kind in _BY_POSITION]
        places = [p.name if p.kind is _BY_POSITION[1] else None for p in placed]
        names, every = (tuple(p.name for p in some) for some in (placed, found))
        is_open = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found)
        return cls(names, tuple(places), every, is_open)

    def place(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move arguments passed by keyword to their positions, up to the first gap."""
        if not kwargs:
            return args, kwargs
        placed, rest = [*args], dict(kwargs)
        for name in self.places[len(args) :]:
            if name is None or name not in rest:
                break
            placed.append(rest.pop(name))
        return tuple(placed), rest

    def named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """Return the arguments of a call with their names; keywords are last, and sorted."""
        pairs = [(self.name(i), value) for i, value in enumerate(args)]
        return [*pairs, *((name, kwargs[name]) for name in sorted(kwargs))]

    def name(self, index: int) -> str:
        """Return the name of the argument at a position."""
        return self.names[index] if index < len(self.names) else f"args[{index}]"


def function_name(fn: Any) -> str:
    """Return the name of a function in errors, or in a compiled program."""
    return getattr(fn, "__name__", None) or type(fn).__name__


Named: TypeAlias = Sequence[tuple[str, PyTree]]
"""The arguments of a call with their names, the positional ones first."""


class Specs(NamedTuple):
    """One kind of specs: what each leaf of a tree gets, such as an axis or a sharding.

    Attributes:
        stops: whether a node of a spec is a leaf of it.
        asked: what a leaf of a tree gets from a leaf of a spec.
        fits: whether it may get that.
        counts: which leaves of a tree get anything; others get None.
        what: what each gets, in errors.
    """

    stops: Callable[[Any], bool]
    asked: Callable[[Any, Any], Any]
    fits: Callable[[Any], bool]
    counts: Callable[[Any], bool]
    what: str

    def of_leaves(
        self, spec: Any, tree: PyTree, where: str, root: str, strict: bool = True
    ) -> list[Any]:
        """Return what each leaf of a tree gets.

        Args:
            spec: a prefix of the tree.
            tree: the tree.
            where: the name of the spec in errors.
            root: the name of the tree in errors.
            strict: whether a path in a rule that matches nothing is an error.

        Raises:
            SpecError: if the spec is no prefix, or has a value of another kind.
        """

        def resolve(value: Any, subtree: PyTree, path: tuple[Any, ...]) -> list[Any]:
            leaves = jtu.tree_leaves(subtree)
            values: list[Any] = [value] * len(leaves)
            if isinstance(value, By):
                values = value.values(subtree, root=path_text(path, root), strict=strict)
            values = list(map(self.asked, values, leaves))
            for each in values:
                if not self.fits(each):
                    fact = f"{where}: {describe(each)} is no {self.what}"
                    raise SpecError(fact, at=[path_text(path, root)])
            return [v if self.counts(x) else None for v, x in zip(values, leaves, strict=True)]

        return spread(spec, tree, resolve, self.stops, where, root=root)

    def by_argument(
        self,
        spec: Any,
        named: Named,
        positional: int,
        known: Collection[str],
        where: str,
        default: Any = None,
    ) -> list[list[Any]]:
        """Return what each leaf of each argument of a call gets.

        Args:
            spec: one for all, a tuple with one for each positional argument, or a dict by name.
            named: the arguments, the positional ones first.
            positional: the number of these.
            known: names of parameters that the call may omit.
            where: the name of the spec in errors.
            default: the spec of an argument that the tuple or the dict leaves out.

        Raises:
            ArgumentError: if a name in the dict is not an argument.
            SpecError: if the spec does not fit the arguments.
        """
        # Of one rule for several arguments, a path need not match in each.
        strict = not isinstance(spec, By) or len(named) == 1
        if not strict:
            refuse_unmatched(spec.selectors, [tree for _, tree in named])
        specs = self._each(spec, named, positional, known, where, default)
        return [
            self.of_leaves(own, tree, f"{where} for {name}", name, strict)
            for own, (name, tree) in zip(specs, named, strict=True)
        ]

    def _each(
        self, spec: Any, named: Named, positional: int, known: Any, where: str, default: Any
    ) -> list[Any]:
        """Return one spec for each argument of a call."""
        names = [name for name, _ in named]
        by_name: Any = spec
        if class_of(spec) is dict and all(type(name) is str for name in by_name):
            unknown = [name for name in by_name if name not in names and name not in known]
            if not unknown:
                return [by_name.get(name, default) for name in names]
            # The spec of an only argument, a dict, may be a dict with its keys.
            if len(named) != 1 or type(named[0][1]) is not dict:
                got = ", ".join(f"{name!r}{nearest(name, names)}" for name in unknown)
                raise ArgumentError(f"{where}: the call has no argument {got}")
            return [spec]
        is_sequence = class_of(spec) in (tuple, list)
        if is_sequence and len(spec) == positional:
            return [*spec, *[default] * (len(named) - positional)]
        if self.stops(spec) or children_of(spec) is None:
            return [spec] * len(named)
        # A tree of specs, which for several arguments would be a guess.
        if len(named) == 1 and not (is_sequence and children_of(named[0][1]) is None):
            return [spec]
        if is_sequence:
            expected = f"one spec for each of {positional} positional arguments"
            raise SpecError(where, expected, str(len(spec)))
        raise SpecError(
            f"{where}: a tree of specs is for one argument, and the call has {len(named)}"
        )
