"""`Stack`: many layers of one kind as one layer, applied by a scan."""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast, overload

import jax
from jaxtyping import PRNGKeyArray

from pytreemod.errors import (
    ArgumentError,
    RngError,
    ShapeError,
    StateError,
    StructureError,
    describe,
    explain,
)
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.checking import KEY_CURE, check_key, check_size, named
from pytreemod.nn.composition import Identity
from pytreemod.nn.statefulness import ABSENT, Absence, Absent, StatefulLayer
from pytreemod.state import streams
from pytreemod.state.streams import Stream
from pytreemod.state.tokens import RngStream, StateIndex, Unnamed
from pytreemod.state.values import State, exchange_entries, is_token, tokens_of
from pytreemod.transform.agreeing import Difference, aval_of, differences, may_be_promoted
from pytreemod.transform.looping import filter_scan
from pytreemod.transform.mapping import filter_vmap
from pytreemod.transform.rematerializing import filter_checkpoint
from pytreemod.transform.stacking import stack as stack_trees
from pytreemod.transform.stacking import unstack as unstack_tree
from pytreemod.tree.nodes import children_of, stop_below
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.typing import jtu

_L = TypeVar("_L", bound=Callable[..., Any])

FIELD = jtu.GetAttrKey("layer")


class Stack(StatefulLayer, Generic[_L]):
    """Many layers of one kind, one after the other: traced and compiled once, however many.

    The layers are kept as one, whose arrays have a leading axis, and applied by
    [`filter_scan`][pytreemod.filter_scan]. So all have the same configuration, and each gives back
    what it takes: same structure, shapes and dtypes.

    Indexing gives a layer, slicing a `Stack`; `len` and iteration work. Edit what is inside as
    anywhere: `tree_at(lambda s: s.layer.weight, stack, replace_fn=lambda w: w.at[2].set(0))`.

    **Law.** `stack(x)` is `x` after `for layer in stack: x = layer(x)`; with State, the same holds
    for the layers and the State that `stack.unstack(state)` gives.

    Shapes:
        x: whatever a layer takes
        return: the structure, shapes and dtypes of x; a pair with the State if one was passed in

    Fields:
        layer: the layers as one; each array has a leading axis of size depth

    Args:
        make_layer: makes one layer; called once, mapped, as `make_layer(key=k)` with a key of its
            own for each layer, or as `make_layer()` if it takes no `key`.
        depth: how many layers, >= 0.
        key: split between the layers.
        remat: whether to recompute what each layer computed, in the backward pass, instead of
            storing it; or a policy that says what may be stored, see `jax.checkpoint_policies`.
        unroll: how many layers to write out in each step of the scan; True for all.

    State and randomness: is stateful if its layer is, or has tokens without saying so. Each value
        in the State has a leading axis of size depth. Each random stream is one, split between the
        layers in every call. A key is split between the layers.

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
        key: PRNGKeyArray | None = None,
        remat: bool | Callable[..., Any] = False,
        unroll: int | bool = 1,
    ):
        self.depth = check_size(named(self, "depth"), depth)
        self.remat = _check_remat(named(self, "remat"), remat)
        self.unroll = _check_unroll(named(self, "unroll"), unroll)
        self.layer = _make(make_layer, self.depth, key)

    @overload
    def __call__(
        self,
        x: Any,
        *,
        key: PRNGKeyArray | None = None,
        per_layer: Mapping[str, Any] | None = None,
        **same: Any,
    ) -> Any: ...

    @overload
    def __call__(
        self,
        x: Any,
        state: State,
        *,
        key: PRNGKeyArray | None = None,
        per_layer: Mapping[str, Any] | None = None,
        **same: Any,
    ) -> tuple[Any, State]: ...

    @jax.named_scope("pm.nn.Stack")
    def __call__(
        self,
        x: Any,
        state: State | Absent = ABSENT,
        *,
        key: PRNGKeyArray | None = None,
        per_layer: Mapping[str, Any] | None = None,
        **same: Any,
    ) -> Any:
        """Apply the layers.

        Args:
            x: the first layer's input.
            state: for layers that are stateful.
            key: split between the layers, which are called without a key if it is None.
            per_layer: further arguments by name, with a leading axis: one entry for each layer.
            **same: further arguments by name, the same for all layers, such as a mask. If there
                are tokens in them, all layers read and write the same values in State.

        Returns:
            The last layer's output; with `state`, the pair of it and the new State.
        """
        title = self._title()
        extra = _check_names(title, per_layer, same)
        _check_leading(title, self.depth, {"layer": self.layer, "per_layer": extra})
        keys = None if key is None else jax.random.split(check_key(title, key), self.depth)
        values = _Values(title, self.layer, self.depth, same, state) if self.is_stateful() else None
        step = _Step(same, title, None if values is None else values.form)
        own, shared = ((), ()) if values is None else (values.own, values.shared)
        (x, shared), own = filter_scan(
            self._recomputing(step),
            (x, shared),
            (self.layer, own, keys, extra),
            length=self.depth,
            unroll=self.unroll,
        )
        if values is None:
            return x if isinstance(state, Absence) else (x, state)
        return x, values.after(own, shared)

    def is_stateful(self) -> bool:
        """Whether the layers need State.

        Returns:
            True or False.
        """
        if isinstance(self.layer, StatefulLayer):
            return self.layer.is_stateful()
        return bool(tokens_of(self.layer))

    @classmethod
    @overload
    def from_layers(
        cls,
        layers: Sequence[_L],
        *,
        remat: bool | Callable[..., Any] = False,
        unroll: int | bool = 1,
    ) -> "Stack[_L]": ...

    @classmethod
    @overload
    def from_layers(
        cls,
        layers: Sequence[_L],
        state: State,
        *,
        remat: bool | Callable[..., Any] = False,
        unroll: int | bool = 1,
    ) -> "tuple[Stack[_L], State]": ...

    @classmethod
    def from_layers(
        cls,
        layers: Sequence[_L],
        state: State | Absent = ABSENT,
        *,
        remat: bool | Callable[..., Any] = False,
        unroll: int | bool = 1,
    ) -> "Stack[_L] | tuple[Stack[_L], State]":
        """A Stack of layers that exist, which differ in nothing but the values of their arrays.

        **Law.** `Stack.from_layers(stack.unstack())` is `stack`, and with State
        `Stack.from_layers(*stack.unstack(state))` is `(stack, state)`, but for the random streams:
        that of the first layer goes on for all.

        Args:
            layers: at least one.
            state: a State with the tokens of all these layers; it may have more.
            remat: as for `Stack`.
            unroll: as for `Stack`.

        Returns:
            The Stack; with `state`, the pair of it and a State in which the tokens of the Stack
            have taken the place of those of the layers.

        Raises:
            ArgumentError: there are no layers.
            StateError: two layers share a token of a value.
            StructureError: two layers differ; the paths are named.
        """
        layers = list(layers)
        if not layers:
            cure = ("A Stack of none is made by", "nn.Stack(make_layer, 0)")
            raise ArgumentError(explain("Stack.from_layers", "at least one layer", "none", cure=cure))
        columns = [_Tokens(layer) for layer in layers]
        markers = _markers_of_stack(columns)
        merged = stack_trees([_renamed(layer, markers(i)) for i, layer in enumerate(layers)])
        blank: Any = Stack(Identity, 0, remat=remat, unroll=unroll)
        stack: Stack[_L] = blank.replace(layer=merged, depth=len(layers))
        if isinstance(state, Absence):
            return stack
        return stack, _stack_state(columns, markers(0), state)

    @overload
    def unstack(self) -> list[_L]: ...

    @overload
    def unstack(self, state: State) -> tuple[list[_L], State]: ...

    def unstack(self, state: State | Absent = ABSENT) -> list[_L] | tuple[list[_L], State]:
        """The layers one by one, as they would be in a list in the place of the Stack.

        The tokens in layer `i` are its own, named as they would be in that list: in place of
        `blocks.layer.norm`, `blocks[i].norm`. A `state` that is passed in comes back with these.
        What is particular to layer `i` in it is `state.substate(layers[i])`.

        Args:
            state: a State with the tokens of this Stack; it may have more.

        Returns:
            A list of layers; with `state`, the pair of it and a State that fits them. The random
            streams in it are those that the next call of the Stack would have given its layers.

        Raises:
            ShapeError: an array has not the leading axis.
            StateError: the State does not fit.
        """
        _check_leading(self._title(), self.depth, {"layer": self.layer})
        tokens = _Tokens(self.layer)
        renamed = [tokens.in_list(i) for i in range(self.depth)]
        layers = [_renamed(m, n) for m, n in zip(self._members(), renamed, strict=True)]
        if isinstance(state, Absence):
            return layers
        return layers, _unstack_state(self._title(), tokens, renamed, self.depth, state)

    @overload
    def __getitem__(self, index: int) -> _L: ...

    @overload
    def __getitem__(self, index: slice) -> "Stack[_L]": ...

    def __getitem__(self, index: int | slice) -> "_L | Stack[_L]":
        """A layer by number, or several as a `Stack`; with the tokens that `unstack` gives them."""
        tokens = _Tokens(self.layer)
        if isinstance(index, slice):
            numbers = range(self.depth)[index]
            part = jax.tree.map(lambda leaf: leaf[index] if is_array(leaf) else leaf, self.layer)
            return self.replace(layer=_renamed(part, tokens.in_part(numbers)), depth=len(numbers))
        number = self._number(index)
        layer = jax.tree.map(lambda leaf: leaf[number] if is_array(leaf) else leaf, self.layer)
        return _renamed(layer, tokens.in_list(number))

    def __iter__(self) -> Iterator[_L]:
        yield from self.unstack()

    def __len__(self) -> int:
        return self.depth

    def _title(self) -> str:
        return f"Stack({type(self.layer).__name__}, depth={self.depth})"

    def _members(self) -> list[_L]:
        if any(is_array(leaf) for leaf in jtu.tree_leaves(self.layer)):
            return unstack_tree(self.layer)
        return [self.layer] * self.depth

    def _number(self, index: Any) -> int:
        try:
            number = operator.index(index)
        except TypeError as error:
            cure = ("An index that is traced takes an element of each array:",)
            cure = (*cure, "layer = jax.tree.map(lambda leaf: leaf[i], stack.layer)")
            expected = "an integer or a slice"
            text = explain("Stack[...]", expected, describe(index), cure=cure)
            raise ArgumentError(text) from error
        if not -self.depth <= number < self.depth:
            expected = f"an index of one of {self.depth} layers"
            raise IndexError(explain("Stack[...]", expected, str(number)))
        return number % self.depth

    def _recomputing(self, step: "_Step") -> Callable[..., Any]:
        if self.remat is False:
            return step
        # Inside a loop XLA cannot undo the recomputing; without one it would.
        no_loop = self.unroll is True or self.unroll >= self.depth
        policy = None if isinstance(self.remat, bool) else self.remat
        return filter_checkpoint(step, prevent_cse=no_loop, policy=policy)


# ---- making


def _check_remat(where: str, remat: Any) -> Any:
    if isinstance(remat, bool) or (callable(remat) and not isinstance(remat, type)):
        return remat
    raise ArgumentError(explain(where, "True, False or a policy", describe(remat)))


def _check_unroll(where: str, unroll: Any) -> int | bool:
    return unroll if isinstance(unroll, bool) else check_size(where, unroll, 1)


def _make(make_layer: Any, depth: int, key: Any) -> Any:
    """`depth` layers as one, each made with a key of its own."""
    where = "Stack(make_layer)"
    if not callable(make_layer):
        raise ArgumentError(explain(where, "a function that makes a layer", describe(make_layer)))
    if key is not None:
        key = check_key("Stack(key)", key)
    if _takes_key(where, make_layer, key):
        keys = jax.random.split(cast("Any", key), depth)
        layer = filter_vmap(lambda k: make_layer(key=k))(keys)
    else:
        layer = filter_vmap(lambda: make_layer(), axis_size=depth)()
    if not callable(layer) or isinstance(layer, type):
        raise ArgumentError(explain(where, "a function that makes a layer", describe(layer)))
    return layer


def _takes_key(where: str, make_layer: Any, key: Any) -> bool:
    """Whether a layer is to be made with a key."""
    try:
        signature = inspect.signature(make_layer)
    except (TypeError, ValueError):
        return key is not None
    for named_key in (True, False):
        try:
            signature.bind(**({"key": None} if named_key else {}))
        except TypeError:
            continue
        if key is not None or not named_key:
            return named_key
    if _binds(signature, key=None):
        cure = KEY_CURE
        raise RngError(explain("Stack(key)", "a random key, for make_layer needs one", "none", cure=cure))
    cure = (
        "Give it all other arguments first:",
        "nn.Stack(functools.partial(nn.Linear, 3, 3), depth, key=key)",
        "nn.Stack(lambda key: nn.Linear(3, 3, key=key), depth, key=key)",
    )
    expected = "a function that needs nothing but key"
    raise ArgumentError(explain(where, expected, f"one of {signature}", cure=cure))


def _binds(signature: inspect.Signature, **arguments: Any) -> bool:
    try:
        signature.bind(**arguments)
    except TypeError:
        return False
    return True


# ---- calling


class _Step(Module):
    """A step of the scan: one layer, applied to what the one before it gave."""

    same: dict[str, Any]
    title: str
    form: Any = field(static=True)

    def __call__(self, carry: Any, each: Any) -> Any:
        (x, shared), (layer, own, key, extra) = carry, each
        arguments = {**self.same, **extra, **({} if key is None else {"key": key})}
        form: _Form | None = self.form
        if form is None:
            return (_as_before(self.title, x, layer(x, **arguments)), shared), own
        result = layer(x, form.state(own, shared), **arguments)
        out, state = _pair(self.title, result)
        own, shared = form.changed(state)
        return (_as_before(self.title, x, out), shared), own


def _pair(title: str, result: Any) -> tuple[Any, State]:
    if isinstance(result, tuple):
        pair = cast("tuple[Any, ...]", result)
        if len(pair) == 2 and isinstance(pair[1], State):
            return pair[0], pair[1]
    raise StateError(
        explain(
            title,
            "a layer with tokens to return a pair with the State",
            describe(result),
            cure=["in the layer:", "return out, state"],
        )
    )


def _as_before(title: str, x: Any, out: Any) -> Any:
    """What a layer returned, refused if the next layer could not take it as this one took x."""
    found = differences(x, out, _agree)
    if not found:
        return out
    raise StructureError(
        explain(
            title,
            "each layer to give back what it takes",
            f"a change in {len(found)} place{'s' * (len(found) > 1)}",
            places=[f"{path_text(f.path, 'x')}: {' -> '.join(f.texts())}" for f in found],
            cure=_cure(found),
        )
    )


def _agree(before: Any, after: Any) -> bool:
    a, b = aval_of(before), aval_of(after)
    if a.shape != b.shape:
        return False
    return a.dtype == b.dtype or may_be_promoted(a, b) not in (None, a.dtype)


def _cure(found: Sequence[Difference]) -> Sequence[str]:
    if all(entry.of_dtypes for entry in found):
        dtype = aval_of(found[0].second).dtype.name
        return ("Start from that dtype, or cast in the layer:", f"stack(x.astype(jnp.{dtype}))")
    return (
        "A layer that changes it stands before or after the others:",
        "nn.Sequential([first, nn.Stack(make_layer, depth), last])",
    )


def _check_names(title: str, per_layer: Any, same: dict[str, Any]) -> dict[str, Any]:
    """The arguments that differ from layer to layer; refused if a name is used twice."""
    if per_layer is None:
        return {}
    if not isinstance(per_layer, Mapping):
        expected = "per_layer to be a dict by name"
        raise ArgumentError(explain(title, expected, describe(per_layer)))
    extra = dict(cast("Mapping[str, Any]", per_layer))
    twice = sorted(extra.keys() & {"key", "state", *same})
    if twice:
        raise ArgumentError(explain(title, "each argument once", f"{twice[0]} in per_layer, too"))
    return extra


def _check_leading(title: str, depth: int, trees: dict[str, Any]) -> None:
    """Refuse arrays that have not the leading axis."""
    if all(_leads(leaf, depth) for leaf in jtu.tree_leaves(trees)):
        return
    leaves = [
        (path_text(path, root), leaf)
        for root, tree in trees.items()
        for path, leaf in jtu.tree_leaves_with_path(tree)
    ]
    wrong = [f"{place}: {describe(leaf)}" for place, leaf in leaves if not _leads(leaf, depth)]
    raise ShapeError(
        explain(
            title,
            f"arrays with a leading axis of {depth}",
            f"{len(wrong)} without",
            places=wrong,
            cure=("Several Stacks as one are called mapped:", "pm.filter_vmap(lambda s: s(x))(stacks)")
            if any(place.startswith("layer") for place in wrong)
            else (),
        )
    )


def _leads(leaf: Any, depth: int) -> bool:
    return not is_array(leaf) or leaf.shape[:1] == (depth,)


# ---- State


def _entries(state: State) -> list[tuple[str, type, Any]]:
    """Name, kind and value of each entry."""
    kinds = state.__child_kinds__()
    children = children_of(state) or []
    return [(key.key, kind, value) for (key, value), kind in zip(children, kinds, strict=True)]


class _Form(Module):
    """How the State of one layer is put together, and what a layer may have changed in it."""

    treedef: Any = field(static=True)
    is_own: tuple[bool, ...] = field(static=True)
    is_value: tuple[bool, ...] = field(static=True)

    def state(self, own: Sequence[Any], shared: Sequence[Any]) -> State:
        """From the entries that each layer has for itself, and those that it shares."""
        mine, others = iter(own), iter(shared)
        return self.treedef.unflatten([next(mine if m else others) for m in self.is_own])

    def changed(self, state: State) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The entries after a layer: the values of its own, and all that it shares."""
        values = [value for _, _, value in _entries(state)]
        rows = list(zip(values, self.is_own, self.is_value, strict=True))
        own = tuple(value for value, mine, is_value in rows if mine and is_value)
        return own, tuple(value for value, mine, _ in rows if not mine)


