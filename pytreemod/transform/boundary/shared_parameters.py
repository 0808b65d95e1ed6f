"""Warn about a parameter at two paths of a model when training starts.

The differentiated leaves are searched for identical objects. Under `filter_jit` the leaves are
separate tracers, so the first call of the compiled function records which of them alias one array.
Only differentiated leaves are reported. Passing a model and its moving average is no mistake, and
both are the same model at first.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from pytreemod.errors import SharedParameterWarning, describe, warn
from pytreemod.tree.nodes import Location
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.sharing import places_of_shared
from pytreemod.typing import PyTree, jtu

Aliases = tuple[tuple[int, ...], ...]
"""Groups of positions in a list of arrays."""


class _Known(threading.local):
    """The identities of arrays, for tracers of this thread that alias others."""

    def __init__(self) -> None:
        self.identities: dict[int, int] = {}


_known = _Known()


def _identity(leaf: Any) -> int:
    return _known.identities.get(id(leaf), id(leaf))


def aliases_among(tree: PyTree) -> Aliases:
    """Find the arrays of a tree that are one parameter at several paths."""
    leaves = [leaf for leaf in jtu.tree_leaves(tree) if is_array(leaf)]
    # By identity, without paths, because most models share nothing.
    if not has_twice(leaves):
        return ()
    groups = _groups(tree, [is_array(x) for x in jtu.tree_leaves(tree)])
    # Inside another trace, two tracers may be one array, as recorded there.
    shared = {_identity(group[0].leaf) for group in groups}
    positions: dict[int, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if _identity(leaf) in shared:
            positions.setdefault(_identity(leaf), []).append(i)
    return tuple(map(tuple, positions.values()))


@contextmanager
def knowing(aliases: Aliases, values: Sequence[Any]) -> Generator[None]:
    """Record, while a function is traced, which of its tracers alias one array.

    Args:
        aliases: the groups.
        values: the tracers.
    """
    before = _known.identities
    if aliases:
        pairs = {id(values[i]): id(values[group[0]]) for group in aliases for i in group}
        # A new dict, because the old one is restored when this trace is done.
        _known.identities = {**before, **pairs}
    try:
        yield
    finally:
        _known.identities = before


def has_twice(leaves: Iterable[Any]) -> bool:
    """Whether one of these leaves appears twice; if none does, there is nothing to report."""
    identities = [_identity(leaf) for leaf in leaves]
    return len(set(identities)) < len(identities)


def warn_of_shared(where: str, root: str, tree: PyTree, mask: Sequence[bool]) -> None:
    """Warn if a parameter to be trained is at two paths of a tree.

    Args:
        where: the name of the caller.
        root: the name of the tree.
        tree: the model.
        mask: whether each leaf is trained.
    """
    leaves = jtu.tree_leaves(tree)
    # Each trace runs this, so it must be fast if nothing is shared.
    if not has_twice(leaf for leaf, m in zip(leaves, mask, strict=True) if m):
        return
    groups = _groups(tree, mask)
    if not groups:
        return
    locs = [
        " and ".join(path_text(place.path, root) for place in group)
        + f": {describe(group[0].leaf)}"
        for group in groups
    ]
    name = root.lstrip(".") or "model"
    ties = [
        f"{name} = pm.tie({name}, {path_text(place.path)!r}, to={path_text(group[0].path)!r})"
        for group in groups
        for place in group[1:]
    ]
    warn(
        SharedParameterWarning,
        f"{where}: {'a parameter is' if len(groups) == 1 else f'{len(groups)} parameters are'} "
        "at several paths, and would be trained as several",
        at=locs,
        hint=ties[0],
    )


def _groups(tree: PyTree, mask: Sequence[bool]) -> list[list[Location]]:
    return places_of_shared(tree, mask, _identity, set(_known.identities.values()))
