"""`Stack` and `Ensemble`: several Modules of one kind, stored as one with a leading axis.

A `Stack` applies its layers one after the other, by `filter_scan`; an `Ensemble` calls its members
side by side, by `filter_vmap`. Both make them in one call of the constructor under `filter_vmap`,
and give each its own arrays, its own key, and its own part of the State: a value in State has the
leading axis as well, and a random stream is split for the call and joined after it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar, overload

import jax

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.base import StatefulLayer, call_layer, takes_key, takes_state
from pytreemod.nn.meshes import split_alike, unsplit
from pytreemod.nn.sequential import Identity
from pytreemod.state import streams
from pytreemod.state.key_sources import InitKeys, KeyLike
from pytreemod.state.making import delete_init_state
from pytreemod.state.streams import Stream
from pytreemod.state.tokens import RngStream, Unnamed, map_tokens, tokens_of
from pytreemod.state.values import State
from pytreemod.transform.axes import ON_AXIS_0
from pytreemod.transform.checkpoints import filter_checkpoint
from pytreemod.transform.scans import filter_scan
from pytreemod.transform.vmap import filter_vmap
from pytreemod.tree import stacking
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.prefixes import combine, partition
from pytreemod.tree.split_arrays import sharded_as
from pytreemod.typing import AxesSpec, is_instance, jtu

_M = TypeVar("_M", bound=Callable[..., Any])
_S = TypeVar("_S", bound="Stacked[Any]")


class Stacked(StatefulLayer, Generic[_M], is_abstract=True):
    """What `Stack` and `Ensemble` share: they are a sequence of Modules, stored as one."""

    members: ClassVar[str]  # the name of the field that has them
    number: ClassVar[str]  # and of the field with their number

    def __stacked__(self) -> tuple[str, ...]:
        return (self.members,)

    def is_stateful(self) -> bool:
        """Whether its layers are called with a State."""
        return takes_state(self._all()) or bool(tokens_of(self._all()))

    def unstack(self) -> list[_M]:
        """Return the Modules as a list.

        Each gets new tokens, with the initial values for it, if there are initial values here. To
        use the values of a State, put them into the model first:

            model = state.fill(model)
            model = pm.tree_at(lambda m: m.blocks, model, replace_fn=lambda s: s.unstack())
            model, state = pm.make_with_state(lambda: model)()
        """
        return [self[i] for i in range(len(self))]

    def __len__(self) -> int:
        return getattr(self, self.number)

    def __iter__(self) -> Iterator[_M]:
        yield from self.unstack()

    @overload
    def __getitem__(self, index: int) -> _M: ...

    @overload
    def __getitem__(self: _S, index: slice) -> _S: ...

    def __getitem__(self, index: int | slice) -> Any:
        """Return one of the Modules, or several as one by a slice; tokens are new."""
        chosen: Any = range(len(self))[index]
        is_part = isinstance(index, slice)
        # One stream serves any number of them.
        member = self._all() if is_part else _with_split_streams(self._all(), len(self))
        own, rest = self._parts(member)
        part = _renewed(combine(jtu.tree_map(operator.itemgetter(index), own), rest))
        return self.replace(**{self.members: part, self.number: len(chosen)}) if is_part else part

    def _all(self) -> Any:
        return getattr(self, self.members)

    def _parts(self, member: Any) -> tuple[Any, Any]:
        """Return the arrays, which have an entry for each, and what is the same for all."""
        # A single number, which a plain transform has made an array, has no axis for layers.
        own, rest = partition(member, _has_axes)
        wrong = [
            f"{path_text(path, self.members)}: {describe(leaf)}"
            for path, leaf in jtu.tree_leaves_with_path(own)
            if leaf.shape[:1] != (len(self),)
        ]
        if wrong:
            where = f"{type(self).__name__}({self.number}={len(self)})"
            expected = f"arrays with a leading axis of {len(self)}"
            raise ShapeError(where, expected, f"{len(wrong)} without one", at=wrong)
        return own, rest

    def _inputs(self, key: KeyLike | None, state: State | None) -> tuple[Any, ...]:
        """Return what is the same for all, and of each one: its arrays, its key, its State."""
        # The State has the values of tokens now; initial values would be split as the arrays are.
        own, rest = self._parts(delete_init_state(self._all()))
        keys = None if key is None else _keys(key, len(self))
        part = None
        if state is not None and self.is_stateful():
            part = state.substate(self._all())
            part = part.split(len(self)) if _has_seeded_streams(part) else part
        return rest, own, keys, part

    def _joined(self, state: Any, part: Any) -> Any:
        """Return the State with the new values; the given one if all have changed nothing."""
        if part is None:
            return state
        part = part.join() if _has_seeded_streams(part) else part
        # On a mesh, values stay split as they were.
        return state.update(sharded_as(part, state.substate(self._all())))


class Stack(Stacked[_M]):
    """Applies many layers of one kind in sequence; JAX traces and compiles them once.

    The layers are stored as one, whose arrays have a leading axis, and applied by
    [`filter_scan`][pytreemod.filter_scan]. So all layers have the same configuration, and the
    output of each has the structure, shapes and dtypes of its input.

    Indexing returns a layer, slicing a `Stack`; `len` and iteration work. Edit the layers with
    `tree_at(lambda s: s.layer.weight, stack, replace_fn=lambda w: w.at[2].set(0))`.

    **Law.** `stack(x)` equals `x` after `for layer in stack: x = layer(x)`. With State, it equals
    the same loop over the list of layers and the State that `unstack` shows how to make.

    Shapes:
        x: any input of a layer
        return: the structure, shapes and dtypes of x; a pair with the State if one was passed in

    Fields:
        layer: the layers as one; each array has a leading axis of size depth

    Args:
        make_layer: makes one layer; called once, under a map, as `make_layer(key=k)` with a
            different key for each layer, or as `make_layer()` if it takes no `key`.
        depth: number of layers.
        key: split between the layers; or the result of `init_keys`.
        remat: whether to recompute each layer in the backward pass, instead of storing its
            intermediate results; or a policy that decides what to store, see
            `jax.checkpoint_policies`.
        unroll: number of layers in each step of the scan; True for all.
        axis_name: the name that [`axis_names`][pytreemod.axis_names] gives the leading axis.

    State and randomness: each value in the State has a leading axis of size depth. Each random
        stream of a layer is one stream, split between the layers in every call. A key is split
        between the layers.

    Raises:
        ShapeError: if an array lacks the leading axis.
        StateError: if a layer does not return the State that it got.
        StructureError: if a layer changes the structure, shapes or dtypes of x.

    Examples:
        >>> import functools as ft
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> make_layer = ft.partial(nn.Linear, 3, 3)
        >>> stack = nn.Stack(make_layer, 20, key=jax.random.key(0))
        >>> stack.layer.weight.shape, stack(jnp.ones((7, 3))).shape
        ((20, 3, 3), (7, 3))
        >>> len(stack), len(stack[5:]), stack[0].weight.shape
        (20, 15, (3, 3))
    """

    members: ClassVar[str] = "layer"
    number: ClassVar[str] = "depth"

    layer: _M
    depth: int = field(static=True)
    remat: bool | Callable[..., Any] = field(static=True)
    unroll: int | bool = field(static=True)
    axis_name: str = field(static=True, default="layers")

    def __init__(
        self,
        make_layer: Callable[..., _M],
        depth: int,
        *,
        key: KeyLike | None = None,
        remat: bool | Callable[..., Any] = False,
        unroll: int | bool = 1,
        axis_name: str = "layers",
    ):
        self.depth, self.remat, self.unroll, self.axis_name = depth, remat, unroll, axis_name
        self.layer = _made(make_layer, depth, key)

    def __call__(
        self,
        x: Any,
        state: State | None = None,
        *,
        key: KeyLike | None = None,
        per_layer: Mapping[str, Any] | None = None,
        **same: Any,
    ) -> Any:
        """Apply the layers.

        Args:
            x: the first layer's input.
            state: for layers that are stateful.
            key: split between the layers; if None, they are called without a key.
            per_layer: further arguments by name, with a leading axis: one entry for each layer.
            **same: further arguments by name, the same for all layers, such as a mask.

        Returns:
            The last layer's output; with `state`, the pair of it and the new State.
        """
        rest, *each = self._inputs(key, state)
        step: Any = _StackStep(_Call(rest, same, "layer", "a Stack"))
        if self.remat is not False:
            # Inside a loop XLA cannot undo the recomputation; without a loop it would.
            no_loop = self.unroll is True or self.unroll >= self.depth
            policy = None if self.remat is True else self.remat
            step = filter_checkpoint(step, prevent_cse=no_loop, policy=policy)
        inputs = unsplit((*each, dict(per_layer or {})))
        with jax.named_scope("pm.nn.Stack"):
            x, part = filter_scan(step, x, inputs, length=self.depth, unroll=self.unroll)
        return x if state is None else (x, self._joined(state, part))

    @classmethod
    def from_layers(cls, layers: Iterable[_M], **options: Any) -> Stack[_M]:
        """Make a Stack of existing layers, which differ only in the values of their arrays.

        Tokens at the same path in all layers become one token, whose value has an entry for each
        layer. A random stream of the first layer becomes the stream of all.

        **Law.** `Stack.from_layers(stack.unstack()) == stack`, except for random streams.

        Args:
            layers: at least one.
            **options: remat, unroll and axis_name, as for `Stack`.

        Returns:
            The Stack.

        Raises:
            ArgumentError: if there are no layers.
            StructureError: if two layers differ; the message has the paths.
        """
        layers = list(layers)
        blank: Any = Stack(Identity, 0, **options)
        return blank.replace(layer=_stacked(layers), depth=len(layers))


class _Call(Module):
    """Calls one of the Modules: with its own arrays, key and part of the State."""

    rest: Any
    same: dict[str, Any]
    one: str = field(static=True)
    of: str = field(static=True)

    def __call__(self, own: Any, key: Any, state: Any, inputs: Any, **options: Any) -> Any:
        member = combine(own, self.rest)
        try:
            out, after = call_layer(member, inputs, state, key, **self.same, **options)
        except Exception as error:
            error.add_note(f"in {self.one}: {type(member).__name__} of {self.of}")
            raise
        return out, None if after is state else after


class _StackStep(Module):
    """One step of the scan: a layer, applied to the output of the previous one."""

    call: _Call

    def __call__(self, x: Any, each: tuple[Any, ...]) -> tuple[Any, Any]:
        own, key, state, extra = each
        out, part = self.call(own, key, state, [x], **extra)
        # The carry of a scan has one type, which includes the sharding on an explicit mesh.
        return sharded_as(out, x), part


class Ensemble(Stacked[_M]):
    """Calls members of one kind together, by a map.

    The members are stored as one, whose arrays have a leading axis. They are called by
    [`filter_vmap`][pytreemod.filter_vmap]: the program is the same as for a map written by hand.
    What all members share is put beside them: `Model(trunk, nn.Ensemble(make_head, n))`.

    Indexing returns a member, slicing an `Ensemble`; `len` and iteration work. Edit the members
    with `tree_at(lambda e: e.member.weight, nets, replace_fn=lambda w: w.at[2].set(0))`.

    **Law.** `nets(x)[i] == nets[i](x)`, and `nets(xs, in_axes=0)[i] == nets[i](xs[i])`.

    Shapes:
        x: any input of a member; with `in_axes`, with one more axis of size n
        return: the output of a member, with a leading axis of size n; a pair with the State if one
            was passed in

    Fields:
        member: the members as one; each array has a leading axis of size n
        n: the number of members

    Args:
        make: makes one member; called once, under a map, as `make(key=k)` with a different key for
            each member, or as `make()` if it takes no `key`.
        n: number of members.
        key: split between the members; or the result of `init_keys`.
        axis_name: the name that [`axis_names`][pytreemod.axis_names] gives the leading axis.

    State and randomness: each value in the State has a leading axis of size n. There is one stream
        for each random stream of a member, split between the members in every call. A key is split
        between the members.

    Raises:
        ShapeError: if an array lacks the leading axis, or an input lacks an entry for each member.
        StateError: if a member does not return the State that it got.

    Examples:
        >>> import functools as ft
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nets = nn.Ensemble(ft.partial(nn.MLP, 3, 2, 8, 1), 5, key=jax.random.key(0))
        >>> nets(jnp.ones((7, 3))).shape, nets(jnp.ones((5, 7, 3)), in_axes=0).shape
        ((5, 7, 2), (5, 7, 2))
        >>> len(nets), len(nets[1:]), nets[0](jnp.ones(3)).shape
        (5, 4, (2,))
    """

    members: ClassVar[str] = "member"
    number: ClassVar[str] = "n"
    # An optimizer treats each member as a model.
    __has_independent_members__: ClassVar[bool] = True

    member: _M
    n: int = field(static=True)
    axis_name: str = field(static=True, default="members")

    def __init__(
        self,
        make: Callable[..., _M],
        n: int,
        *,
        key: KeyLike | None = None,
        axis_name: str = "members",
    ):
        self.n, self.axis_name = n, axis_name
        self.member = _made(make, n, key)

    def __call__(
        self,
        /,
        *args: Any,
        state: State | None = None,
        key: KeyLike | None = None,
        in_axes: AxesSpec = None,
        **options: Any,
    ) -> Any:
        """Call all members.

        Args:
            *args: arguments of a member; a State may be among them. The members get their parts of
                it by the name `state`, or after the others if they have no such parameter.
            state: the State of all members, if it is not among `args`.
            key: split between the members; if None, they are called without a key.
            in_axes: the axis of each positional input that has an entry for each member: an int for
                all of them, or a tuple with one for each except the State. Other inputs go to every
                member unchanged; None means all of them.
            **options: arguments of a member by name, the same for all.

        Returns:
            The outputs of the members, on a leading axis; with a State, the pair of them and the
            new State.
        """
        states = [arg for arg in (*args, state) if isinstance(arg, State)]
        state = states[0] if states else None
        inputs = [arg for arg in args if not isinstance(arg, State)]
        rest, *each = self._inputs(key, state)
        axes: list[Any] = [in_axes] * len(inputs)
        if is_instance(in_axes, (tuple, list)):
            axes = [*in_axes]
        each, (rest, options), inputs = split_alike(each, (rest, options), inputs, axes)
        call: Any = filter_vmap(
            _Call(rest, options, "member", "an Ensemble"),
            in_axes=(0, 0, ON_AXIS_0, axes),
            axis_size=self.n,
        )
        with jax.named_scope("pm.nn.Ensemble"):
            out, part = call(*each, inputs)
        return out if state is None else (out, self._joined(state, part))

    @classmethod
    def from_members(cls, members: Iterable[_M], *, axis_name: str = "members") -> Ensemble[_M]:
        """Make an Ensemble of existing members, which differ only in the values of their arrays.

        Tokens at the same path in all members become one token, whose value has an entry for each
        member. A random stream of the first member becomes the stream of all.

        **Law.** `Ensemble.from_members(nets.unstack()) == nets`, except for random streams.

        Args:
            members: at least one.
            axis_name: as for `Ensemble`.

        Returns:
            The Ensemble.

        Raises:
            ArgumentError: if there are no members.
            StructureError: if two members differ; the message has the paths.
        """
        members = list(members)
        blank: Any = Ensemble(Identity, 1, axis_name=axis_name)
        return blank.replace(member=_stacked(members), n=len(members))


def _keys(key: KeyLike, n: int) -> Any:
    return key.take(n) if isinstance(key, InitKeys) else jax.random.split(key, n)


def _made(make: Callable[..., _M], n: int, key: KeyLike | None) -> _M:
    """Make `n` Modules as one; each gets its own key, if there is one and `make` takes it."""
    keys = None if key is None or not takes_key(make) else _keys(key, n)

    # Mapped even without keys, so that every array has the leading axis.
    def make_one(key: Any) -> _M:
        return make() if key is None else make(key=key)

    return filter_vmap(make_one, axis_size=n)(keys)


def _stacked(members: list[Any]) -> Any:
    """Stack Modules; tokens at one path become one, which no State has yet."""
    if not members:
        raise ArgumentError("a Stack or an Ensemble of existing layers needs at least one")
    markers = [Unnamed() for _ in tokens_of(members[0])]
    alike = [len(tokens_of(member)) == len(markers) for member in members]
    # If the tokens differ, the error of stacking says where.
    named = [_marked(member, iter(markers)) for member in members] if all(alike) else members

    def first(stream: Stream) -> Stream:
        return jtu.tree_map(operator.itemgetter(0), stream)

    return _on_streams(stacking.stack(named), first)


def _renewed(member: Any) -> Any:
    """Give tokens new names, because a State has the values of all members under the old ones."""
    return _marked(member, iter([Unnamed() for _ in tokens_of(member)]))


def _marked(member: Any, markers: Iterator[Any]) -> Any:
    return map_tokens(lambda token: token.replace(marker=next(markers)), member)


def _with_split_streams(member: Any, n: int) -> Any:
    """Give initial values of streams the leading axis that all others have."""

    def split(stream: Stream) -> Stream:
        if stream.key is None:
            return stream
        several: Any = streams.split(stream, n)
        # These are not joined again; the original stream goes on.
        return Stream(several.key, several.count, several.outer[2])

    return _on_streams(member, split)


def _on_streams(member: Any, change: Callable[[Stream], Stream]) -> Any:
    def visit(token: Any) -> Any:
        if not isinstance(token, RngStream) or token.init is None:
            return token
        return token.replace(init=change(token.init))

    return map_tokens(visit, member)


def _has_axes(leaf: Any) -> bool:
    return is_array(leaf) and leaf.ndim > 0


def _has_seeded_streams(state: State) -> bool:
    return any(
        kind is RngStream and value.key is not None
        for kind, value in zip(state.__token_types__(), state.__values__().values(), strict=True)
    )