class _Values:
    """A State as the layers of a Stack take it: some entries taken apart, others carried."""

    def __init__(self, title: str, layer: Any, depth: int, same: dict[str, Any], state: Any):
        self.whole = _check_state(title, layer, state)
        mine = {name for name, _, _ in _entries(self.whole.substate(layer))}
        part = self.whole.substate((layer, same))
        rows = _entries(part)
        treedef = jtu.tree_structure(part, is_leaf=stop_below(part))
        is_own = tuple(name in mine for name, _, _ in rows)
        is_value = tuple(kind is not RngStream for _, kind, _ in rows)
        self.form = _Form(treedef, is_own, is_value)
        opened = [_open(title, depth, row) for row, own in zip(rows, is_own, strict=True) if own]
        self.own = tuple(given for given, _ in opened)
        self.shared = tuple(row[2] for row, own in zip(rows, is_own, strict=True) if not own)
        self.later = [later for _, later in opened]

    def after(self, own: Sequence[Any], shared: Sequence[Any]) -> State:
        """The State after all layers."""
        mine = [is_value for own, is_value in zip(self.form.is_own, self.form.is_value, strict=True) if own]
        values = iter(own)
        new = [next(values) if is_value else later for is_value, later in zip(mine, self.later, strict=True)]
        return self.whole.update(self.form.state(new, shared))


