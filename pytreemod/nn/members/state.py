"""How a State passes through members.

If a token is inside the members, its value has a leading axis: each member gets its own part. A
random stream has no such axis: it is split between the members. Values of tokens in other arguments
are shared. A `Stack` passes them from each layer to the next; the members of an `Ensemble` may only
read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, cast

from pytreemod.errors import StateError, describe
from pytreemod.nn.members.checks import Owner, without_leading_axis
from pytreemod.state import streams
from pytreemod.state.refusals import split_stream
from pytreemod.state.tokens import RngStream, tokens_of
from pytreemod.state.values import State
from pytreemod.tree.nodes import children_of, stop_below
from pytreemod.tree.split_arrays import sharded_as
from pytreemod.typing import jtu


class MemberStates:
    """A State for members: some values are split, others shared.

    Args:
        owner: the owner of the members.
        title: the owner, for errors.
        member: the members.
        n: number of members.
        same: their other arguments, which may have tokens.
        state: the State.
    """

    def __init__(self, owner: Owner, title: str, member: Any, n: int, same: Any, state: State):
        mine = {item.name for item in _items(state.substate(member))}
        # A token that is in the arguments twice is still one, which all members share.
        tokens = {token.marker: token for _, token in tokens_of((member, same))}
        part = state.substate(list(tokens.values()))
        items = _items(part)
        is_own = tuple(item.name in mine for item in items)
        is_value = tuple(item.kind is not RngStream for item in items)
        self.whole = state
        self.form = Form(_form_of(part), is_own, is_value, owner)
        self.shared = tuple(e.value for e in items if e.name not in mine)
        opened = [_open(owner, title, n, item) for item in items if item.name in mine]
        self.own = tuple(given for given, _ in opened)
        self.later = tuple(later for _, later in opened)

    def after(self, own: Sequence[Any], shared: Sequence[Any]) -> State:
        """Return the State after all members; values that they cannot change come from `later`."""
        values = iter(own)
        rows = zip(self.own, self.later, strict=True)
        new = [sharded_as(next(values), old) if later is None else later for old, later in rows]
        return self.whole.update(self.form.state(new, shared))


def _open(owner: Owner, title: str, n: int, item: _Item) -> tuple[Any, Any]:
    """Split a value for the members; also return its later value, if that is known already."""
    name, kind, value = item
    if kind is not RngStream:
        _check_leading(owner, title, n, name, value)
        return value, None
    if value.key is None:
        # Not seeded. In inference mode no layer draws a key; if one does, that raises an error.
        return value, value
    # A device's shard of a split stream still has an axis, and is one stream.
    if value.count.ndim and value.count.size != 1:
        raise split_stream(name, value.count.shape[0])
    # Each member draws from its own stream; the original goes on past all of them.
    return streams.fork(value, n)


class Form(NamedTuple):
    """The form of the State of one member, and of its changes."""

    treedef: Any
    is_own: tuple[bool, ...]
    is_value: tuple[bool, ...]
    owner: Owner

    def state(self, own: Sequence[Any], shared: Sequence[Any]) -> State:
        """Make a State from the values of a member, and those that all members share."""
        mine, others = iter(own), iter(shared)
        return self.treedef.unflatten([next(mine if m else others) for m in self.is_own])

    def changed(self, title: str, result: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
        """Split the result of a member: its output, its own values, and all shared values."""
        pair = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else ()
        if len(pair) != 2 or not isinstance(pair[1], State):
            _refuse_result(self.owner, title, describe(cast("Any", result)))
        out, state = pair
        if _form_of(state) != self.treedef:
            _refuse_result(self.owner, title, "another State")
        rows = zip(_items(state), self.is_own, self.is_value, strict=True)
        changed = [(item.value, mine) for item, mine, is_value in rows if is_value or not mine]
        own = tuple(value for value, mine in changed if mine)
        return out, own, tuple(value for value, mine in changed if not mine)


class _Item(NamedTuple):
    """A value of a State, with the name and class of its token."""

    name: str
    kind: type
    value: Any


def _items(state: State) -> list[_Item]:
    children = children_of(state) or []
    rows = zip(children, state.__child_kinds__(), strict=True)
    return [_Item(key.key, kind, value) for (key, value), kind in rows]


def _form_of(state: State) -> Any:
    return jtu.tree_structure(state, is_leaf=stop_below(state))


# ---- refusals


def _refuse_result(owner: Owner, title: str, got: str) -> NoReturn:
    expected = f"a {owner.member} that returns its output and the updated State"
    hint = (f"in the {owner.member}:", "return out, state")
    raise StateError(title, expected, got, hint=hint)


def _check_leading(owner: Owner, title: str, n: int, name: str, value: Any) -> None:
    wrong = without_leading_axis({name: value}, n)
    if not wrong:
        return
    hint = (
        f"For a value that all {owner.member}s share, create the token outside them:",
        f"{owner.call}(x, state, count=self.count)",
    )
    expected = f"values in State with a leading axis of {n}"
    raise StateError(title, expected, f"{len(wrong)} without one", at=wrong, hint=hint)
