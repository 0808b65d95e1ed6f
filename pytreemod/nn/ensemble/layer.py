"""`Ensemble`: members of one kind as one value, called like one of them.

The members are one Module, whose arrays have a leading axis, but for what they share. A call splits
what is for each member (its arrays, its part of the State, its key, its entry of the inputs) from
what is for all of them, and leaves the rest to `filter_vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Generic, TypeVar, overload

import jax

from pytreemod.errors import ArgumentError, StateError
from pytreemod.module.fields import field
from pytreemod.nn.arguments import check_held_number, check_key, check_size, named
from pytreemod.nn.calling import StatefulLayer, in_scope, needs_state, uses_key_if, wants_key
from pytreemod.nn.ensemble.inputs import Inputs
from pytreemod.nn.ensemble.sharing import (
    alike,
    check_shared,
    first_of,
    own_paths,
    refuse_kept_state,
    rejoined,
    shared_paths,
    withheld,
)
from pytreemod.nn.members.checks import ENSEMBLE, check_keywords, check_leading
from pytreemod.nn.members.making import make_members
from pytreemod.nn.members.state import MemberStates
from pytreemod.nn.members.taking import each, merged, some
from pytreemod.nn.sequential import Identity
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.making import delete_init_state
from pytreemod.state.tokens import tokens_of
from pytreemod.state.values import State
from pytreemod.transform.boundary.surrounded_calls import with_numbers, without_numbers
from pytreemod.transform.maps.vmap import ON_AXIS_0, filter_vmap
from pytreemod.tree.predicates import is_array
from pytreemod.typing import AxesSpec, FilterSpec, jtu

_M = TypeVar("_M", bound=Callable[..., Any])
_E = TypeVar("_E", bound="Ensemble[Any]")


class Ensemble(StatefulLayer, Generic[_M]):
    """Members of one kind as one value, called like one of them: all at once, by a map.

    The members are kept as one, whose arrays have a leading axis, and are called by
    [`filter_vmap`][pytreemod.filter_vmap]: the program is that of the map written by hand. What
    `shared` picks is held once, without that axis; its gradient is the sum over the members.

    Indexing gives a member, slicing an `Ensemble`; `len` and iteration work. Edit what is inside as
    anywhere: `tree_at(lambda e: e.member.weight, nets, replace_fn=lambda w: w.at[2].set(0))`.

    **Law.** `nets(x)[i] == nets[i](x)`, and `nets(xs, in_axes=0)[i] == nets[i](xs[i])`.

    Shapes:
        x: whatever a member takes; with `in_axes`, an axis more, of size n
        return: what a member gives, with a leading axis of size n; a pair with the State if one
            was passed in

    Fields:
        member: the members as one; each array has a leading axis of size n, but for those shared
        n: how many
        shared: the paths, below `member`, of what is held once

    Args:
        make: makes one member; called once, mapped, as `make(key=k)` with a key of its own for each
            member, or as `make()` if it takes no `key`.
        n: how many members, >= 1.
        key: split between the members; or what `init_keys` gave.
        shared: a selector on a member: a path, a class, or what `pm.select` makes. What it picks is
            the first member's.

    State and randomness: is stateful if its members are, or have tokens without saying so. Each
        value in the State has a leading axis of size n; values that come from elsewhere may be read
        and not written. Each random stream is one, split between the members in every call. A key
        is split between the members, if they use one.

    Raises:
        ArgumentError: an argument is unusable.
        RngError: make needs a key and none was given, or key is no random key.
        ShapeError: an array has not the leading axis, or an input not an entry for each member.
        SpecError: shared picks nothing, or everything; or in_axes does not fit the arguments.
        StateError: shared picks State, a member keeps its State in itself, or it gives back none
            that fits.

    Examples:
        >>> import functools as ft
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> make = ft.partial(nn.MLP, 3, 2, 8, 1)
        >>> nets = nn.Ensemble(make, 5, key=jax.random.key(0), shared="layers[0]")
        >>> nets(jnp.ones((7, 3))).shape, nets(jnp.ones((5, 7, 3)), in_axes=0).shape
        ((5, 7, 2), (5, 7, 2))
        >>> nets.member.layers[0].weight.shape, nets.member.layers[1].weight.shape
        ((8, 3), (5, 2, 8))
        >>> len(nets), len(nets[1:]), nets[0](jnp.ones(3)).shape
        (5, 4, (2,))
    """

    # To an optimizer, each of them is a model of its own.
    __has_independent_members__: ClassVar[bool] = True

    member: _M
    n: int = field(static=True)
    shared: tuple[str, ...] = field(static=True)

    def __init__(
        self,
        make: Callable[..., _M],
        n: int,
        *,
        key: KeyLike | None = None,
        shared: FilterSpec | None = None,
    ):
        self.n = check_size(named(self, "n"), n, 1)
        found: list[tuple[str, ...]] = []

        def look(member: Any) -> None:
            refuse_kept_state(member)
            found.append(shared_paths(member, shared))

        member = make_members(ENSEMBLE, make, self.n, key, look)
        self.shared = found[0]
        self.member = first_of(member, self.shared)

    def __stacked__(self) -> tuple[str, ...]:
        # Asked by whoever means each member's arrays, and not the stack of them.
        return own_paths(self.member, self.shared, "member")

    def replace(self: _E, /, **changes: Any) -> _E:  # noqa: D102  (as that of Module)
        made = super().replace(**changes)
        check_held_number(self, changes, "n", "member")
        return made

    def __check_init__(self) -> None:
        # Here as well, for `replace` and `with_mode` come this way.
        check_size(named(self, "n"), self.n, 1)
        check_shared(named(self, "shared"), self.shared)

    @uses_key_if(lambda nets: wants_key(nets.member))
    @in_scope("pm.nn.Ensemble")
    def __call__(
        self,
        /,
        *args: Any,
        key: KeyLike | None = None,
        in_axes: AxesSpec = None,
        **kwargs: Any,
    ) -> Any:
        """Call all members.

        Args:
            *args: what a member takes; a State among them is that of all members.
            key: split between the members, if they use one; they are called without if it is None.
            in_axes: which axis of the inputs has an entry for each member: an int for all arguments
                by position, a tuple with one for each but the State, or a dict by name. What has
                none is given to every member as it is; None, for all of them.
            **kwargs: what a member takes by name.

        Returns:
            What the members return, on a leading axis; with a State, the pair of it and the new
            State.
        """
        title, n = self._title(), self.n
        if kwargs:
            check_keywords(title, self.member, kwargs, ("in_axes",))
        inputs = Inputs(title, n, self.member, args, kwargs, in_axes)
        # Rules around the members, if there are any, are told in which layer of a Stack they are.
        member, outer = without_numbers(self.member)
        values = None
        if isinstance(inputs.state, State):
            # The State has them; what is left in the members would be split as their arrays are.
            member = delete_init_state(member)
        member = withheld(member, self.shared)
        check_leading(ENSEMBLE, title, n, {"member": member})
        if isinstance(inputs.state, State):
            values = MemberStates(ENSEMBLE, title, member, n, inputs.rest, inputs.state)
        keys = None
        # Keys that nobody uses would be split in the program all the same.
        if key is not None and wants_key(self.member):
            keys = jax.random.split(check_key(title, key), n)
        leaves, treedef = jtu.tree_flatten(member)
        # The map is given arrays alone: what is none goes around it, and is not split again.
        own = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

        def call(arrays: list[Any], given: list[Any], state: Any, key: Any) -> Any:
            parts = list(leaves)
            for i, array in zip(own, arrays, strict=True):
                parts[i] = array
            one = with_numbers(rejoined(treedef.unflatten(parts)), outer)
            options = {} if key is None else {"key": key}
            if values is None:
                args, kwargs = inputs.for_one(given, None)
                return one(*args, **kwargs, **options), None
            before = values.form.state(state, values.shared)
            args, kwargs = inputs.for_one(given, before)
            result = one(*args, **kwargs, **options)
            out, after, shared = values.form.changed(title, result)
            _check_read(title, values, shared)
            # None says that the member gave back the State as it was, as in inference mode.
            return out, None if result[1] is before else after

        mapped = filter_vmap(call, in_axes=(0, inputs.axes, ON_AXIS_0, 0), axis_size=n)
        states = () if values is None else values.own
        out, after = mapped([leaves[i] for i in own], inputs.for_each(), states, keys)
        if values is None:
            return out
        # Not from inside of the map: every member gave its State back as it was.
        return out, inputs.state if after is None else values.after(after, values.shared)

    def is_stateful(self) -> bool:
        """Whether the members need State.

        Returns:
            True or False.
        """
        if isinstance(self.member, StatefulLayer):
            return self.member.is_stateful()
        return bool(tokens_of(self.member))

    def needs_state(self) -> bool:
        """Whether the members cannot be called without State.

        Returns:
            True or False.
        """
        return self.is_stateful() and needs_state(self.member)

    @classmethod
    def from_members(
        cls, members: Iterable[_M], *, shared: FilterSpec | None = None
    ) -> Ensemble[_M]:
        """An Ensemble of members that exist, which differ in their arrays' values alone.

        Tokens at one place in all members become one, whose value has an entry for each member. If
        they hold initial values, these are stacked; of random streams, the first member's goes on
        for all.

        **Law.** `Ensemble.from_members(nets.unstack(), shared=s) == nets`, but for random streams.

        Args:
            members: at least one.
            shared: as for `Ensemble`; what it picks must be the same in all of them.

        Returns:
            The Ensemble.

        Raises:
            ArgumentError: there are no members, or what they are to share differs.
            SpecError: shared picks nothing, or everything.
            StateError: shared picks State, or a member keeps its State in itself.
            StructureError: two members differ; the paths are named.
        """
        members = list(members)
        if not members:
            raise ArgumentError("Ensemble.from_members", "at least one member", "none")
        refuse_kept_state(members[0])
        paths = shared_paths(members[0], shared)
        member = rejoined(merged(alike(members, paths)))
        # What `__init__` would make is there already.
        blank: Any = Ensemble(Identity, 1)
        return blank.replace(member=member, n=len(members), shared=paths)

    def unstack(self) -> list[_M]:
        """The members one by one, each with what all share.

        Each has tokens of its own, which hold the values for that member if those of the Ensemble
        hold values. To take the values out of a State, put them into the model first:
        `state.fill(nets).unstack()`.

        Returns:
            A list of members.

        Raises:
            ShapeError: an array has not the leading axis.
        """
        member, outer = without_numbers(self.member)
        members = each(ENSEMBLE, self._title(), withheld(member, self.shared), self.n)
        return [with_numbers(rejoined(one), outer) for one in members]

    @overload
    def __getitem__(self, index: int) -> _M: ...

    @overload
    def __getitem__(self, index: slice) -> Ensemble[_M]: ...

    def __getitem__(self, index: int | slice) -> _M | Ensemble[_M]:
        """A member by number, or several as an `Ensemble`; with tokens of their own."""
        member, outer = without_numbers(self.member)
        part = some(ENSEMBLE, self._title(), withheld(member, self.shared), self.n, index)
        part = with_numbers(rejoined(part), outer)
        if not isinstance(index, slice):
            return part
        count = len(range(self.n)[index])
        if not count:
            expected = "a slice that picks at least one member"
            raise ArgumentError("Ensemble[...]", expected, f"none of {self.n}")
        return self.replace(member=part, n=count)

    def __iter__(self) -> Iterator[_M]:
        yield from self.unstack()

    def __len__(self) -> int:
        return self.n

    def _title(self) -> str:
        return f"Ensemble({type(self.member).__name__}, n={self.n})"


def _check_read(title: str, values: MemberStates, after: Any) -> None:
    """Refuse a member that writes what others read at the same time."""
    pairs = zip(jtu.tree_leaves(after), jtu.tree_leaves(values.shared), strict=True)
    if all(new is old for new, old in pairs):
        return
    hint = (
        "Members write to tokens of their own; write to another one after them:",
        "state = state.set(self.count, n + 1)",
    )
    expected = "members that only read the values that all of them are given"
    raise StateError(title, expected, "one that changes such a value", hint=hint)