def _check_state(title: str, layer: Any, state: Any) -> State:
    if isinstance(state, State):
        return state
    if isinstance(state, Absence):
        cure = (
            "Make the model together with its State, and pass that along:",
            "model, state = pm.make_with_state(make_model)(...)",
            "out, state = model(x, state)",
        )
        places = [path_text((FIELD, *path)) for path, _ in tokens_of(layer)]
        raise StateError(explain(title, "a State", "none", places=places, cure=cure))
    cure = ("Further arguments for the layers go by name:", "stack(x, state, mask=mask)")
    raise ArgumentError(explain(title, "a State", describe(state), cure=cure))


def _open(title: str, depth: int, row: tuple[str, type, Any]) -> tuple[Any, Any]:
    """What the layers get of an entry, and, of a stream, what it is after the call."""
    name, kind, value = row
    if kind is not RngStream:
        _check_depth(title, depth, name, value)
        return value, None
    if value.key is None:
        # It may never be asked for a key, in inference mode; if it is, it says so itself.
        return value, value
    if value.count.ndim:
        cure = ("Map over its members:", "in_axes=pm.by({pm.RngStream: 0, ...: None})")
        got = f"{value.count.shape[0]} of them, for the State was split"
        raise RngError(explain(f"{title}: {name}", "one stream", got, cure=cure))
    members = streams.split(value, depth)
    return Stream(members.key, members.count), streams.use(value)[1]


