"""`Ensemble`: members of one kind, stored as one and called by a map.

The members are one Module, whose arrays have a leading axis unless they are shared. A call maps
over the values of each member (see `members.layer`), and over the inputs that have an entry for
each member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

from pytreemod.errors import ArgumentError, ShapeError, StateError, describe
from pytreemod.module.field_kinds import checked, size
from pytreemod.nn.calling import in_scope, uses_key_if, wants_key
from pytreemod.nn.members.checks import ENSEMBLE, Owner, check_name
from pytreemod.nn.members.layer import Members
from pytreemod.nn.members.making import make_members
from pytreemod.nn.members.resharding import split_alike
from pytreemod.nn.members.sharing import check_shared, refuse_own_state, shared_paths
from pytreemod.nn.members.stacking import split_members, stack_members
from pytreemod.nn.sequential import Identity
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.values import State
from pytreemod.transform.arguments import Parameters
from pytreemod.transform.axes import ON_AXIS_0, axes_by_argument
from pytreemod.transform.vmap import filter_vmap
from pytreemod.tree.partitioning import combine
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.typing import AxesSpec, FilterSpec, class_of, jtu

_M = TypeVar("_M", bound=Callable[..., Any])


class Ensemble(Members[_M]):
    """Calls members of one kind together, by a map.

    The members are stored as one, whose arrays have a leading axis. They are called by
    [`filter_vmap`][pytreemod.filter_vmap]: the program is the same as for a map written by hand.
    Arrays that `shared` selects are stored once, without that axis. Their gradient is the sum over
    the members.

    Indexing returns a member, slicing an `Ensemble`; `len` and iteration work. Edit the members
    with `tree_at(lambda e: e.member.weight, nets, replace_fn=lambda w: w.at[2].set(0))`.

    On a mesh with explicit axes, members that are split over a mesh axis are computed on the
    devices that have them. Members are gathered if the inputs are split over the same axis.

    **Law.** `nets(x)[i] == nets[i](x)`, and `nets(xs, in_axes=0)[i] == nets[i](xs[i])`.

    Shapes:
        x: any input of a member; with `in_axes`, with one more axis of size n
        return: the output of a member, with a leading axis of size n; a pair with the State if one
            was passed in

    Fields:
        member: the members as one; each array has a leading axis of size n, unless it is shared
        n: the number of members
        shared: the paths, below `member`, of the shared parts

    Args:
        make: makes one member; called once, under a map, as `make(key=k)` with a different key for
            each member, or as `make()` if it takes no `key`.
        n: number of members, >= 1.
        key: split between the members; or the result of `init_keys`.
        shared: a selector on a member: a path, a class, or the result of `pm.select`. The shared
            values are those of the first member.
        axis_name: the name that [`axis_names`][pytreemod.axis_names] gives the leading axis.

    State and randomness: is stateful if its members are, or have tokens without declaring it. Each
        value in the State has a leading axis of size n. Members may read, not write, values of
        tokens that are arguments. There is one stream for each random stream of a member, split
        between the members in every call. A key is split between the members, if they use one.

    Raises:
        ArgumentError: if an argument is invalid.
        RngError: if make needs a key and none was given, or key is not a random key.
        ShapeError: if an array lacks the leading axis, or an input lacks an entry for each member.
        SpecError: if shared selects nothing or everything, or in_axes does not fit the arguments.
        StateError: if shared selects State, a member stores its State in itself, or a member
            returns no State that fits.

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
    # An optimizer treats each member as a model.
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
            refuse_own_state(member)
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
        self, /, *args: Any, key: KeyLike | None = None, in_axes: AxesSpec = None, **kwargs: Any
    ) -> Any:
        """Call all members.

        Args:
            *args: arguments of a member; a State among them is that of all members.
            key: split between the members, if they use one; if None, they are called without a key.
            in_axes: the axis of each input that has an entry for each member: an int for all
                positional arguments, a tuple with one for each except the State, or a dict by name.
                Inputs without such an axis go to every member unchanged; None means all of them.
            **kwargs: arguments of a member by name.

        Returns:
            The outputs of the members, on a leading axis; with a State, the pair of them and the
            new State.
        """
        title, n = self._title(), self.n
        inputs: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        states = [at for at, x in inputs.items() if isinstance(x, State)]
        if len(states) > 1:
            raise ArgumentError(title, "one State", f"{len(states)} States")
        state = inputs.pop(states[0]) if states else None
        leaves, treedef = jtu.tree_flatten(list(inputs.values()))
        axes: list[int | None] = [None] * len(leaves)
        if in_axes is not None:
            axes = _axes(title, n, Parameters.of(self.member), inputs, in_axes)
        mapped = [i for i, axis in enumerate(axes) if axis is not None]
        call, parts, shared, after = self._parts(title, state, key, list(inputs.values()))

        own, (call, shared), leaves = split_alike(parts, (call, shared), leaves, axes)

        def call_one(own: Any, values: Any, key: Any, given: list[Any]) -> Any:
            entries = dict(zip(mapped, given, strict=True))
            trees = treedef.unflatten([entries.get(i, x) for i, x in enumerate(leaves)])

            def invoke(member: Any, state: Any, options: dict[str, Any]) -> Any:
                each = {**dict(zip(inputs, trees, strict=True)), **dict.fromkeys(states, state)}
                positional = [each[i] for i in range(len(args))]
                return member(*positional, **{name: each[name] for name in kwargs}, **options)

            out, values, read = call(invoke, own, values, shared, key)
            _check_read(title, shared, read)
            return out, values

        spec = (0, ON_AXIS_0, 0, [axes[i] for i in mapped])
        over_members = filter_vmap(call_one, in_axes=spec, axis_size=n)
        out, values = over_members(*own, [leaves[i] for i in mapped])
        if after is None:
            return out
        # The State from before the map if every member returned it unchanged.
        return out, state if values is None else after(values, shared)

    @classmethod
    def from_members(
        cls, members: Iterable[_M], *, shared: FilterSpec | None = None, axis_name: str = "members"
    ) -> Ensemble[_M]:
        """Make an Ensemble of existing members, which differ only in the values of their arrays.

        Tokens at the same path in all members become one token, whose value has an entry for each
        member. Initial values of tokens are stacked. A random stream of the first member becomes
        the stream of all.

        **Law.** `Ensemble.from_members(nets.unstack(), shared=s) == nets`, except for random
        streams.

        Args:
            members: at least one.
            shared: as for `Ensemble`; the selected arrays must be equal in all members.
            axis_name: as for `Ensemble`.

        Returns:
            The Ensemble.

        Raises:
            ArgumentError: if there are no members, or the shared parts differ.
            SpecError: if shared selects nothing or everything.
            StateError: if shared selects State, or a member stores its State in itself.
            StructureError: if two members differ; the message has the paths.
        """
        members = list(members)
        if not members:
            raise ArgumentError("Ensemble.from_members", "at least one member", "none")
        refuse_own_state(members[0])
        paths = shared_paths(members[0], shared)
        # Without members: they exist already.
        blank: Any = Ensemble(Identity, 1)
        made = stack_members(members, paths)
        return blank.replace(member=made, n=len(members), shared=paths, axis_name=axis_name)


