"""The shared parts of an `Ensemble`: found by a selector, and stored once.

Shared arrays have no leading axis. The Ensemble stores the path of the highest node in which all
arrays are shared. So a new value for such a node is shared, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from pytreemod.errors import ArgumentError, SpecError, StateError, describe
from pytreemod.module.unfinished import by_trial, is_unfinished, refuse_unfinished
from pytreemod.nn.members.stacking import is_shared
from pytreemod.state.tokens import map_tokens, with_fields
from pytreemod.state.values import State
from pytreemod.tree.nodes import Location, found_in, locations
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.selecting import Selector, as_selector
from pytreemod.typing import KeyPath, class_of, jtu

WHERE = "Ensemble(shared)"


def own_paths(member: Any, shared: Sequence[str], root: str) -> tuple[str, ...]:
    """Return the paths, from a root, of the highest nodes in which nothing is shared."""
    if not shared:
        return (root,)
    paths = [path for path, _ in jtu.tree_leaves_with_path(member)]
    common = [path for path in paths if is_shared(path, shared)]
    own = dict.fromkeys(_highest(path, common) for path in paths if not is_shared(path, shared))
    return tuple(path_text(path, root) for path in own)


# ---- selection


class _Value:
    """Represents the value of a token, whether the token or a State has it."""


def shared_paths(member: Any, selector: Any) -> tuple[str, ...]:
    """Return the paths of the parts that a selector picks in a member.

    Args:
        member: a single member.
        selector: picks the shared parts; None for nothing.

    Returns:
        The paths of the highest nodes in which everything is shared.

    Raises:
        SpecError: if it is not a selector, or picks no array, or every array.
        StateError: if it picks a token.
        UnfinishedError: if it picks a part of a layer that lacks a size.
    """
    if selector is None:
        return ()
    highest = by_trial(member, lambda member: _highest_of(member, selector))
    for path, _ in found_in(member, is_unfinished):
        if any(at[: len(path)] == path != at for at in highest):
            refuse_unfinished(WHERE, member)
    return tuple(map(path_text, highest))


def _highest_of(member: Any, selector: Any) -> dict[KeyPath, None]:
    """Return the highest nodes in which a selector picks everything."""
    # Each token counts as one leaf, whether it has its value or not.
    probe = map_tokens(lambda token: with_fields(token, {"init": _Value()}), member)
    pairs = zip(locations(probe), _as_selector(selector).mask(probe), strict=True)
    # Only arrays can differ between members.
    rows = [(s, hit) for s, hit in pairs if is_array(s.leaf) or isinstance(s.leaf, _Value)]
    _refuse_tokens([loc.path for loc, hit in rows if hit and _is_of_state(loc)])
    picked = [loc.path for loc, hit in rows if hit]
    others = [loc.path for loc, hit in rows if not hit]
    if not picked or not others:
        _refuse_amount(selector, [path_text(loc.path) for loc, _ in rows], bool(picked))
    return dict.fromkeys(_highest(path, others) for path in picked)


def _as_selector(spec: Any) -> Selector:
    try:
        return as_selector(spec)
    except SpecError as error:
        hint = ("For example:", 'shared="encoder"')
        raise SpecError(WHERE, "a selector on a member", describe(spec), hint=hint) from error


def _is_of_state(loc: Location) -> bool:
    return isinstance(loc.leaf, _Value) or any(isinstance(node, State) for node in loc.nodes)


def _highest(path: tuple[Any, ...], others: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the shortest prefix of a path that is no prefix of the others."""
    starts = (path[:i] for i in range(1, len(path)))
    return next((s for s in starts if all(other[: len(s)] != s for other in others)), path)


# ---- refusals


def check_shared(where: str, shared: Any) -> tuple[str, ...]:
    """Accept a tuple of paths.

    Raises:
        ArgumentError: if it is something else, possibly from `replace`.
    """
    if type(shared) is tuple and all(isinstance(path, str) for path in shared):  # pyright: ignore[reportUnknownVariableType]  (a tuple of any type)
        return cast("tuple[str, ...]", shared)
    hint = (
        "Set it when you create the Ensemble:",
        "nn.Ensemble.from_members(nets.unstack(), shared=selector)",
    )
    raise ArgumentError(where, "a tuple of paths", describe(shared), hint=hint)


def refuse_own_state(member: Any) -> None:
    """Refuse a member that is called without State and returns itself.

    Raises:
        StateError: if the member is called in that way.
    """
    if not getattr(class_of(member), "__keeps_state__", False):
        return
    hint = (
        "Wrap the Ensemble, not its members:",
        "nets = pm.stateful(nn.Ensemble(make, n, key=key))",
    )
    expected = "members that take their State as an argument"
    raise StateError("Ensemble(make)", expected, describe(member), hint=hint)


def _refuse_tokens(found: Sequence[tuple[Any, ...]]) -> None:
    if not found:
        return
    # The last component is the value, which may be in a State now.
    names = dict.fromkeys(path_text(path[:-1]) for path in found)
    hint = (
        "Each member has its own State; share only the arrays:",
        "shared=selector & ~pm.select.type(pm.StateIndex, pm.RngStream)",
    )
    expected = "a selector of a part without State"
    raise StateError(WHERE, expected, "a part with State", at=names, hint=hint)


def _refuse_amount(selector: Any, every: Sequence[str], picked: bool) -> None:
    text = str(selector) if isinstance(selector, str) else describe(selector)
    if not picked:
        raise SpecError(
            WHERE, "a selector that picks some arrays of a member", f"{text}, which picks none"
        )
    hint = (
        "All members would be equal; exclude something:",
        f"shared=selector & ~pm.select.path({every[-1]!r})",
    )
    expected = "a selector that leaves some arrays to each member"
    raise SpecError(WHERE, expected, f"{text}, which picks all of them", hint=hint)