def _check_depth(title: str, depth: int, name: str, value: Any) -> None:
    if all(_leads(leaf, depth) for leaf in jtu.tree_leaves(value)):
        return
    leaves = jtu.tree_leaves_with_path(value)
    raise StateError(
        explain(
            title,
            f"values in State with a leading axis of {depth}",
            "others",
            places=[f"{path_text(path, name)}: {describe(leaf)}" for path, leaf in leaves],
            cure=(
                "The State of a part of a Stack comes with that part:",
                "layers, state = stack.unstack(state)",
                "part, state = nn.Stack.from_layers(layers[:2], state)",
            ),
        )
    )


# ---- tokens of a Stack, and of its layers in a list


class _Tokens:
    """The different tokens in a layer, each with the path at which it stands first."""

    def __init__(self, layer: Any):
        self.found: dict[Any, tuple[tuple[Any, ...], Any]] = {}
        for path, token in tokens_of(layer):
            self.found.setdefault(token.marker, (path, token))

    def in_list(self, number: int) -> dict[Any, Any]:
        """From each marker to the one that it has in layer `number` of a list."""
        return {m: _marker_in_list(m, path, number) for m, (path, _) in self.found.items()}

    def in_part(self, numbers: Sequence[int]) -> dict[Any, Any]:
        """From each marker to the one that it has in a Stack of some of the layers."""
        renamed = [self.in_list(number) for number in numbers]
        return {
            m: _marker_in_stack([names[m] for names in renamed], path) if renamed else m
            for m, (path, _) in self.found.items()
        }


