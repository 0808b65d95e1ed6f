"""`Ensemble`: members of one kind as one value, called like one of them.

The members are one Module, whose arrays have a leading axis, but for what they share. A call maps
over what is for each member (see `members.layer`), and over the inputs that have an entry for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import jax.numpy as jnp

from pytreemod.errors import ArgumentError, ShapeError, StateError, describe
from pytreemod.module.field_kinds import checked, size
from pytreemod.nn.calling import in_scope, uses_key_if, wants_key
from pytreemod.nn.members.checks import ENSEMBLE, Owner, check_keywords, check_name
from pytreemod.nn.members.layer import Members
from pytreemod.nn.members.laying import laid_alike
from pytreemod.nn.members.making import make_members
from pytreemod.nn.members.sharing import check_shared, refuse_kept_state, shared_paths
from pytreemod.nn.members.stacking import split_members, stack_members
from pytreemod.nn.sequential import Identity
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.values import State
from pytreemod.transform.boundary.signatures import positional_names
from pytreemod.transform.boundary.wrapping import argument_name
from pytreemod.transform.interception.argument_specs import Terms
from pytreemod.transform.maps.vmap import ON_AXIS_0, axes_by_argument, filter_vmap, is_axes_spec
from pytreemod.tree.partitioning import combine
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.typing import AxesSpec, FilterSpec, class_of, jtu

_M = TypeVar("_M", bound=Callable[..., Any])


class Ensemble(Members[_M]):
    """Members of one kind as one value, called like one of them: all at once, by a map.

    The members are kept as one, whose arrays have a leading axis, and are called by
    [`filter_vmap`][pytreemod.filter_vmap]: the program is that of the map written by hand. What
    `shared` picks is held once, without that axis; its gradient is the sum over the members.

    Indexing gives a member, slicing an `Ensemble`; `len` and iteration work. Edit what is inside as
    anywhere: `tree_at(lambda e: e.member.weight, nets, replace_fn=lambda w: w.at[2].set(0))`.

    On a mesh with explicit axes, members that are split over one axis are computed there, each by
    the devices that have it; members are gathered where the inputs are split over the same axis.

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
        axis_name: what [`axis_names`][pytreemod.axis_names] calls the leading axis.

    State and randomness: is stateful if its members are, or have tokens without saying so. Each
        value in the State has a leading axis of size n; values that come from elsewhere may be read
        and not written. Each random stream is one, split between the members in every call. A key
        is split between the members, if they use one.

    Raises:
        ArgumentError: an argument is invalid.
        RngError: make needs a key and none was given, or key is not a random key.
        ShapeError: an array lacks the leading axis, or an input not an entry for each member.
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

    owner: ClassVar[Owner] = ENSEMBLE
    # To an optimizer, each of them is a model of its own.
    __has_independent_members__: ClassVar[bool] = True

    member: _M
    n: int = size(1)
    shared: tuple[str, ...] = checked(check_shared)
    axis_name: str = checked(check_name, default="members")

    def __init__(
        self,
        make: Callable[..., _M],
        n: int,
        *,
        key: KeyLike | None = None,
        shared: FilterSpec | None = None,
        axis_name: str = "members",
    ):
        self.n, self.axis_name = n, axis_name
        found: list[tuple[str, ...]] = []

        def look(member: Any) -> None:
            refuse_kept_state(member)
            found.append(shared_paths(member, shared))

        def first(leaf: Any) -> Any:
            return leaf[0] if is_array(leaf) else leaf

        member = make_members(ENSEMBLE, make, self.n, key, look)
        own, rest = split_members(member, found[0])
        self.shared = found[0]
        self.member = combine(own, jtu.tree_map(first, rest))

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
        inputs: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        states = [at for at, x in inputs.items() if isinstance(x, State)]
        if len(states) > 1:
            raise ArgumentError(title, "one State", f"{len(states)} of them")
        state = inputs.pop(states[0]) if states else None
        leaves, treedef = jtu.tree_flatten(list(inputs.values()))
        axes: list[int | None] = [None] * len(leaves)
        if in_axes is not None:
            axes = _axes(title, n, positional_names(self.member), inputs, in_axes)
        mapped = [i for i, axis in enumerate(axes) if axis is not None]
        call, parts, shared, after = self._parts(title, state, key, list(inputs.values()))

        # For rules around the members, if there are any.
        numbers = None if call.outer is None else jnp.arange(n)
        own, (call, shared), leaves = laid_alike((*parts, numbers), (call, shared), leaves, axes)

        def call_one(own: Any, values: Any, key: Any, number: Any, given: list[Any]) -> Any:
            entries = dict(zip(mapped, given, strict=True))
            trees = treedef.unflatten([entries.get(i, x) for i, x in enumerate(leaves)])

            def invoke(member: Any, state: Any, options: dict[str, Any]) -> Any:
                each = {**dict(zip(inputs, trees, strict=True)), **dict.fromkeys(states, state)}
                positional = [each[i] for i in range(len(args))]
                return member(*positional, **{name: each[name] for name in kwargs}, **options)

            out, values, read = call(invoke, own, values, shared, key, number)
            _check_read(title, shared, read)
            return out, values

        spec = (0, ON_AXIS_0, 0, 0, [axes[i] for i in mapped])
        over_members = filter_vmap(call_one, in_axes=spec, axis_size=n)
        out, values = over_members(*own, [leaves[i] for i in mapped])
        if after is None:
            return out
        # Not from inside the map: every member gave its State back as it was.
        return out, state if values is None else after(values, shared)

    @classmethod
    def from_members(
        cls,
        members: Iterable[_M],
        *,
        shared: FilterSpec | None = None,
        axis_name: str = "members",
    ) -> Ensemble[_M]:
        """An Ensemble of members that exist, which differ in their arrays' values alone.

        Tokens at one path in all members become one, whose value has an entry for each member. If
        they hold initial values, these are stacked; of random streams, the first member's goes on
        for all.

        **Law.** `Ensemble.from_members(nets.unstack(), shared=s) == nets`, but for random streams.

        Args:
            members: at least one.
            shared: as for `Ensemble`; what it picks must be the same in all of them.
            axis_name: as for `Ensemble`.

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
        # What `__init__` would make is there already.
        blank: Any = Ensemble(Identity, 1)
        made = stack_members(members, paths)
        return blank.replace(member=made, n=len(members), shared=paths, axis_name=axis_name)


def _axes(
    title: str, n: int, names: tuple[str, ...], inputs: dict[int | str, Any], in_axes: Any
) -> list[int | None]:
    """The axis of each leaf of the inputs; None for what is the same for all members."""
    rest = "is the same for all members"
    terms = Terms(f"{title}, in_axes", is_axes_spec, None, "in_axes", "0", rest)
    texts = [at if isinstance(at, str) else argument_name(names, at) for at in inputs]
    trees = list(inputs.values())
    positional = sum(isinstance(at, int) for at in inputs)
    # One spec, or a tuple of them, speaks of what has a position, as for `jax.vmap`.
    count = len(trees) if issubclass(class_of(in_axes), dict) else positional
    found = axes_by_argument(in_axes, texts[:count], trees[:count], positional, terms)
    found += [[None] * len(jtu.tree_leaves(tree)) for tree in trees[count:]]
    axes = [axis for of_tree in found for axis in of_tree]
    leaves = [
        (path_text(path, text), leaf)
        for text, tree in zip(texts, trees, strict=True)
        for path, leaf in jtu.tree_leaves_with_path(tree)
    ]
    wrong = [
        f"{path}: {describe(leaf)}, axis {axis}"
        for (path, leaf), axis in zip(leaves, axes, strict=True)
        if axis is not None and not (-leaf.ndim <= axis < leaf.ndim and leaf.shape[axis] == n)
    ]
    if wrong:
        hint = ("One input for all members is passed without in_axes:", "nets(x)")
        expected = f"inputs with an entry for each of {n} members"
        raise ShapeError(title, expected, f"{len(wrong)} without", places=wrong, hint=hint)
    return axes


def _check_read(title: str, shared: Any, read: Any) -> None:
    """Refuse a member that writes what others read at the same time."""
    pairs = zip(jtu.tree_leaves(read), jtu.tree_leaves(shared), strict=True)
    if all(new is old for new, old in pairs):
        return
    hint = (
        "Members write to tokens of their own; write to another one after them:",
        "state = state.set(self.count, n + 1)",
    )
    expected = "members that only read the values that all of them are given"
    raise StateError(title, expected, "one that changes such a value", hint=hint)
