"""`Stack`: many layers of one kind, stored as one and applied by a scan.

The layers are one Module whose arrays have a leading axis, so JAX traces and compiles one layer,
however many there are. The scan is over everything that differs between layers: see
`members.layer`, and the entries of `per_layer`. The carry is `x`, and the values in State that all
layers share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast, overload

from pytreemod.errors import ArgumentError, StructureError, describe
from pytreemod.module.classes import Module
from pytreemod.module.field_kinds import check_size, checked, size
from pytreemod.nn.arguments import required_state
from pytreemod.nn.calling import ABSENT, Absence, Absent, in_scope, uses_key_if, wants_key
from pytreemod.nn.members.checks import STACK, Owner, check_leading, check_name
from pytreemod.nn.members.layer import MemberCall, Members
from pytreemod.nn.members.making import make_members
from pytreemod.nn.members.resharding import gathered
from pytreemod.nn.members.stacking import stack_members
from pytreemod.nn.sequential import Identity
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.values import State
from pytreemod.transform.checkpoints import filter_checkpoint
from pytreemod.transform.scans import filter_scan
from pytreemod.tree.differences import Difference, aval_of, compare
from pytreemod.tree.split_arrays import sharded_as

_L = TypeVar("_L", bound=Callable[..., Any])


def _check_remat(where: str, remat: Any) -> bool | Callable[..., Any]:
    if isinstance(remat, bool) or (callable(remat) and not isinstance(remat, type)):
        return remat
    raise ArgumentError(where, "True, False or a policy", describe(remat))


def _check_unroll(where: str, unroll: Any) -> int | bool:
    return unroll if isinstance(unroll, bool) else check_size(where, unroll, 1)


class Stack(Members[_L]):
    """Applies many layers of one kind in sequence; JAX traces and compiles them once.

    The layers are stored as one, whose arrays have a leading axis, and applied by
    [`filter_scan`][pytreemod.filter_scan]. So all layers have the same configuration, and the
    output of each has the structure, shapes and dtypes of its input.

    Indexing returns a layer, slicing a `Stack`; `len` and iteration work. Edit the layers with
    `tree_at(lambda s: s.layer.weight, stack, replace_fn=lambda w: w.at[2].set(0))`.

    On a mesh with explicit axes, the output is sharded like x. Arrays that are sharded along the
    layers are gathered once, before the scan, for all layers. To save memory while the layers run,
    shard another axis.

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
        depth: number of layers, >= 0.
        key: split between the layers; or the result of `init_keys`.
        remat: whether to recompute each layer in the backward pass, instead of storing its
            intermediate results; or a policy that decides what to store, see
            `jax.checkpoint_policies`.
        unroll: number of layers in each step of the scan; True for all.
        axis_name: the name that [`axis_names`][pytreemod.axis_names] gives the leading axis.

    State and randomness: is stateful if its layer is, or has tokens without declaring it. Each
        value in the State has a leading axis of size depth. Each random stream of a layer is one
        stream, split between the layers in every call. A key is split between the layers, if they
        use one.

    Raises:
        ArgumentError: if an argument is invalid.
        RngError: if make_layer needs a key and none was given, or key is not a random key.
        ShapeError: if an array lacks the leading axis.
        StateError: if the layers need State and none was passed in, or one that does not fit.
        StructureError: if a layer changes the structure, shapes or dtypes of x; the message has the
            paths.

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

    owner: ClassVar[Owner] = STACK

    layer: _L
    depth: int = size()
    remat: bool | Callable[..., Any] = checked(_check_remat)
    unroll: int | bool = checked(_check_unroll)
    axis_name: str = checked(check_name, default="layers")

    def __init__(
        self,
        make_layer: Callable[..., _L],
        depth: int,
        *,
        key: KeyLike | None = None,
        remat: bool | Callable[..., Any] = False,
        unroll: int | bool = 1,
        axis_name: str = "layers",
    ):
        self.depth, self.remat, self.unroll, self.axis_name = depth, remat, unroll, axis_name
        self.layer = make_members(STACK, make_layer, self.depth, key)

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
            key: split between the layers, if they use one; if None, they are called without a key.
            per_layer: further arguments by name, with a leading axis: one entry for each layer.
            **same: further arguments by name, the same for all layers, such as a mask. All layers
                read and write the same State values of tokens in them.

        Returns:
            The last layer's output; with `state`, the pair of it and the new State.
        """
        title, depth = self._title(), self.depth
        if not isinstance(state, (State, Absence)):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
            arguments = "x, state" if self.is_stateful() else "x"
            hint = (
                "Pass further arguments for the layers, and a key, by name:",
                f"stack({arguments}, mask=mask, key=key)",
            )
            raise ArgumentError(title, "a State", describe(state), hint=hint)
        extra = _further(title, per_layer, same)
        if same or extra:
            check_leading(STACK, title, depth, {"per_layer": extra})
        given = state if self.is_stateful() else None
        # Without a State, layers that do not require one are called without it.
        if isinstance(given, Absence) and self.needs_state():
            required_state(title, state)
        call, parts, shared, after = self._parts(title, given, key, same)
        (x, shared), values = filter_scan(
            self._recomputing(_Step(call, same)),
            (x, shared),
            gathered((*parts, extra)),
            length=depth,
            unroll=self.unroll,
        )
        if after is None or values is None:
            return x if isinstance(state, Absence) else (x, state)
        return x, after(values, shared)

    @classmethod
    def from_layers(
        cls,
        layers: Iterable[_L],
        *,
        remat: bool | Callable[..., Any] = False,
        unroll: int | bool = 1,
        axis_name: str = "layers",
    ) -> Stack[_L]:
        """Make a Stack of existing layers, which differ only in the values of their arrays.

        Tokens at the same path in all layers become one token, whose value has an entry for each
        layer, even if the same object is given twice. Initial values of tokens are stacked. A
        random stream of the first layer becomes the stream of all.

        **Law.** `Stack.from_layers(stack.unstack()) == stack`, except for random streams.

        Args:
            layers: at least one.
            remat: as for `Stack`.
            unroll: as for `Stack`.
            axis_name: as for `Stack`.

        Returns:
            The Stack.

        Raises:
            ArgumentError: if there are no layers.
            StructureError: if two layers differ; the message has the paths.
        """
        layers = list(layers)
        if not layers:
            hint = ("Create a Stack without layers by", "nn.Stack(make_layer, 0)")
            raise ArgumentError("Stack.from_layers", "at least one layer", "none", hint=hint)
        # Without layers: they exist already.
        blank: Any = Stack(Identity, 0, remat=remat, unroll=unroll, axis_name=axis_name)
        return blank.replace(layer=stack_members(layers), depth=len(layers))

    def _recomputing(self, step: _Step) -> Callable[..., Any]:
        if self.remat is False:
            return step
        # Inside a loop XLA cannot undo the recomputation; without a loop it would.
        no_loop = self.unroll is True or self.unroll >= self.depth
        policy = None if isinstance(self.remat, bool) else self.remat
        return filter_checkpoint(step, prevent_cse=no_loop, policy=policy)


def _further(title: str, per_layer: Any, same: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that differ between layers; refuse a name that is used twice."""
    if per_layer is None:
        return {}
    if not isinstance(per_layer, Mapping):
        raise ArgumentError(title, "per_layer to be a dict by name", describe(per_layer))
    extra = dict(cast("Mapping[str, Any]", per_layer))
    twice = sorted(extra.keys() & {"key", "state", *same})
    if twice:
        raise ArgumentError(title, "each argument once", f"{twice[0]} twice, also in per_layer")
    return extra