def _renamed(layer: Any, markers: dict[Any, Any]) -> Any:
    def rename(node: Any) -> Any:
        return node.replace(marker=markers[node.marker]) if is_token(node) else node

    return jtu.tree_map(rename, layer, is_leaf=is_token) if markers else layer


def _marker_in_list(marker: Any, path: tuple[Any, ...], number: int) -> Any:
    """`blocks[2].norm` for `blocks.layer.norm`, whose path in a layer is `norm`."""
    if isinstance(marker, Unnamed):
        return Unnamed()
    below = path_text((FIELD, *path))
    above = marker.removesuffix(below)
    if above == marker or above[-1:] not in ("", "."):
        return f"{marker}[{number}]"
    return above.removesuffix(".") + path_text((jtu.SequenceKey(number), *path))


def _marker_in_stack(markers: Sequence[Any], path: tuple[Any, ...]) -> Any:
    """The way back; the first layer's marker where these are not all that a Stack would have."""
    above: set[str] = set()
    for number, marker in enumerate(markers):
        below = path_text((jtu.SequenceKey(number), *path))
        if isinstance(marker, Unnamed) or not marker.endswith(below):
            return markers[0]
        above.add(marker.removesuffix(below))
    prefix = above.pop()
    if above:
        return markers[0]
    return prefix + "." * bool(prefix) + path_text((FIELD, *path))


