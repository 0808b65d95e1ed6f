"""Warn about callers that use an old State again after a jitted function replaced it.

Inside a trace, a used State refuses, and an update that is not returned is found (see
`boundary.lost_updates`). The State that was passed to a compiled function is not affected by the
call. A loop that ignores the result (`_ = step(model, state, x)`) would train without it, and no
error would show it. So a trace records which arguments have successors in the result, in the plan
of that result (see `boundary.packing`). Most have none, and then a call does no more work. After
each call

- a net (of `stateful`) is used up, because it promises that an old one refuses;
- a State records the function that used it, and the successor, which is marked as soon as it is
  read or passed on. If it was not, and the function gets the old State again, the update was
  lost. A warning reports this once;
- the effects of the trace are recorded in a trace around it, because JAX may have cached this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pytreemod.errors import LostUpdateWarning, explain, warn
from pytreemod.transform.boundary.wrapping import argument_name
from pytreemod.tree.deliveries import (
    Delivery,
    ReplacingCall,
    StatePath,
    deliver,
    passed,
    state_path_to,
    use_up_in,
)
from pytreemod.tree.effects import (
    Effects,
    TraceEffects,
    changed_values,
    is_state,
    trackers,
)
from pytreemod.tree.nodes import locations
from pytreemod.tree.paths import path_text
from pytreemod.tree.snapshots import AbstractState
from pytreemod.typing import PyTree


class _Found(NamedTuple):
    """A state in a tree."""

    state: AbstractState
    path: tuple[Any, ...]
    state_path: StatePath
    is_net: bool


class _Pair:
    """A state among the arguments, with its successors in the result."""

    __slots__ = ("is_net", "place", "root", "state_path", "successors", "tokens")

    def __init__(self, root: int | str | None, place: str, old: _Found):
        # The index or name of the argument; None for the function itself.
        self.root = root
        self.state_path, self.is_net = old.state_path, old.is_net
        self.place = place
        self.successors: list[StatePath] = []
        self.tokens: list[str] = []


class Successions:
    """The arguments of a trace that have successors in its result, and its effects."""

    __slots__ = ("direct", "effects", "name", "pairs")

    def __init__(self, name: str, effects: TraceEffects, pairs: Sequence[_Pair]):
        self.name = name
        self.effects = effects
        self.pairs = pairs
        # The common case: one State as an argument, which is returned in a tuple.
        self.direct = _direct(pairs[0]) if len(pairs) == 1 else None

    def note(self, fn: Any, args: Sequence[Any], kwargs: dict[str, Any], result: PyTree) -> None:
        """Record the arguments and the result of a call.

        Warns:
            LostUpdateWarning: if a State was passed before, and its successor was never read.

        Raises:
            StateError: if another call, in another thread, has used up a net that this one got.
        """
        if trackers.stack:
            self.effects.record()
        if self.direct is not None:
            # A fraction of the cost of the loop below, which a call with six arrays would notice.
            pair, root, step = self.direct
            old, new = args[root].__cached_snapshot__, result[step].__cached_snapshot__
            if old is not None and new is not None and old.passed is new.delivery is None:
                old.passed = new.delivery = [pair]
                return
        call = ReplacingCall(self.name)
        for pair in self.pairs:
            root = pair.root
            tree: Any = (
                fn if root is None else args[root] if isinstance(root, int) else kwargs[root]
            )
            if pair.is_net:
                use_up_in(tree, pair.state_path, call)
                continue
            tracked = passed(tree, pair.state_path)
            if tracked is None:
                continue
            before = tracked.passed
            if not isinstance(before, dict):
                # A function whose result was taken may be forgotten.
                before = tracked.passed = {before[0]: before} if before else {}
            last = before.get(pair, _TAKEN)
            if last is None:
                continue
            if not last:
                before[pair] = deliver(result, pair.successors, pair)
            else:
                # Once: it is known from now on.
                before[pair] = None
                warn(LostUpdateWarning, self._lost(pair))

    def _lost(self, pair: _Pair) -> str:
        return explain(
            self.name,
            "the State that the last call returned",
            f"the old State, so that the update of {', '.join(pair.tokens)} is lost",
            at=[pair.place],
            hint=[
                "use the result of the call; or restore the old one:",
                "y, state = step(x, state)",
                "y, _ = step(x, state.restored())",
            ],
        )


def _direct(pair: _Pair) -> tuple[_Pair, int, int] | None:
    """A pair, the argument, and the item of the result; None if the states are nested deeper."""
    state_paths = [pair.state_path, *pair.successors]
    if pair.is_net or not isinstance(pair.root, int) or any(path.rest for path in state_paths):
        return None
    steps = [path.steps for path in state_paths]
    return (pair, pair.root, steps[1][0]) if [len(s) for s in steps] == [0, 1] else None


def successions_in(
    name: str,
    names: tuple[str, ...],
    given: tuple[Sequence[Any], Sequence[Any], dict[str, Any]],
    result: PyTree,
    effects: Effects,
) -> Successions | None:
    """Return the arguments of a traced call that have successors in its result, and its effects.

    Args:
        name: the name of the function.
        names: its positional parameters.
        given: the function, if its arrays are arguments; its arguments; and those by keyword.
        result: its result.
        effects: the effects recorded in the call.

    Returns:
        None if it had no effects that matter outside.
    """
    recorded = TraceEffects.of(effects)
    if recorded is None:
        return None
    after = list(_found(result))
    before = [
        (root, label, found) for root, label, tree in _roots(names, given) for found in _found(tree)
    ]
    pairs: list[_Pair] = []
    for root, label, old in before:
        pair = _Pair(root, path_text(old.path, label), old)
        changed = _changed(old, [other for _, _, other in before if other is not old], effects)
        moved = set[Any]()
        for new in after:
            found = changed & changed_values(old.state, new.state)
            if found:
                moved |= found
                pair.successors.append(new.state_path)
        if moved:
            pair.tokens = [str(marker) for marker in old.state.__values__() if marker in moved]
            pairs.append(pair)
    return Successions(name, recorded, pairs)


def _changed(old: _Found, others: Iterable[_Found], effects: Effects) -> set[Any]:
    """Return the identities of the values of a state that a call changed."""
    own = set(old.state.__values__())
    if any(used is old.state for used in effects.captured):
        return own
    # The change is in an inner transform, which has its own state, so only names identify the
    # owner. If two states share names, as those of a teacher and a student do, it is unknown.
    for other in others:
        own -= other.state.__values__().keys()
    return own & effects.changed


def _roots(
    names: tuple[str, ...], given: tuple[Sequence[Any], Sequence[Any], dict[str, Any]]
) -> Iterator[tuple[int | str | None, str, Any]]:
    head, args, kwargs = given
    yield from ((None, "function", fn) for fn in head)
    yield from ((i, argument_name(names, i), tree) for i, tree in enumerate(args))
    yield from ((name, name, tree) for name, tree in kwargs.items())


def _found(tree: PyTree) -> Iterator[_Found]:
    """Yield the states in a tree that Python can reach."""
    for place in locations(tree, is_state):
        state_path = state_path_to(tree, place.path, place.leaf) if is_state(place.leaf) else None
        if state_path is not None:
            is_net = any(getattr(node, "__keeps_state__", False) for node in place.nodes)
            yield _Found(place.leaf, place.path, state_path, is_net)


_TAKEN: Delivery = []
