"""What a call returned for a state that it was given: whether anybody goes on with it.

Whoever calls a compiled function with a State has both afterwards, the old one and its successor.
What came out has a snapshot that notes when it is read or passed on; the old one's notes which
function has had it, and what came out then. And a record that is pending can be used up with the
states that it will hold, without building it.

All of this is done in each call of such a function, so that it has to be quick: snapshots become
tracked ones by changing their class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pytreemod.tree.nodes import record_of
from pytreemod.tree.pending import source_of
from pytreemod.tree.snapshots import AbstractState, Snapshot, reached
from pytreemod.typing import class_of, jtu


class Delivery:
    """What came out of a call for one state."""

    is_taken = False
    """Whether anybody has read it, or passed it on."""


class Tracked(Snapshot):
    """The snapshot of what was passed to a call, or came out of one."""

    __slots__ = ()

    delivery: Delivery | None
    """What it came out as."""

    passed: dict[Any, Delivery | None] | None
    """What came out when it was passed, by where; None once a warning said so."""

    spent: list[tuple[tuple[Any, ...], str]] | None
    """The paths of the states that are used up when the record is built, and by what."""

    def take(self) -> bool:
        """Note that it is read or passed on, and say if it may be."""
        if self.delivery is not None:
            self.delivery.is_taken = True
        return self.spent is None

    def fill_in(self, node: Any) -> None:
        """Build the record's fields, and use up what was used up before."""
        self.take()
        super().fill_in(node)
        for path, by in self.spent or ():
            _use_up(reached(node, path), by)


class Way(NamedTuple):
    """How to come to a state."""

    steps: tuple[Any, ...]
    """Through tuples, lists and dicts."""

    rest: tuple[Any, ...]
    """The path that is left, which begins with a record or another node."""


def way_to(tree: Any, path: tuple[Any, ...], state: AbstractState) -> Way | None:
    """The way to a state in a tree; None if Python cannot go it, for a node of a user's class."""
    node: Any = tree
    steps: list[Any] = []
    for key in path:
        if class_of(node) not in (tuple, list, dict):
            break
        steps.append(key.idx if isinstance(key, jtu.SequenceKey) else key.key)
        node = node[steps[-1]]
    rest = path[len(steps) :]
    try:
        is_there = reached(node, rest) is state
    except (AttributeError, LookupError, TypeError):
        return None
    return Way(tuple(steps), rest) if is_there else None


def use_up(tree: Any, way: Way, by: str) -> None:
    """Use a state up: now, or when the record that holds it is built."""
    node, rest, cached = _found(tree, way)
    if not rest:
        _use_up(node, by)
    elif cached is not None:
        _track(cached)
        cached.spent = [*(cached.spent or ()), (rest, by)]


def _use_up(state: AbstractState, by: str) -> None:
    if state.__usable__():
        state.__use_up__(by)


def passed(tree: Any, way: Way) -> Tracked | None:
    """What notes how a state was passed; None if nothing can."""
    node, rest, cached = _found(tree, way)
    # Where a record was passed, there is a snapshot of the record, which may be all that there is.
    if cached is None and not rest and node.__usable__():
        node.__snapshot__()
        cached = node.__kept__()
    return None if cached is None else _track(cached)


def deliver(result: Any, ways: Iterable[Way]) -> Delivery:
    """Have what came out of a call note when it is read or passed on.

    Args:
        result: what the call returned.
        ways: to the states in it that follow from one that went in.
    """
    delivery = Delivery()
    for way in ways:
        cached = _found(result, way)[2]
        if cached is None:
            # Nothing would note when it is read.
            delivery.is_taken = True
            continue
        cached = _track(cached)
        if cached.delivery is None:
            cached.delivery = delivery
        else:
            # Of another state in the same record, which is read as a whole.
            delivery = cached.delivery
    return delivery


def pass_on(old: Snapshot | None, new: Snapshot | None, where: Any) -> bool:
    """Note what came out of the first call with a state; whether this was one.

    Args:
        old: the snapshot of the state that was passed.
        new: that of its successor.
        where: what it was passed to.
    """
    if old is None or type(new) is not Snapshot:
        return False
    if type(old) is Snapshot:
        _track(old)
    if old.passed is not None:  # pyright: ignore[reportAttributeAccessIssue]  (it is tracked)
        return False
    delivery = Delivery()
    old.passed = {where: delivery}
    new.__class__ = Tracked
    new.delivery, new.passed, new.spent = delivery, None, None
    return True


def _found(tree: Any, way: Way) -> tuple[Any, tuple[Any, ...], Snapshot | None]:
    """What is pending on the way to a state, or the state; the path left; and its snapshot."""
    node, rest = tree, way.rest
    for step in way.steps:
        node = node[step]
    for i, key in enumerate(rest):
        source = source_of(node.__stored__) if record_of(node) is not None else None
        if isinstance(source, Snapshot):
            return node, rest[i:], source
        node = reached(node, (key,))
    return node, (), node.__kept__()


def _track(cached: Snapshot) -> Tracked:
    if type(cached) is Snapshot:
        cached.__class__ = Tracked
        cached.delivery = cached.passed = cached.spent = None
    return cached  # pyright: ignore[reportReturnType]  (it is one by now)