def _markers_of_stack(columns: Sequence[_Tokens]) -> Callable[[int], dict[Any, Any]]:
    """For each layer, from its markers to those of the Stack; tokens are matched by their paths."""
    places = [{path: m for m, (path, _) in tokens.found.items()} for tokens in columns]
    renamed: dict[tuple[Any, ...], Any] = {}
    for path, (first, (_, token)) in zip(places[0], columns[0].found.items(), strict=True):
        markers = [of.get(path, first) for of in places]
        if len(markers) > 1 and markers[1] == first and isinstance(token, StateIndex):
            _refuse_sharing(path)
        renamed[path] = first if markers[1:2] == [first] else _marker_in_stack(markers, path)

    def of(number: int) -> dict[Any, Any]:
        # Where the paths do not agree, stacking the layers says so.
        return {m: renamed.get(path, m) for path, m in places[number].items()}

    return of


def _refuse_sharing(path: tuple[Any, ...]) -> None:
    cure = (
        "What all layers read and write is passed to them:",
        "stack(x, state, count=self.count)",
    )
    place = path_text((jtu.SequenceKey(1), *path), "layers")
    expected = "layers that have their tokens for themselves"
    got = "a token that two of them share"
    raise StateError(explain("Stack.from_layers", expected, got, places=[place], cure=cure))


