"""Effect tracking: which States are used up while a function runs inside a transform.

A State that was replaced has a successor, and the values of the successor are lost if it does not
come out of the transform. So a transform that runs a function tracks its effects: States record
what happens to them, and the transform looks once the function has returned. Outside of transforms
nothing is tracked: a State that was used up is still there to refuse its next use.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from pytreemod.tree.snapshots import AbstractState
from pytreemod.typing import PyTree, jtu

# States by their id. Weakly: transforms inside make some of what they trace, which must not
# outlive its trace; another one may be found then where one was.
_States = dict[int, weakref.ref[AbstractState]]


class Effects:
    """What happens to States in this thread, from `with Effects() as effects:` to the end of that.

    Attributes:
        made: the States that were made meanwhile.
        parts: those of them that were taken out of another one, which stays as it is.
        captured: those that were used up, but not made here: arguments, or taken from outside. In
            the order in which they were used.
        advanced: by what each is recognized, the values that came out of transforms inside as
            others than they went in, and those of parts that were used up.
        drawn: by the same, the random streams that were drawn from; False for those that were given
            keys here, so that what is drawn from them says nothing of the streams that came in.
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
        """Afterwards: pass what happened on to the tracker around this one."""
        outer = outer_effects()
        if outer is not None:
            outer.changed |= self.changed
            for state in self.captured:
                outer.note_used(state)

    def note_used(self, state: AbstractState) -> None:
        """A State was used up."""
        if _has(self.parts, state):
            # The whole that it was taken from stays as it was; only its values show it.
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
    """The innermost tracker of this thread, if there is one."""
    stack = _trackers.stack
    return stack[-1] if stack else None


def note_made(state: AbstractState) -> None:
    """Record a State that was made."""
    # Outside of transforms nothing is tracked, and this one look is all that it costs.
    if _trackers.stack:
        _trackers.stack[-1].made[id(state)] = weakref.ref(state)


def note_part(state: AbstractState) -> None:
    """Record a State that is a part of another one, into which it has to be put back."""
    if _trackers.stack:
        _trackers.stack[-1].parts[id(state)] = weakref.ref(state)


def note_used(state: AbstractState) -> None:
    """Record a State that was used up."""
    if _trackers.stack:
        _trackers.stack[-1].note_used(state)


def note_drawn(name: Any) -> None:
    """Record a random stream that was drawn from."""
    if _trackers.stack:
        _trackers.stack[-1].drawn.setdefault(name, True)


def note_keyed(names: Iterable[Any]) -> None:
    """Record random streams that were given keys."""
    if _trackers.stack:
        _trackers.stack[-1].drawn.update(dict.fromkeys(names, False))


def is_state(node: Any) -> bool:
    """Whether a node of a tree is a State."""
    return isinstance(node, AbstractState)


def states_in(tree: PyTree) -> list[AbstractState]:
    """The States in a tree, those included that were used up."""
    # As leaves: one that was used up refuses to be flattened.
    return [leaf for leaf in jtu.tree_leaves(tree, is_leaf=is_state) if is_state(leaf)]


def changed_values(old: AbstractState, new: AbstractState) -> set[Any]:
    """Which values of `old` are others in `new`, by what they are recognized by."""
    before, after = old.__values__(), new.__values__()
    return {name for name in before if name in after and _differ(before[name], after[name])}


def _differ(old: PyTree, new: PyTree) -> bool:
    # By identity: traced values cannot be compared.
    before, after = jtu.tree_leaves(old), jtu.tree_leaves(new)
    return len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True))