def _axes(
    title: str, n: int, parameters: Parameters, inputs: dict[int | str, Any], in_axes: Any
) -> list[int | None]:
    """Return the axis of each leaf of the inputs; None if all members share it."""
    texts = [at if isinstance(at, str) else parameters.name(at) for at in inputs]
    named = list(zip(texts, inputs.values(), strict=True))
    positional = sum(isinstance(at, int) for at in inputs)
    # As for `jax.vmap`, an int or a tuple is for positional arguments.
    count = len(named) if issubclass(class_of(in_axes), dict) else positional
    where = f"{title}, in_axes"
    axes = axes_by_argument(in_axes, named[:count], positional, (), where, None)
    axes += [None for _, tree in named[count:] for _ in jtu.tree_leaves(tree)]
    leaves = [
        (path_text(path, text), leaf)
        for text, tree in named
        for path, leaf in jtu.tree_leaves_with_path(tree)
    ]
    wrong = [
        f"{path}: {describe(leaf)}, axis {axis}"
        for (path, leaf), axis in zip(leaves, axes, strict=True)
        if axis is not None and not (-leaf.ndim <= axis < leaf.ndim and leaf.shape[axis] == n)
    ]
    if wrong:
        hint = ("To pass one input to all members, omit in_axes:", "nets(x)")
        expected = f"inputs with an entry for each of {n} members"
        raise ShapeError(title, expected, f"{len(wrong)} without one", at=wrong, hint=hint)
    return axes


def _check_read(title: str, shared: Any, read: Any) -> None:
    """Refuse a member that writes a value which other members read at the same time."""
    pairs = zip(jtu.tree_leaves(read), jtu.tree_leaves(shared), strict=True)
    if all(new is old for new, old in pairs):
        return
    hint = (
        "Members may only write to their own tokens; update a shared value after the call:",
        "state = state.set(self.count, n + 1)",
    )
    expected = "members that only read shared values"
    raise StateError(title, expected, "a member that changes a shared value", hint=hint)