Change = tuple[type, Any]
"""The kind of a new entry, and its value."""


def _stack_state(columns: Sequence[_Tokens], markers: dict[Any, Any], state: State) -> State:
    new: dict[Any, Change] = {}
    old: dict[Any, None] = {}
    rows = [
        [(m, type(token), _entry(state, token)) for m, (_, token) in tokens.found.items()]
        for tokens in columns
    ]
    for column in zip(*rows, strict=True):
        marker, kind, first = column[0]
        old.update(dict.fromkeys(m for m, _, _ in column))
        value = first if kind is RngStream else stack_trees([value for _, _, value in column])
        new[markers[marker]] = (kind, value)
    return exchange_entries(state, old, new, "from_layers")


def _unstack_state(
    title: str, tokens: _Tokens, renamed: Sequence[dict[Any, Any]], depth: int, state: State
) -> State:
    members: dict[Any, tuple[type, list[Any]]] = {}
    for marker, (path, token) in tokens.found.items():
        row = (path_text((FIELD, *path)), type(token), _entry(state, token))
        members[marker] = (type(token), _members_of(_open(title, depth, row)[0], depth))
    new: dict[Any, Change] = {
        names[marker]: (kind, values[number])
        for number, names in enumerate(renamed)
        for marker, (kind, values) in members.items()
    }
    return exchange_entries(state, tokens.found, new, "unstack")


def _entry(state: State, token: Any) -> Any:
    return _entries(state.substate(token))[0][2]


def _members_of(value: Any, depth: int) -> list[Any]:
    if jtu.tree_leaves(value):
        return unstack_tree(value)
    return [value] * depth
