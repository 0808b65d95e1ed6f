"""Effect tracking: which States are used up while a function runs inside a transform.

A State that was replaced has a successor. Unless the transform returns the successor, its values
are lost. So a transform tracks its effects while it runs a function: States record their changes,
and the transform looks at the record when the function has returned. Outside of transforms nothing
is tracked: there, a used State still exists, and refuses its next use.

JAX caches the traces of inner functions, and a cached trace runs no code that could be tracked. So
its `TraceEffects` are stored with it, and recorded again whenever it is used: in the plan of its
result (see `boundary.packing`), or as `TracedSteps` where JAX does not return its plan.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

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
        divided: the random streams that a layer has divided between its members, which this tracks.
    """

    __slots__ = ("captured", "changed", "divided", "drawn", "made", "parts")

    def __init__(self) -> None:
        self.made: _States = {}
        self.parts: _States = {}
        self.captured: list[AbstractState] = []
        self.changed: set[Any] = set()
        self.drawn: dict[Any, bool] = {}
        self.divided: set[Any] = set()

    def __enter__(self) -> Effects:
        trackers.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        stack = trackers.stack
        stack.pop()
        if stack and self.drawn:
            stack[-1].add_drawn(self.drawn)

    def drawn_from_outside(self) -> dict[Any, bool]:
        """Return the streams that got no key here, each with whether members may share it."""
        return {name: name not in self.divided for name, is_old in self.drawn.items() if is_old}

    def add_drawn(self, drawn: Mapping[Any, bool]) -> None:
        """Record the streams that were drawn from inside; see `drawn`."""
        mine = self.drawn
        mine.update({name: is_old and mine.get(name, True) for name, is_old in drawn.items()})

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


class TraceEffects(NamedTuple):
    """The effects of one trace that code around it must know; see `Effects`."""

    changed: frozenset[Any]
    drawn: Mapping[Any, bool]

    @classmethod
    def of(cls, effects: Effects) -> TraceEffects | None:
        """Return those of a trace that has ended; None if it had none."""
        if not (effects.changed or effects.drawn):
            return None
        return cls(frozenset(effects.changed), dict(effects.drawn))

    def record(self) -> None:
        """Record them in the surrounding tracker, because a cached trace was used."""
        outer = outer_effects()
        if outer is not None:
            outer.changed |= self.changed
            outer.add_drawn(self.drawn)


class TracedSteps:
    """The effects of branches, or of the functions of a loop, by the shapes of their arrays.

    It is made, and cached, together with these functions. For a loop JAX returns no plan, and of
    several branches that of the first alone, although any of them may run.
    """

    __slots__ = ("by_shapes",)

    def __init__(self) -> None:
        self.by_shapes: dict[Any, list[TraceEffects]] = {}

    @contextmanager
    def tracing(self, *values: Sequence[Any]) -> Generator[None]:
        """Track one of the functions, which runs until the end.

        Args:
            *values: its arrays, in lists.
        """
        with Effects() as effects:
            yield
        effects.pass_on()
        found = TraceEffects.of(effects)
        if found is not None:
            every = self.by_shapes.setdefault(_shapes(values), [])
            if found not in every:
                every.append(found)

    def record(self, *values: Sequence[Any]) -> None:
        """Record the effects for arrays of these shapes, because JAX has used the traces."""
        if self.by_shapes and trackers.stack:
            for found in self.by_shapes.get(_shapes(values), ()):
                found.record()


def _shapes(values: Iterable[Sequence[Any]]) -> Any:
    return tuple(tuple(np.shape(x) for x in group) for group in values)


class _Trackers(threading.local):
    """The trackers of each thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Effects] = []


trackers = _Trackers()
"""The trackers of this thread: `trackers.stack` is empty outside of transforms."""


def outer_effects() -> Effects | None:
    """Return the innermost tracker of this thread, or None."""
    stack = trackers.stack
    return stack[-1] if stack else None


def note_made(state: AbstractState) -> None:
    """Record that a State was created."""
    # Outside of transforms nothing is tracked, and this check is the only cost.
    if trackers.stack:
        trackers.stack[-1].made[id(state)] = weakref.ref(state)


def note_part(state: AbstractState) -> None:
    """Record a State that is part of another one, to be put back into it."""
    if trackers.stack:
        trackers.stack[-1].parts[id(state)] = weakref.ref(state)


def note_used(state: AbstractState) -> None:
    """Record that a State was used up."""
    if trackers.stack:
        trackers.stack[-1].note_used(state)


def note_drawn(name: Any) -> None:
    """Record that a random stream was drawn from."""
    if trackers.stack:
        trackers.stack[-1].drawn.setdefault(name, True)


def note_divided(names: Iterable[Any]) -> None:
    """Record that random streams were divided between members, of which this is one."""
    if trackers.stack:
        trackers.stack[-1].divided.update(names)


def note_keyed(names: Iterable[Any]) -> None:
    """Record that random streams were given keys."""
    if trackers.stack:
        trackers.stack[-1].drawn.update(dict.fromkeys(names, False))


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
