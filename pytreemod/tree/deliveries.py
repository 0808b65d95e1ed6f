"""Whether the new State that a call returned is ever used.

The caller of a compiled function has two States afterwards, the old one and its successor. The
snapshot of the successor notes when it is read or passed on. The snapshot of the old one notes
which functions received it, and what each returned for it. And a pending record can be used up
together with the States that it will contain, without being built.

All of this runs in each call of such a function, so it must be fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from pytreemod.tree.nodes import record_of
from pytreemod.tree.pending import fill_in, source_of
from pytreemod.tree.snapshots import AbstractState, Snapshot, finishing, reached
from pytreemod.typing import class_of, jtu

Delivery: TypeAlias = list[Any]
"""The successor that a call returned for one State: `[function]`, or empty once it was taken.

It is taken when it is read or passed on. A list, because a call makes one, and an object of a class
takes longer."""


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


class ReplacingCall:
    """One call of a function that uses up States."""

    __slots__ = ("name", "used")

    def __init__(self, name: str):
        self.name = name
        self.used: list[AbstractState] = []


def use_up_in(tree: Any, state_path: StatePath, call: ReplacingCall) -> None:
    """Use a State up: now, or when the record that contains it is built.

    Only one call can do this. Another one that began at the same time, in another thread, is
    refused.

    Args:
        tree: contains the State; it may be in it twice.
        state_path: the path to it.
        call: the call that has replaced it.

    Raises:
        StateError: if another call has used it up.
    """
    node, rest, cached = _found(tree, state_path)
    with finishing:
        if rest and cached is not None and source_of(node.__stored__) is cached:
            # Not None, so that `take` is called.
            cached.delivery = [] if cached.delivery is None else cached.delivery
            cached.spent = {} if cached.spent is None else cached.spent
            if cached.spent.setdefault(rest, call) is call:
                return
    # Another call has used it up, or the record is built by now.
    if rest:
        fill_in(node)
    state = reached(node, rest)
    if not any(state is used for used in call.used):
        call.used.append(state)
        state.__use_up__(call.name)


def passed(tree: Any, state_path: StatePath) -> Snapshot | None:
    """Return the snapshot of a State that was passed; None if it cannot have one."""
    node, rest, cached = _found(tree, state_path)
    # A record that was passed has a snapshot, which may be the only object that exists.
    if cached is None and not rest and node.__usable__():
        node.__snapshot__()
        cached = node.__cached_snapshot__
    return cached


def deliver(result: Any, state_paths: Iterable[StatePath], function: Any) -> Delivery:
    """Let the results of a call note when they are read or passed on.

    Args:
        result: the value that the call returned.
        state_paths: paths to the States in it that follow from one argument.
        function: the function that was called.
    """
    delivery: Delivery = [function]
    for state_path in state_paths:
        cached = _found(result, state_path)[2]
        if cached is None:
            # Nothing could note that it is read.
            delivery.clear()
            continue
        if cached.delivery is None:
            cached.delivery = delivery
        else:
            # Another State in the same record, which is read as one object.
            delivery = cached.delivery
    return delivery


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
    return node, (), node.__cached_snapshot__
