"""Effect tracking: which States are used up while a function runs inside a transform.

A State that was replaced has a successor. Unless the transform returns the successor, its values
are lost. So a transform tracks its effects while it runs a function: States record their changes,
and the transform looks at the record when the function has returned. Outside of transforms nothing
is tracked: there, a used State still exists, and refuses its next use.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from pytreemod.tree.snapshots import AbstractState
from pytreemod.typing import PyTree, jtu

# States by their id. Weakly, because States that inner transforms create must not outlive their
# trace; an id may therefore belong to a newer State.
_States = dict[int, weakref.ref[AbstractState]]


class Effects:
    """Records the changes of States in this thread, within `with Effects() as effects:`.

    Attributes:
        made: the States that were created.
        parts: those taken out of another State, which is not used up by that.
        captured: the States that were used up but not created here: arguments, or captured. In
            order of use.
        advanced: the identities of values that inner transforms changed, and of the values of parts
            that were used up.
        drawn: the random streams that were drawn from, by identity. False for streams that were
            given keys here: drawing from these does not affect the streams of the arguments.
    """

    __slots__ = ("captured", "changed", "drawn", "made", "parts")

    def __init__(self) -> None:
        self.made: _States = {}
        self.parts: _States = {}
        self.captured: list[AbstractState] = []
        self.changed: set[Any] = set()
        self.drawn: dict[Any, bool] = {}

    def __enter__(self) -> Effects:
        _trackers.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        stack = _trackers.stack
        stack.pop()
        if stack and self.drawn:
            outer = stack[-1].drawn
            outer.update({name: old and outer.get(name, True) for name, old in self.drawn.items()})

    def pass_on(self) -> None:
        """Pass the recorded changes on to the surrounding tracker, when this one has ended."""
        outer = outer_effects()
        if outer is not None:
            outer.changed |= self.changed
            for state in self.captured:
                outer.note_used(state)

    def note_used(self, state: AbstractState) -> None:
        """Note that a State was used up."""
        if _has(self.parts, state):
            # The State that contains it has not changed itself; only its values show the change.
            self.changed.update(state.__values__())
        elif not _has(self.made, state) and not any(known is state for known in self.captured):
            self.captured.append(state)


def _has(states: _States, state: AbstractState) -> bool:
    found = states.get(id(state))
    return found is not None and found() is state


class _Trackers(threading.local):
    """The trackers of each thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Effects] = []


_trackers = _Trackers()


def outer_effects() -> Effects | None:
    """Return the innermost tracker of this thread, or None."""
    stack = _trackers.stack
    return stack[-1] if stack else None


def note_made(state: AbstractState) -> None:
    """Record that a State was created."""
    # Outside of transforms nothing is tracked, and this check is the only cost.
    if _trackers.stack:
        _trackers.stack[-1].made[id(state)] = weakref.ref(state)


def note_part(state: AbstractState) -> None:
    """Record a State that is part of another one, to be put back into it."""
    if _trackers.stack:
        _trackers.stack[-1].parts[id(state)] = weakref.ref(state)


def note_used(state: AbstractState) -> None:
    """Record that a State was used up."""
    if _trackers.stack:
        _trackers.stack[-1].note_used(state)


def note_drawn(name: Any) -> None:
    """Record that a random stream was drawn from."""
    if _trackers.stack:
        _trackers.stack[-1].drawn.setdefault(name, True)


def note_keyed(names: Iterable[Any]) -> None:
    """Record that random streams were given keys."""
    if _trackers.stack:
        _trackers.stack[-1].drawn.update(dict.fromkeys(names, False))


def is_state(node: Any) -> bool:
    """Whether a node of a tree is a State."""
    return isinstance(node, AbstractState)


def states_in(tree: PyTree) -> list[AbstractState]:
    """Return the States in a tree, including those that were used up."""
    # Treat them as leaves: a used State refuses to be flattened.
    return [leaf for leaf in jtu.tree_leaves(tree, is_leaf=is_state) if is_state(leaf)]


def changed_values(old: AbstractState, new: AbstractState) -> set[Any]:
    """Return the identities of the values of `old` that are different in `new`."""
    before, after = old.__values__(), new.__values__()
    return {name for name in before if name in after and _differ(before[name], after[name])}


def _differ(old: PyTree, new: PyTree) -> bool:
    # By identity: traced values cannot be compared.
    before, after = jtu.tree_leaves(old), jtu.tree_leaves(new)
    return len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True))
