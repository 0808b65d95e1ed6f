"""Warn about updates that a transform does not return.

A function inside a transform gets its own State, made from the transform's arrays. If it uses up
that State, and its result has no successor, the update is lost. Nothing would show this, because
the caller's State is unchanged. So a function inside a transform is watched (see `tree.effects`)
while it is traced. Every State from outside that is used up there must have a successor in the
result. If not, a warning names its path. A net is refused, because it promises that its callers
need not know about State.

An update may also be lost further out: the inner transform returns the successor, and the function
around it drops it. So inner changes are reported to the outer tracker, where an argument with the
same values must have a successor, too.

All of this happens while a function is traced, and never in a compiled call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pytreemod.errors import LostUpdateWarning, StateError, warn
from pytreemod.transform.boundary.signatures import positional_names
from pytreemod.transform.boundary.wrapping import argument_name, function_name
from pytreemod.tree.effects import (
    Effects,
    changed_values,
    is_state,
    states_in,
)
from pytreemod.tree.nodes import locations
from pytreemod.tree.paths import path_text
from pytreemod.tree.snapshots import AbstractState


def report_lost_updates(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    result: Any,
    effects: Effects,
) -> None:
    """Warn about lost updates of States, and report all updates to the outer tracker.

    Args:
        fn: a function that was called inside a transform.
        args: its arguments.
        kwargs: its arguments by keyword.
        result: its result.
        effects: the effects recorded in the call.

    Warns:
        LostUpdateWarning: if a State was used up, and the result has no successor.

    Raises:
        StateError: if a call changed a net in the arguments, and the result has no successor.
    """
    after = states_in(result)
    # In the order of use, which is the order of the warnings.
    lost = [old for old in effects.captured if not _is_followed(old, after)]
    # An inner transform may have changed the values of an argument. Its successor here may lack
    # that change, whether or not the argument was used up.
    reported = {id(old) for old in lost}
    given = [old for old in states_in((fn, tuple(args), kwargs)) if id(old) not in reported]
    lost += [old for old in given if _is_left_behind(old, after, effects.changed)]
    for old in lost:
        _report(fn, args, kwargs, old)
    # After the warnings, because an outer function may drop this function's result. The surrounding
    # transform makes its own states, too; they share the markers.
    for old in effects.captured:
        effects.changed.update(*(changed_values(old, new) for new in after))
    effects.pass_on()


def _is_followed(old: AbstractState, after: Iterable[AbstractState]) -> bool:
    """Whether a used state has a successor, which may be a part of it."""
    names = old.__values__().keys()
    # A state without values has nothing to lose.
    return not names or any(names & new.__values__().keys() for new in after)


def _is_left_behind(old: AbstractState, after: Iterable[AbstractState], names: set[Any]) -> bool:
    """Whether values have changed, but are returned unchanged, or not at all."""
    return bool(names & old.__values__().keys()) and not any(
        names & changed_values(old, new) for new in after
    )


def _report(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], old: AbstractState
) -> None:
    found = _found(fn, args, kwargs, old)
    name = function_name(fn)
    if found.is_net:
        raise StateError(
            f"{name}: a call has changed the net, which is not returned",
            at=found.places,
            hint="return out, net",
        )
    warn(
        LostUpdateWarning,
        f"{name}: a State was used up, and the new one is not returned",
        at=found.places,
        hint="return y, state",
    )


class _Found(NamedTuple):
    places: list[str]
    is_net: bool


def _found(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], old: AbstractState
) -> _Found:
    """Return the path of a state among the arguments of a call, and whether it belongs to a net."""
    names = positional_names(fn)
    named = [(function_name(fn), fn), *((argument_name(names, i), x) for i, x in enumerate(args))]
    for root, tree in [*named, *kwargs.items()]:
        for place in locations(tree, is_state):
            if place.leaf is old:
                # A net promises that its callers need not know about State, so a warning is not
                # enough.
                is_net = any(getattr(n, "__keeps_state__", False) for n in place.nodes)
                return _Found([path_text(place.path, root)], is_net)
    return _Found(["a State from outside the function"], False)
