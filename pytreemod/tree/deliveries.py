"""Whether the new State that a call returned is ever used.

The caller of a compiled function has two States afterwards, the old one and its successor. The
snapshot of the successor notes when it is read or passed on. The snapshot of the old one notes
which functions received it, and what each returned for it. And a pending record can be used up
together with the States that it will contain, without being built.

All of this runs in each call of such a function, so it must be fast: a snapshot becomes a tracked
one by changing its class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pytreemod.tree.nodes import record_of
from pytreemod.tree.pending import source_of
from pytreemod.tree.snapshots import AbstractState, Snapshot, reached
from pytreemod.typing import class_of, jtu


class Delivery:
    """The successor that a call returned for one State."""

    is_taken = False
    """Whether it has been read or passed on."""


class Tracked(Snapshot):
    """The snapshot of an argument, or of a result, of a call."""

    __slots__ = ()

    delivery: Delivery | None
    """The delivery that it is part of, if a call returned it."""

    passed: dict[Any, Delivery | None] | None
    """The delivery of each call that received it, by function; None after a warning."""

    spent: list[tuple[tuple[Any, ...], str]] | None
    """The paths of the States that are used up when the record is built, and what used them up."""

    def take(self) -> bool:
        """Note that it is read or passed on, and return whether that is allowed."""
        if self.delivery is not None:
            self.delivery.is_taken = True
        return self.spent is None

    def fill_in(self, node: Any) -> None:
        """Build the record's fields, and use up the States that were used up before."""
        self.take()
        super().fill_in(node)
        for path, by in self.spent or ():
            _use_up(reached(node, path), by)


class StatePath(NamedTuple):
    """The path to a State: the steps, and the rest."""

    steps: tuple[Any, ...]
    """Keys through tuples, lists and dicts."""

    rest: tuple[Any, ...]
    """The remaining path, which begins at a record or another node."""


def state_path_to(tree: Any, path: tuple[Any, ...], state: AbstractState) -> StatePath | None:
    """Return the way to a State in a tree; None if it leads through a node of a user's class."""
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
    return StatePath(tuple(steps), rest) if is_there else None


def use_up(tree: Any, state_path: StatePath, by: str) -> None:
    """Use a State up: now, or when the record that contains it is built."""
    node, rest, cached = _found(tree, state_path)
    if not rest:
        _use_up(node, by)
    elif cached is not None:
        _track(cached)
        cached.spent = [*(cached.spent or ()), (rest, by)]


def _use_up(state: AbstractState, by: str) -> None:
    if state.__usable__():
        state.__use_up__(by)


def passed(tree: Any, state_path: StatePath) -> Tracked | None:
    """Return the tracked snapshot of a State that was passed; None if it cannot have one."""
    node, rest, cached = _found(tree, state_path)
    # A record that was passed has a snapshot, which may be the only object that exists.
    if cached is None and not rest and node.__usable__():
        node.__snapshot__()
        cached = node.__cached_snapshot__()
    return None if cached is None else _track(cached)


def deliver(result: Any, state_paths: Iterable[StatePath]) -> Delivery:
    """Let the results of a call note when they are read or passed on.

    Args:
        result: the value that the call returned.
        state_paths: paths to the States in it that follow from one argument.
    """
    delivery = Delivery()
    for state_path in state_paths:
        cached = _found(result, state_path)[2]
        if cached is None:
            # Nothing could note that it is read.
            delivery.is_taken = True
            continue
        cached = _track(cached)
        if cached.delivery is None:
            cached.delivery = delivery
        else:
            # Another State in the same record, which is read as one object.
            delivery = cached.delivery
    return delivery


def pass_on(old: Snapshot | None, new: Snapshot | None, where: Any) -> bool:
    """Note the result of the first call with a State; return whether this call was the first.

    Args:
        old: the snapshot of the State that was passed.
        new: the snapshot of its successor.
        where: the function that received it.
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


def _found(tree: Any, state_path: StatePath) -> tuple[Any, tuple[Any, ...], Snapshot | None]:
    """The first pending node on the way to a State (or the State), the path left, a snapshot."""
    node, rest = tree, state_path.rest
    for step in state_path.steps:
        node = node[step]
    for i, key in enumerate(rest):
        source = source_of(node.__stored__) if record_of(node) is not None else None
        if isinstance(source, Snapshot):
            return node, rest[i:], source
        node = reached(node, (key,))
    return node, (), node.__cached_snapshot__()


def _track(cached: Snapshot) -> Tracked:
    if type(cached) is Snapshot:
        cached.__class__ = Tracked
        cached.delivery = cached.passed = cached.spent = None
    return cached  # pyright: ignore[reportReturnType]  (it is one by now)
