"""`Members`: the base of `Stack` and `Ensemble`, which store several of one kind as one value.

A call separates the values of each member (its arrays, its part of the State, its key) from those
that all members share. A `Stack` passes the parts to a scan, an `Ensemble` to a map, and
`MemberCall` calls one member with its part.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar, overload

import jax

from pytreemod.errors import ArgumentError, describe, explain
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.arguments import check_held_number, check_key
from pytreemod.nn.calling import StatefulLayer, needs_state, wants_key
from pytreemod.nn.members.checks import Owner, check_leading
from pytreemod.nn.members.sharing import own_paths
from pytreemod.nn.members.stacking import renewed, split_members, split_streams
from pytreemod.nn.members.state import Form, MemberStates
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.making import delete_init_state
from pytreemod.state.tokens import RngStream, tokens_of
from pytreemod.state.values import State
from pytreemod.tree.partitioning import combine
from pytreemod.tree.stacking import unstack
from pytreemod.typing import jtu

_M = TypeVar("_M", bound=Callable[..., Any])
_S = TypeVar("_S", bound="Members[Any]")


class MemberCall(Module):
    """Calls one member, with its part of everything."""

    rest: Any
    title: str
    form: Form | None = field(static=True)

    def __call__(
        self, invoke: Callable[..., Any], own: Any, values: Any, shared: Any, key: Any
    ) -> tuple[Any, Any, Any]:
        """Call the member.

        Args:
            invoke: from the member, its State or None, and a dict with its key, to its result.
            own: its arrays.
            values: its values in State.
            shared: the values that all members share.
            key: its key; None if it uses none.

        Returns:
            The output; its values, None if the State is unchanged; and the shared values.
        """
        member = combine(own, self.rest)
        options = {} if key is None else {"key": key}
        if self.form is None:
            return invoke(member, None, options), values, shared
        state = self.form.state(values, shared)
        result = invoke(member, state, options)
        out, values, shared = self.form.changed(self.title, result)
        # Unchanged, as in inference mode: then the State of all members is unchanged, too.
        return out, None if result[1] is state else values, shared


class Members(StatefulLayer, Generic[_M], is_abstract=True):
    """Several of one kind as one value, whose arrays have a leading axis.

    A subclass has two fields that `owner` names: the members, and their number.
    """

    owner: ClassVar[Owner]

    def __stacked__(self) -> tuple[str, ...]:
        # For code that needs the arrays of each member, not the stack.
        return own_paths(_members_of(self), _shared_by(self), self.owner.member)

    def replace(self: _S, /, **changes: Any) -> _S:  # noqa: D102  (as that of Module)
        made = super().replace(**changes)
        check_held_number(self, changes, self.owner.number, self.owner.member)
        return made

    def is_stateful(self) -> bool:
        """Whether the members need State.

        Returns:
            True or False.
        """
        member = _members_of(self)
        if isinstance(member, StatefulLayer):
            return member.is_stateful()
        return bool(tokens_of(member))

    def needs_state(self) -> bool:
        """Whether the members cannot be called without State.

        Returns:
            True or False.
        """
        return self.is_stateful() and needs_state(_members_of(self))

    def unstack(self) -> list[_M]:
        """Return the members as a list; each also has the shared parts.

        Each member gets new tokens, which have the initial values for that member, if there are
        initial values here. To use the values of a State, put them into the model first:

            model = state.fill(model)
            model = pm.tree_at(lambda m: m.blocks, model, replace_fn=lambda s: s.unstack())
            model, state = pm.make_with_state(lambda: model)()

        Returns:
            A list of the members.

        Raises:
            ShapeError: if an array lacks the leading axis.
        """
        own, rest = self._split(split_streams(_members_of(self), len(self)))
        each = unstack(own) if jtu.tree_leaves(own) else [own] * len(self)
        return [renewed(combine(one, rest)) for one in each]

    @overload
    def __getitem__(self, index: int) -> _M: ...

    @overload
    def __getitem__(self: _S, index: slice) -> _S: ...

    def __getitem__(self, index: int | slice) -> Any:
        """Return one member, or several as one by a slice; tokens are new, as in `unstack`."""
        member = _members_of(self)
        chosen: Any = index
        if isinstance(index, slice):
            # One stream serves any number of members.
            own, rest = self._split(member, _is_stream)
        else:
            chosen = self._number(index)
            own, rest = self._split(split_streams(member, len(self)))
        own = jtu.tree_map(operator.itemgetter(chosen), own)
        part = renewed(combine(own, rest))
        if not isinstance(index, slice):
            return part
        owner, count = self.owner, len(range(len(self))[index])
        if count < owner.least:
            expected = f"a slice that picks at least one {owner.member}"
            raise ArgumentError(f"{owner.name}[...]", expected, f"none of {len(self)}")
        return self.replace(**{owner.member: part, owner.number: count})

    def __iter__(self) -> Iterator[_M]:
        yield from self.unstack()

    def __len__(self) -> int:
        return getattr(self, self.owner.number)

    def _title(self) -> str:
        owner, name = self.owner, type(_members_of(self)).__name__
        return f"{owner.name}({name}, {owner.number}={getattr(self, owner.number)})"

    def _split(self, member: Any, is_leaf: Any = None, title: str = "") -> tuple[Any, Any]:
        own, rest = split_members(member, _shared_by(self), is_leaf)
        owner = self.owner
        trees = {owner.member: own}
        check_leading(owner, title or self._title(), getattr(self, owner.number), trees)
        return own, rest

    def _number(self, index: Any) -> int:
        owner, n = self.owner, len(self)
        where = f"{owner.name}[...]"
        try:
            number = operator.index(index)
        except TypeError as error:
            hint = (
                "An index that is traced takes an element of each array:",
                f"{owner.member} = jax.tree.map(lambda leaf: leaf[i], {owner.call}.{owner.member})",
            )
            expected = "an integer or a slice"
            raise ArgumentError(where, expected, describe(index), hint=hint) from error
        if not -n <= number < n:
            expected = f"an index of one of {n} {owner.member}s"
            raise IndexError(explain(where, expected, str(number)))
        return number

    def _parts(
        self, title: str, state: Any, key: KeyLike | None, others: Any
    ) -> tuple[MemberCall, tuple[Any, Any, Any], Any, Callable[..., State] | None]:
        """Split the inputs of a call into the values of each member and those of all.

        Args:
            title: the name of the members in errors.
            state: the State, if the members get one.
            key: the key of the call.
            others: the other arguments, which may have tokens.

        Returns:
            A `MemberCall`; the arrays, values in State and keys of all members; the shared values;
            and a function that makes the new State, or None without a State.
        """
        n, keys = getattr(self, self.owner.number), None
        member = held = _members_of(self)
        if isinstance(state, State):
            # The State has the values; initial values would be split as the arrays are.
            member = delete_init_state(member)
        own, rest = self._split(member, title=title)
        # Unused keys would still be split in the program.
        if key is not None and wants_key(held):
            keys = jax.random.split(check_key(title, key), n)
        if not isinstance(state, State):
            return MemberCall(rest, title, None), (own, (), keys), (), None
        states = MemberStates(self.owner, title, member, n, others, state)
        call = MemberCall(rest, title, states.form)
        return call, (own, states.own, keys), states.shared, states.after


# Functions, not methods: reading a method makes a bound one, and a call reads these many times.


def _members_of(several: Members[Any]) -> Any:
    return getattr(several, several.owner.member)


def _shared_by(several: Members[Any]) -> Sequence[str]:
    return getattr(several, "shared", ())


def _is_stream(node: Any) -> bool:
    return isinstance(node, RngStream)
