"""Warn about a State that a function inside a transform used up, and did not return.

The transform gives the function its own State, made from arrays, so nothing outside would show the
loss. A State knows which of its values were replaced; its successor has the same tokens. If the
function around an inner transform drops what that returns, its State has a copy that was replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytreemod.errors import LostUpdateWarning, StateError, warn
from pytreemod.transform.arguments import Parameters, function_name
from pytreemod.tree.nodes import locations
from pytreemod.tree.paths import path_text
from pytreemod.tree.snapshots import is_state, states_in
from pytreemod.typing import PyTree


def warn_of_lost_updates(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    result: PyTree,
    around: PyTree,
) -> None:
    """Warn if values of a State in the arguments were replaced, and the result has no successor.

    Args:
        fn: the function.
        args: its arguments.
        kwargs: those by keyword.
        result: its result.
        around: the arguments of the function that has called the transform.

    Raises:
        StateError: if the State belongs to a net, whose callers need not know about State.
    """
    after, dropped = states_in(result), set[int]()
    for old in states_in((fn, args, kwargs)):
        lost = old.__replaced__()
        if any(lost & new.__values__().keys() for new in after if new is not old):
            # Now it is the function around that may drop it. Otherwise one warning is enough.
            for outer in states_in(around):
                outer.__note_copy__(old)
        elif lost:
            dropped.add(id(old))
    if not dropped:
        return
    named = [(function_name(fn), fn), *Parameters.of(fn).named(args, kwargs)]
    for name, place in [
        (name, place) for name, tree in named for place in locations(tree, is_state)
    ]:
        if id(place.leaf) not in dropped:
            continue
        at = [path_text(place.path, name)]
        if any(getattr(node, "__keeps_state__", False) for node in place.nodes):
            fact = "a call has changed the net, which is not returned"
            raise StateError(f"{function_name(fn)}: {fact}", at=at, hint="return out, net")
        fact = f"{function_name(fn)}: a State was used up, and the new one is not returned"
        warn(LostUpdateWarning, fact, at=at, hint="return y, state")
