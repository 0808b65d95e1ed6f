"""What of a call of an `Ensemble` is for each member, and what is for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.nn.calling import ABSENT, Absent
from pytreemod.state.values import State
from pytreemod.transform.boundary.argument_specs import Terms, specs_by_argument
from pytreemod.transform.boundary.wrapping import argument_name, positional_names
from pytreemod.transform.maps.vmap import axes_of
from pytreemod.tree.nodes import is_node
from pytreemod.tree.paths import path_text
from pytreemod.tree.prefixes import By
from pytreemod.typing import class_of, jtu


class Inputs:
    """The arguments of a call, State and key apart, with the axis of each array that has one.

    Args:
        title: the Ensemble, for errors.
        n: how many members there are.
        member: the members.
        args: the arguments by position; one may be a State.
        kwargs: those by name; `state` may be one.
        in_axes: which axis has an entry for each member: of all arguments by position, of each in
            a tuple, or of any in a dict by name. What is not named is for all members.

    Raises:
        ArgumentError: there are two States, or `in_axes` names what is no argument.
        ShapeError: an array has not the axis, or not an entry for each member.
        SpecError: `in_axes` does not fit the arguments.
    """

    def __init__(
        self, title: str, n: int, member: Any, args: Sequence[Any], kwargs: Any, in_axes: Any
    ):
        states = [x for x in (*args, kwargs.get("state")) if isinstance(x, State)]
        if len(states) > 1:
            raise ArgumentError(title, "one State", f"{len(states)} of them")
        self.state: State | Absent = states[0] if states else ABSENT
        # Further arguments may have tokens in them.
        self.rest = jtu.tree_map(_without_state, (tuple(args), kwargs), is_leaf=_is_state)
        self.leaves, self.treedef = jtu.tree_flatten(self.rest)
        axes: list[int | None] = [None] * len(self.leaves)
        if in_axes is not None:
            found = iter(_axes(title, n, member, args, kwargs, in_axes))
            axes = [None if leaf is _STATE else next(found) for leaf in self.leaves]
        self.mapped = [i for i, axis in enumerate(axes) if axis is not None]
        self.axes = [axis for axis in axes if axis is not None]

    def for_each(self) -> list[Any]:
        """The arrays that have an entry for each member."""
        return [self.leaves[i] for i in self.mapped]

    def for_one(self, mapped: Sequence[Any], state: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of one member.

        Args:
            mapped: its entries of the arrays that have one.
            state: its State, in the place of that which was given.
        """
        leaves = list(self.leaves)
        for i, value in zip(self.mapped, mapped, strict=True):
            leaves[i] = value
        args, kwargs = self.treedef.unflatten(leaves)
        return (
            tuple(state if x is _STATE else x for x in args),
            {name: state if x is _STATE else x for name, x in kwargs.items()},
        )


class _Place:
    """Where the State was given."""


_STATE: Any = _Place()


def _is_state(node: Any) -> bool:
    return isinstance(node, State)


def _without_state(node: Any) -> Any:
    return _STATE if isinstance(node, State) else node


def _stops(spec: Any) -> bool:
    is_axis = spec is None or (isinstance(spec, int) and not isinstance(spec, bool))
    return is_axis or isinstance(spec, (By, bool)) or (callable(spec) and not is_node(spec))


def _axes(
    title: str, n: int, member: Any, args: Sequence[Any], kwargs: dict[str, Any], in_axes: Any
) -> list[Any]:
    """The axis of each leaf of the arguments but the State; None for what is for all members."""
    where = f"{title}, in_axes"
    names = positional_names(member)
    positional = [(argument_name(names, i), x) for i, x in enumerate(args) if not _is_state(x)]
    named = [(name, kwargs[name]) for name in sorted(kwargs) if not _is_state(kwargs[name])]
    every = [*positional, *named]
    # One spec, or a tuple of them, speaks of what has a position, as for `jax.vmap`.
    asked = every if issubclass(class_of(in_axes), dict) else positional
    terms = Terms(where, _stops, None, "in_axes", "0", "is the same for all members")
    specs = specs_by_argument(
        in_axes, [name for name, _ in asked], len(positional), (), terms, [x for _, x in asked]
    )
    specs += [None] * (len(every) - len(asked))
    # One rule for several arguments need not find each of its paths in each of them.
    strict = True
    if isinstance(in_axes, By) and len(asked) > 1:
        in_axes.check([x for _, x in asked])
        strict = False
    rows = [
        (path_text(path, name), leaf, axis)
        for (name, tree), spec in zip(every, specs, strict=True)
        for (path, leaf), axis in zip(
            jtu.tree_leaves_with_path(tree),
            axes_of(spec, tree, f"{where} for {name}", name, strict),
            strict=True,
        )
    ]
    _check_sizes(title, n, rows)
    return [axis for _, _, axis in rows]


def _check_sizes(title: str, n: int, rows: Sequence[tuple[str, Any, Any]]) -> None:
    wrong = [
        f"{place}: {describe(leaf)}, axis {axis}"
        for place, leaf, axis in rows
        if axis is not None and not (-leaf.ndim <= axis < leaf.ndim and leaf.shape[axis] == n)
    ]
    if not wrong:
        return
    hint = ("One input for all members is passed without in_axes:", "nets(x)")
    expected = f"inputs with an entry for each of {n} members"
    raise ShapeError(title, expected, f"{len(wrong)} without", places=wrong, hint=hint)
