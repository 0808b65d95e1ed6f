"""Warn about random streams that all members of a map draw from: they get the same numbers.

A State without a mapped axis means this, and users rarely want it: every example would have the
same dropout mask. A rule of `by` for the State says that it is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from pytreemod.errors import SharedStreamWarning, warn
from pytreemod.transform.arguments import Named
from pytreemod.tree.paths import path_text
from pytreemod.tree.prefixes import By
from pytreemod.tree.snapshots import AbstractState, is_state, states_in
from pytreemod.typing import AxesSpec, KeyPath, PyTree, jtu

Places: TypeAlias = dict[int, tuple[str, KeyPath]]
"""States in the arguments of a call, by their number: the argument, and the path in it."""


def unmapped_states(spec: AxesSpec, named: Named, axes: Sequence[int | None]) -> Places:
    """Return the States in some arguments that no axis maps."""
    if any(isinstance(part, By) for part in jtu.tree_leaves(spec, is_leaf=_is_by)):
        return {}
    rest, found = iter(axes), list[tuple[str, KeyPath, bool]]()
    for name, tree in named:
        for path, node in jtu.tree_leaves_with_path(tree, is_leaf=is_state):
            own = [next(rest) for _ in jtu.tree_leaves(node)]
            if is_state(node):
                found.append((name, path, not any(axis is not None for axis in own)))
    return {i: (name, path) for i, (name, path, is_shared) in enumerate(found) if is_shared}


def _is_by(node: Any) -> bool:
    return isinstance(node, By)


def warn_of_shared_streams(
    where: str, places: Places, before: Sequence[AbstractState], result: PyTree
) -> None:
    """Warn if one of the States before a call was drawn from, according to its successor.

    Args:
        where: the name of the transform.
        places: of those that are the same for all members, by their number.
        before: all States in the arguments.
        result: the result of the call.
    """
    after = states_in(result)
    at = [
        f"{path_text(path, argument)}[{name!r}]"
        for i, (argument, path) in places.items()
        for name in dict.fromkeys(n for new in after for n in before[i].__drawn__(new))
    ]
    if at:
        fact = f"{where}: all members draw the same random numbers"
        hint = "pm.by({pm.RngStream: 0, ...: None})  # with state.split(n)"
        warn(SharedStreamWarning, fact, at=at, hint=hint)