class _Step(Module):
    """One step of the scan: a layer, applied to the output of the previous one."""

    call: MemberCall
    same: dict[str, Any]

    def __call__(self, carry: Any, each: Any) -> Any:
        (x, shared), (own, values, key, extra) = carry, each

        def invoke(layer: Any, state: Any, options: dict[str, Any]) -> Any:
            args = (x,) if state is None else (x, state)
            return layer(*args, **self.same, **extra, **options)

        out, values, after = self.call(invoke, own, values, shared, key)
        out = _as_before(self.call.title, x, out)
        # The carry of a scan has one type, which includes the mesh.
        return sharded_as((out, after), (x, shared)), values


def _as_before(title: str, x: Any, out: Any) -> Any:
    """Return the output of a layer, or refuse it if the next layer could not take it."""
    found = compare(x, out, _agree)
    if not found:
        return out
    raise StructureError(
        title,
        "an output with the type of the input, from each layer",
        f"{len(found)} change{'s' * (len(found) > 1)}",
        at=[each.line("x") for each in found],
        hint=_hint(found),
    )


def _agree(before: Any, after: Any) -> bool:
    a, b = aval_of(before), aval_of(after)
    if a.shape != b.shape:
        return False
    # The scan widens a first carry of a weak type that the layers would widen.
    return a.dtype == b.dtype or bool(getattr(a, "weak_type", False))


def _hint(found: Sequence[Difference]) -> Sequence[str]:
    if all(entry.of_dtypes for entry in found):
        dtype = aval_of(found[0].new).dtype.name
        return ("Start from that dtype, or cast in the layer:", f"stack(x.astype(jnp.{dtype}))")
    return (
        "Put a layer that changes it before or after the Stack:",
        "nn.Sequential([first, nn.Stack(make_layer, depth), last])",
    )
