"""`Stack`: many layers of one kind as one layer, applied by a scan.

The layers are one Module, whose arrays have a leading axis, so that JAX traces and compiles one
layer, however many there are. A call splits what is for each layer (its arrays, its part of the
State, its key, the entries of `per_layer`) from what goes from one to the next (`x`, and values in
State that all layers share), and leaves the rest to `filter_scan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast, overload

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError
from pytreemod.module.fields import field
from pytreemod.nn.arguments import check_held_number, check_key, check_size, named
from pytreemod.nn.calling import (
    ABSENT,
    Absence,
    Absent,
    StatefulLayer,
    in_scope,
    needs_state,
    uses_key_if,
    wants_key,
)
from pytreemod.nn.members.checks import STACK, check_keywords, check_leading
from pytreemod.nn.members.making import make_members
from pytreemod.nn.members.state import MemberStates
from pytreemod.nn.members.taking import each, merged, some
from pytreemod.nn.sequential import Identity
from pytreemod.nn.stack.refusals import (
    check_further,
    check_remat,
    check_second,
    check_unroll,
    given_state,
)
from pytreemod.nn.stack.step import Step
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.making import delete_init_state
from pytreemod.state.tokens import tokens_of
from pytreemod.state.values import State
from pytreemod.transform.boundary.surrounded_calls import with_numbers, without_numbers
from pytreemod.transform.control_flow.scans import filter_scan
from pytreemod.transform.derivatives.checkpoints import filter_checkpoint

_L = TypeVar("_L", bound=Callable[..., Any])
_S = TypeVar("_S", bound="Stack[Any]")


class Stack(StatefulLayer, Generic[_L]):
    """Many layers of one kind, one after the other: traced and compiled once, however many.

    The layers are kept as one, whose arrays have a leading axis, and applied by
    [`filter_scan`][pytreemod.filter_scan]. So all have the same configuration, and each gives back
    what it takes: same structure, shapes and dtypes.

    Indexing gives a layer, slicing a `Stack`; `len` and iteration work. Edit what is inside as
    anywhere: `tree_at(lambda s: s.layer.weight, stack, replace_fn=lambda w: w.at[2].set(0))`.

    **Law.** `stack(x)` is `x` after `for layer in stack: x = layer(x)`; with State, the same holds
    for the list of layers and the State that `unstack` shows how to make.

    Shapes:
        x: whatever a layer takes
        return: the structure, shapes and dtypes of x; a pair with the State if one was passed in

    Fields:
        layer: the layers as one; each array has a leading axis of size depth

    Args:
        make_layer: makes one layer; called once, mapped, as `make_layer(key=k)` with a key of its
            own for each layer, or as `make_layer()` if it takes no `key`.
        depth: how many layers, >= 0.
        key: split between the layers; or what `init_keys` gave.
        remat: whether to recompute what each layer computed, in the backward pass, instead of
            storing it; or a policy that says what may be stored, see `jax.checkpoint_policies`.
        unroll: how many layers to write out in each step of the scan; True for all.

    State and randomness: is stateful if its layer is, or has tokens without saying so. Each value
        in the State has a leading axis of size depth. Each random stream is one, split between the
        layers in every call. A key is split between the layers, if they use one.

    Raises:
        ArgumentError: an argument is unusable.
        RngError: make_layer needs a key and none was given, or key is no random key.
        ShapeError: an array has not the leading axis.
        StateError: the layers need State and none was passed in, or one that does not fit.
        StructureError: a layer does not give back what it takes; the paths are named.

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

    layer: _L
    depth: int = field(static=True)
    remat: bool | Callable[..., Any] = field(static=True)
    unroll: int | bool = field(static=True)

    def __init__(
        self,
        make_layer: Callable[..., _L],
        depth: int,
        *,
        key: KeyLike | None = None,
        remat: bool | Callable[..., Any] = False,
        unroll: int | bool = 1,
    ):
        self.depth = check_size(named(self, "depth"), depth)
        self.remat = check_remat(named(self, "remat"), remat)
        self.unroll = check_unroll(named(self, "unroll"), unroll)
        self.layer = make_members(STACK, make_layer, self.depth, key)

    def __stacked__(self) -> tuple[str, ...]:
        # Asked by whoever means each layer's arrays, and not the stack of them.
        return ("layer",)

    def replace(self: _S, /, **changes: Any) -> _S:  # noqa: D102  (as that of Module)
        made = super().replace(**changes)
        check_held_number(self, changes, "depth", "layer")
        return made

    def __check_init__(self) -> None:
        # Here as well, for `replace` and `with_mode` come this way.
        check_size(named(self, "depth"), self.depth)
        check_remat(named(self, "remat"), self.remat)
        check_unroll(named(self, "unroll"), self.unroll)

    @overload
    def __call__(
        self,
        x: Any,
        *,
        key: KeyLike | None = None,
        per_layer: Mapping[str, Any] | None = None,
        **same: Any,
    ) -> Any: ...

    @overload
    def __call__(
        self,
        x: Any,
        state: State,
        *,
        key: KeyLike | None = None,
        per_layer: Mapping[str, Any] | None = None,
        **same: Any,
    ) -> tuple[Any, State]: ...

    @uses_key_if(lambda stack: wants_key(stack.layer))
    @in_scope("pm.nn.Stack")
    def __call__(
        self,
        x: Any,
        state: State | Absent = ABSENT,
        *,
        key: KeyLike | None = None,
        per_layer: Mapping[str, Any] | None = None,
        **same: Any,
    ) -> Any:
        """Apply the layers.

        Args:
            x: the first layer's input.
            state: for layers that are stateful.
            key: split between the layers, if they use one; they are called without if it is None.
            per_layer: further arguments by name, with a leading axis: one entry for each layer.
            **same: further arguments by name, the same for all layers, such as a mask. If there
                are tokens in them, all layers read and write the same values in State.

        Returns:
            The last layer's output; with `state`, the pair of it and the new State.
        """
        title, depth = self._title(), self.depth
        # Layers that can do without State do so, where none is given.
        is_stateful = self.needs_state() if isinstance(state, Absence) else self.is_stateful()
        check_second(title, self.is_stateful(), state)
        extra = check_further(title, per_layer, same)
        if same or extra:
            check_keywords(title, self.layer, [*same, *extra])
        # Rules around the layers, if there are any, are told which layer it is.
        layer, outer = without_numbers(self.layer)
        numbers = None if outer is None else jnp.arange(depth)
        # The State has them; what is left in the layer would be taken apart as its arrays are.
        layer = delete_init_state(layer) if is_stateful else layer
        check_leading(STACK, title, depth, {"layer": layer, "per_layer": extra})
        keys = None
        # Keys that nobody uses would be split in the program all the same.
        if key is not None and wants_key(self.layer):
            keys = jax.random.split(check_key(title, key), depth)
        values = None
        if is_stateful:
            given = given_state(title, layer, state)
            values = MemberStates(STACK, title, layer, depth, same, given)
        step = Step(same, outer, title, None if values is None else values.form)
        own, shared = ((), ()) if values is None else (values.own, values.shared)
        (x, shared), own = filter_scan(
            self._recomputing(step),
            (x, shared),
            (layer, own, keys, extra, numbers),
            length=depth,
            unroll=self.unroll,
        )
        if values is None:
            return x if isinstance(state, Absence) else (x, state)
        # None: every layer gave its State back as it was, and so does the Stack.
        return x, cast("State", state) if own is None else values.after(own, shared)

    def is_stateful(self) -> bool:
        """Whether the layers need State.

        Returns:
            True or False.
        """
        if isinstance(self.layer, StatefulLayer):
            return self.layer.is_stateful()
        return bool(tokens_of(self.layer))

    def needs_state(self) -> bool:
        """Whether the layers cannot be called without State.

        Returns:
            True or False.
        """
        return self.is_stateful() and needs_state(self.layer)

    @classmethod
    def from_layers(
        cls,
        layers: Iterable[_L],
        *,
        remat: bool | Callable[..., Any] = False,
        unroll: int | bool = 1,
    ) -> Stack[_L]:
        """A Stack of layers that exist, which differ in nothing but the values of their arrays.

        Tokens at one place in all layers become one, whose value has an entry for each layer: every
        layer is one of its own, also where the same object is given twice. If they hold initial
        values, these are stacked; of random streams, the first layer's goes on for all.

        **Law.** `Stack.from_layers(stack.unstack()) == stack`, but for random streams.

        Args:
            layers: at least one.
            remat: as for `Stack`.
            unroll: as for `Stack`.

        Returns:
            The Stack.

        Raises:
            ArgumentError: there are no layers.
            StructureError: two layers differ; the paths are named.
        """
        layers = list(layers)
        if not layers:
            hint = ("A Stack of none is made by", "nn.Stack(make_layer, 0)")
            raise ArgumentError("Stack.from_layers", "at least one layer", "none", hint=hint)
        # What `__init__` would make is there already.
        blank: Any = Stack(Identity, 0, remat=remat, unroll=unroll)
        return blank.replace(layer=merged(layers), depth=len(layers))

    def unstack(self) -> list[_L]:
        """The layers one by one, as they would stand in a list in the place of the Stack.

        Each has tokens of its own, which hold the values for that layer if those of the Stack hold
        values. To take the values out of a State, put them into the model first:

            model = state.fill(model)
            model = pm.tree_at(lambda m: m.blocks, model, replace_fn=lambda s: s.unstack())
            model, state = pm.make_with_state(lambda: model)()

        Returns:
            A list of layers.

        Raises:
            ShapeError: an array has not the leading axis.
        """
        layer, outer = without_numbers(self.layer)
        members = each(STACK, self._title(), layer, self.depth)
        return [with_numbers(member, outer) for member in members]

    @overload
    def __getitem__(self, index: int) -> _L: ...

    @overload
    def __getitem__(self, index: slice) -> Stack[_L]: ...

    def __getitem__(self, index: int | slice) -> _L | Stack[_L]:
        """A layer by number, or several as a `Stack`; with tokens of their own, as `unstack`."""
        layer, outer = without_numbers(self.layer)
        part = with_numbers(some(STACK, self._title(), layer, self.depth, index), outer)
        if not isinstance(index, slice):
            return part
        return self.replace(layer=part, depth=len(range(self.depth)[index]))

    def __iter__(self) -> Iterator[_L]:
        yield from self.unstack()

    def __len__(self) -> int:
        return self.depth

    def _title(self) -> str:
        return f"Stack({type(self.layer).__name__}, depth={self.depth})"

    def _recomputing(self, step: Step) -> Callable[..., Any]:
        if self.remat is False:
            return step
        # Inside a loop XLA cannot undo the recomputing; without one it would.
        no_loop = self.unroll is True or self.unroll >= self.depth
        policy = None if isinstance(self.remat, bool) else self.remat
        return filter_checkpoint(step, prevent_cse=no_loop, policy=policy)
