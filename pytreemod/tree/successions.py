"""Which keepers are used up while a function runs inside a transform.

A keeper (a State) that was replaced has a successor, and what the successor holds is lost if it
does not come out of the transform. Whoever runs a function inside a transform *watches*: keepers
note what happens to them, and the watcher looks once the function has returned. Nobody watches
outside of transforms, where a keeper that was used up is still there to refuse its next use.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from pytreemod.tree.snapshots import AbstractKeeper
from pytreemod.typing import PyTree, jtu

# Keepers by their id. Weakly: transforms inside make some of what they trace, which must not
# outlive its trace; another one may be found then where one was.
_Keepers = dict[int, weakref.ref[AbstractKeeper]]


class Watch:
    """What happens to keepers in this thread, from `with Watch() as watch:` to the end of that.

    Attributes:
        made: the keepers that were made meanwhile.
        parts: those of them that were taken out of another one, which stays as it is.
        came_in: those that were used up, but not made here: arguments, or taken from outside. In
            the order in which they were used.
        advanced: by what each is recognized, the values that came out of transforms inside as
            others than they went in, and those of parts that were used up.
        drawn: by the same, the random streams that were drawn from; False for those that were given
            keys here, so that what is drawn from them says nothing of the streams that came in.
    """

    __slots__ = ("advanced", "came_in", "drawn", "made", "parts")

    def __init__(self) -> None:
        self.made: _Keepers = {}
        self.parts: _Keepers = {}
        self.came_in: list[AbstractKeeper] = []
        self.advanced: set[Any] = set()
        self.drawn: dict[Any, bool] = {}

    def __enter__(self) -> Watch:
        _watches.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        stack = _watches.stack
        stack.pop()
        if stack and self.drawn:
            outer = stack[-1].drawn
            outer.update({name: old and outer.get(name, True) for name, old in self.drawn.items()})

    def pass_on(self) -> None:
        """Afterwards: tell the watch around this one what happened."""
        outer = outer_watch()
        if outer is not None:
            outer.advanced |= self.advanced
            for keeper in self.came_in:
                outer.note_used(keeper)

    def note_used(self, keeper: AbstractKeeper) -> None:
        """A keeper was used up."""
        if _has(self.parts, keeper):
            # The whole that it was taken from stays as it was; only its values tell.
            self.advanced.update(keeper.__values__())
        elif not _has(self.made, keeper) and not any(known is keeper for known in self.came_in):
            self.came_in.append(keeper)


def _has(keepers: _Keepers, keeper: AbstractKeeper) -> bool:
    found = keepers.get(id(keeper))
    return found is not None and found() is keeper


class _Watches(threading.local):
    """The watches of each thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Watch] = []


_watches = _Watches()


def outer_watch() -> Watch | None:
    """The innermost watch of this thread, if there is one."""
    stack = _watches.stack
    return stack[-1] if stack else None


def note_made(keeper: AbstractKeeper) -> None:
    """Tell who watches that a keeper is there that was not there before."""
    # Outside of transforms nobody watches, and this one look is all that it costs.
    if _watches.stack:
        _watches.stack[-1].made[id(keeper)] = weakref.ref(keeper)


def note_part(keeper: AbstractKeeper) -> None:
    """Tell who watches that a keeper is a part of another one, into which it has to be put back."""
    if _watches.stack:
        _watches.stack[-1].parts[id(keeper)] = weakref.ref(keeper)


def note_used(keeper: AbstractKeeper) -> None:
    """Tell who watches that a keeper was used up."""
    if _watches.stack:
        _watches.stack[-1].note_used(keeper)


def note_drawn(name: Any) -> None:
    """Tell who watches that a random stream was drawn from."""
    if _watches.stack:
        _watches.stack[-1].drawn.setdefault(name, True)


def note_keyed(names: Iterable[Any]) -> None:
    """Tell who watches that random streams were given keys of their own."""
    if _watches.stack:
        _watches.stack[-1].drawn.update(dict.fromkeys(names, False))


def is_keeper(node: Any) -> bool:
    """Whether a node of a tree is a keeper."""
    return isinstance(node, AbstractKeeper)


def keepers_in(tree: PyTree) -> list[AbstractKeeper]:
    """The keepers in a tree, those included that were used up."""
    # As leaves: one that was used up refuses to be flattened.
    return [leaf for leaf in jtu.tree_leaves(tree, is_leaf=is_keeper) if is_keeper(leaf)]


def advanced(old: AbstractKeeper, new: AbstractKeeper) -> set[Any]:
    """Which values of `old` are others in `new`, by what they are recognized by."""
    before, after = old.__values__(), new.__values__()
    return {name for name in before if name in after and _differ(before[name], after[name])}


def _differ(old: PyTree, new: PyTree) -> bool:
    # By identity: traced values cannot be compared.
    before, after = jtu.tree_leaves(old), jtu.tree_leaves(new)
    return len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True))
