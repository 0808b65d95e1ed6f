"""Updates that do not come out of a transform.

A function inside a transform gets a State of its own, made from the arrays that the transform hands
it. If it uses that State up, and what follows from it is not in its result, the update is lost, and
nothing would show it: the caller's State is as good as before. So a function inside a transform is
watched (see `tree.effects`) while it is traced. What is used up there and came in from outside
must have a successor in the result: a warning, with the path of the State. A net is refused: it
promises that its callers need not think of State.

An update may also be lost further out: the inner transform hands the successor out, and the
function around it drops it. So what has advanced inside is reported to the tracker outside, where
an argument that holds the same values must not be left behind.

All of this happens while a function is traced, and never in a call of what was compiled.
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


def tell_lost_updates(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    result: Any,
    effects: Effects,
) -> None:
    """Warn of lost updates of States, and report all updates to the tracker outside.

    Args:
        fn: a function that was called inside a transform.
        args: its arguments.
        kwargs: its arguments by keyword.
        result: what it returned.
        effects: what happened meanwhile.

    Warns:
        LostUpdateWarning: a State was used up, and nothing that follows from it comes out.

    Raises:
        StateError: a net among the arguments was changed by a call, and does not come out.
    """
    after = states_in(result)
    # In the order in which they were used, which is the order of the warnings.
    lost = [old for old in effects.captured if not _is_followed(old, after)]
    # What an argument held may have moved on inside of a transform, whether the argument was used
    # up here (and what follows from it lacks that) or not.
    reported = {id(old) for old in lost}
    given = [old for old in states_in((fn, tuple(args), kwargs)) if id(old) not in reported]
    lost += [old for old in given if _is_left_behind(old, after, effects.changed)]
    for old in lost:
        _tell(fn, args, kwargs, old)
    # After the warnings: a function further out may drop what has come out of this one. The
    # transform around makes states of its own, too: markers are what they have in common.
    for old in effects.captured:
        effects.changed.update(*(changed_values(old, new) for new in after))
    effects.pass_on()


def _is_followed(old: AbstractState, after: Iterable[AbstractState]) -> bool:
    """Whether a state that was used up has a successor, which may be a part of it."""
    names = old.__values__().keys()
    # A state without values has nothing to lose.
    return not names or any(names & new.__values__().keys() for new in after)


def _is_left_behind(old: AbstractState, after: Iterable[AbstractState], names: set[Any]) -> bool:
    """Whether values have advanced, and come out as they came in, or not at all."""
    return bool(names & old.__values__().keys()) and not any(
        names & changed_values(old, new) for new in after
    )


def _tell(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], old: AbstractState
) -> None:
    found = _found(fn, args, kwargs, old)
    name = function_name(fn)
    if found.is_net:
        hint = [
            "return it beside the result (with has_aux=True, where that is a loss):",
            "out, net = net(x)",
            "return out, net",
        ]
        raise StateError(
            name,
            "the net to come out, for a call has changed it",
            "a result without it",
            places=found.places,
            hint=hint,
        )
    hint = [
        "return it beside the result (with has_aux=True, where that is a loss):",
        "y, state = model(x, state)",
        "return y, state",
    ]
    warn(
        LostUpdateWarning,
        name,
        "the State that replaces the one that was used up",
        "a result without it",
        places=found.places,
        hint=hint,
    )


class _Found(NamedTuple):
    places: list[str]
    is_net: bool


def _found(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], old: AbstractState
) -> _Found:
    """Where a state is among the arguments of a call, and whether it is that of a net."""
    names = positional_names(fn)
    named = [(function_name(fn), fn), *((argument_name(names, i), x) for i, x in enumerate(args))]
    for root, tree in [*named, *kwargs.items()]:
        for place in locations(tree, is_state):
            if place.leaf is old:
                # A net promises that its callers need not think of State, so a warning is not
                # enough.
                is_net = any(getattr(n, "__keeps_state__", False) for n in place.nodes)
                return _Found([path_text(place.path, root)], is_net)
    return _Found(["a State that the function takes from outside"], False)
