"""`Stack`: many layers of one kind as one layer, applied by a scan."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, cast, overload

import jax
import jax.numpy as jnp

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
from pytreemod.nn.arguments import KEY_CURE, check_key, check_size, named
from pytreemod.nn.calling import (
    ABSENT,
    Absence,
    Absent,
    StatefulLayer,
    uses_key_if,
    wants_key,
)
from pytreemod.nn.sequential import Identity
from pytreemod.state import streams
from pytreemod.state.key_sources import InitKeys, KeyLike
from pytreemod.state.making import delete_init_state
from pytreemod.state.refusals import split_stream
from pytreemod.state.streams import Stream
from pytreemod.state.tokens import RngStream, Unnamed, rebuilt
from pytreemod.state.values import State, is_token, tokens_of
from pytreemod.transform.boundary.agreement import Difference, aval_of, differences, may_be_promoted
from pytreemod.transform.boundary.surrounded_calls import with_numbers, without_numbers
from pytreemod.transform.control_flow.loops import filter_scan
from pytreemod.transform.derivatives.checkpoints import filter_checkpoint
from pytreemod.transform.maps.stacking import stack as stack_trees
from pytreemod.transform.maps.stacking import unstack as unstack_tree
from pytreemod.transform.maps.vmap import filter_vmap
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
        self.remat = _check_remat(named(self, "remat"), remat)
        self.unroll = _check_unroll(named(self, "unroll"), unroll)
        self.layer = _make(make_layer, self.depth, key)

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
    @jax.named_scope("pm.nn.Stack")
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
        _check_second(title, self, state)
        extra = _check_names(title, per_layer, same)
        # Rules around the layers, if there are any, are told which layer it is.
        layer, outer = without_numbers(self.layer)
        numbers = None if outer is None else jnp.arange(depth)
        layer = delete_init_state(layer) if self.is_stateful() else layer
        _check_leading(title, depth, {"layer": layer, "per_layer": extra})
        keys = None
        if key is not None and wants_key(self.layer):
            keys = jax.random.split(check_key(title, key), depth)
        values = None
        if self.is_stateful():
            values = _Values(title, layer, depth, same, _given_state(title, layer, state))
        step = _Step(same, outer, title, None if values is None else values.form)
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
        return x, cast("State", state) if own is None else values.after(own, shared)

    def is_stateful(self) -> bool:
        """Whether the layers need State.

        Returns:
            True or False.
        """
        if isinstance(self.layer, StatefulLayer):
            return self.layer.is_stateful()
        return bool(tokens_of(self.layer))

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
            cure = ("A Stack of none is made by", "nn.Stack(make_layer, 0)")
            text = explain("Stack.from_layers", "at least one layer", "none", cure=cure)
            raise ArgumentError(text)
        blank: Any = Stack(Identity, 0, remat=remat, unroll=unroll)
        return blank.replace(layer=_merged(layers), depth=len(layers))

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
        layer = _opened(layer, self.depth)
        _check_leading(self._title(), self.depth, {"layer": layer})
        has_arrays = any(is_array(leaf) for leaf in jtu.tree_leaves(layer))
        members = unstack_tree(layer) if has_arrays else [layer] * self.depth
        return [with_numbers(_renewed(member), outer) for member in members]

    @overload
    def __getitem__(self, index: int) -> _L: ...

    @overload
    def __getitem__(self, index: slice) -> Stack[_L]: ...

    def __getitem__(self, index: int | slice) -> _L | Stack[_L]:
        """A layer by number, or several as a `Stack`; with tokens of their own, as `unstack`."""
        layer, outer = without_numbers(self.layer)
        opened = _opened(layer, self.depth)
        _check_leading(self._title(), self.depth, {"layer": opened})
        if not isinstance(index, slice):
            return with_numbers(_renewed(_taken(opened, self._number(index))), outer)
        part, count = _renewed(_taken(layer, index)), len(range(self.depth)[index])
        return self.replace(layer=with_numbers(part, outer), depth=count)

    def __iter__(self) -> Iterator[_L]:
        yield from self.unstack()

    def __len__(self) -> int:
        return self.depth

    def _title(self) -> str:
        return f"Stack({type(self.layer).__name__}, depth={self.depth})"

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

    def _recomputing(self, step: _Step) -> Callable[..., Any]:
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

    def make_with_key(key: Any) -> Any:
        return make_layer(key=key)

    if _takes_key(make_layer, key):
        layer = filter_vmap(make_with_key)(_several(key, depth))
    else:
        layer = filter_vmap(lambda: make_layer(), axis_size=depth)()
    if not callable(layer) or isinstance(layer, type):
        raise ArgumentError(explain(where, "a function that makes a layer", describe(layer)))
    return layer


def _several(key: Any, depth: int) -> Any:
    if isinstance(key, InitKeys):
        return key.take(depth)
    return jax.random.split(check_key("Stack(key)", key), depth)


def _takes_key(make_layer: Any, key: Any) -> bool:
    """Whether a layer is to be made with a key."""
    if key is not None and not isinstance(key, InitKeys):
        check_key("Stack(key)", key)
    try:
        signature = inspect.signature(make_layer)
    except (TypeError, ValueError):
        # A callable that does not say what it takes.
        return key is not None
    takes, needs = _binds(signature, key=None), not _binds(signature)
    if takes and (needs or key is not None):
        if key is None:
            expected = "a random key, for make_layer needs one"
            raise RngError(explain("Stack(key)", expected, "none", cure=KEY_CURE))
        return True
    if needs:
        raise ArgumentError(_needs_more(signature))
    return False


def _needs_more(signature: inspect.Signature) -> str:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in variadic
    ]
    cure = (
        "Give it all other arguments first:",
        "make_layer = functools.partial(nn.Linear, 3, 3)",
        "def make_layer(key): return nn.Linear(3, 3, key=key)",
    )
    expected = "a function that needs no argument but key"
    got = f"one that needs {', '.join(name for name in needed if name != 'key')}"
    return explain("Stack(make_layer)", expected, got, cure=cure)


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
    outer: tuple[Any, ...] | None
    title: str
    form: Any = field(static=True)

    def __call__(self, carry: Any, each: Any) -> Any:
        (x, shared), (layer, own, key, extra, number) = carry, each
        if self.outer is not None:
            layer = with_numbers(layer, (*self.outer, number))
        arguments = {**self.same, **extra, **({} if key is None else {"key": key})}
        form: _Form | None = self.form
        if form is None:
            return (_as_before(self.title, x, layer(x, **arguments)), shared), own
        state = form.state(own, shared)
        result = layer(x, state, **arguments)
        out, own, shared = form.changed(self.title, result)
        # None says that the layer gave back the State as it was, as in inference mode.
        return (_as_before(self.title, x, out), shared), None if result[1] is state else own


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
            cure=(
                "Several Stacks as one are called mapped:",
                "pm.filter_vmap(lambda s: s(x))(stacks)",
            )
            if any(place.startswith("layer") for place in wrong)
            else (),
        )
    )


def _leads(leaf: Any, depth: int) -> bool:
    return not is_array(leaf) or leaf.shape[:1] == (depth,)


# ---- State


class _Entry(NamedTuple):
    """A row of a State."""

    name: str
    kind: type
    value: Any


def _entries(state: State) -> list[_Entry]:
    children = children_of(state) or []
    rows = zip(children, state.__child_kinds__(), strict=True)
    return [_Entry(key.key, kind, value) for (key, value), kind in rows]


def _form_of(state: State) -> Any:
    return jtu.tree_structure(state, is_leaf=stop_below(state))


class _Form(Module):
    """How the State of one layer is put together, and what a layer may have changed in it."""

    treedef: Any = field(static=True)
    is_own: tuple[bool, ...] = field(static=True)
    is_value: tuple[bool, ...] = field(static=True)

    def state(self, own: Sequence[Any], shared: Sequence[Any]) -> State:
        """From the entries that each layer has for itself, and those that it shares."""
        mine, others = iter(own), iter(shared)
        return self.treedef.unflatten([next(mine if m else others) for m in self.is_own])

    def changed(self, title: str, result: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
        """What a layer returned: its output, its own values, and all entries that it shares."""
        pair = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else ()
        if len(pair) != 2 or not isinstance(pair[1], State):
            _refuse_result(title, describe(cast("Any", result)))
        out, state = pair
        if _form_of(state) != self.treedef:
            _refuse_result(title, "another State")
        rows = zip(_entries(state), self.is_own, self.is_value, strict=True)
        changed = [(entry.value, mine) for entry, mine, is_value in rows if is_value or not mine]
        own = tuple(value for value, mine in changed if mine)
        return out, own, tuple(value for value, mine in changed if not mine)


def _refuse_result(title: str, got: str) -> NoReturn:
    expected = "a layer that returns its output and the State that it was given, updated"
    cure = ("in the layer:", "return out, state")
    raise StateError(explain(title, expected, got, cure=cure))


class _Values:
    """A State as the layers of a Stack take it: some entries taken apart, others carried."""

    def __init__(self, title: str, layer: Any, depth: int, same: dict[str, Any], state: State):
        mine = {entry.name for entry in _entries(state.substate(layer))}
        # Named twice among the arguments, a token is still one, which all layers share.
        tokens = {token.marker: token for _, token in tokens_of((layer, same))}
        part = state.substate(list(tokens.values()))
        entries = _entries(part)
        is_own = tuple(entry.name in mine for entry in entries)
        is_value = tuple(entry.kind is not RngStream for entry in entries)
        self.whole = state
        self.form = _Form(_form_of(part), is_own, is_value)
        self.shared = tuple(e.value for e in entries if e.name not in mine)
        opened = [_open(title, depth, entry) for entry in entries if entry.name in mine]
        self.own = tuple(given for given, _ in opened)
        self.later = tuple(later for _, later in opened)

    def after(self, own: Sequence[Any], shared: Sequence[Any]) -> State:
        """The State after all layers; what `later` says is not for them to change."""
        values = iter(own)
        new = [next(values) if later is None else later for later in self.later]
        return self.whole.update(self.form.state(new, shared))


def _check_second(title: str, stack: Stack[Any], state: Any) -> None:
    """Refuse what the layers would not get, and what would come back as if it were a State."""
    if isinstance(state, (State, Absence)):
        return
    given = "x, state" if stack.is_stateful() else "x"
    cure = (
        "Further arguments for the layers go by name, and so does a key:",
        f"stack({given}, mask=mask, key=key)",
    )
    raise ArgumentError(explain(title, "a State", describe(state), cure=cure))


def _given_state(title: str, layer: Any, state: State | Absent) -> State:
    if isinstance(state, State):
        return state
    cure = (
        "Make the model together with its State, and pass that along:",
        "model, state = pm.make_with_state(make_model)(...)",
        "out, state = model(x, state)",
    )
    places = [path_text((FIELD, *path)) for path, _ in tokens_of(layer)]
    raise StateError(explain(title, "a State", "none", places=places, cure=cure))


def _open(title: str, depth: int, entry: _Entry) -> tuple[Any, Any]:
    """What the layers get of an entry, and what it is afterwards if that is known already."""
    name, kind, value = entry
    if kind is not RngStream:
        _check_depth(title, depth, name, value)
        return value, None
    if value.key is None:
        # In inference mode nobody asks it for a key; where one is asked for, it says so itself.
        return value, value
    if value.count.ndim:
        raise split_stream(name, value.count.shape[0])
    return streams.divide(value, depth)


def _check_depth(title: str, depth: int, name: str, value: Any) -> None:
    wrong = [
        f"{path_text(path, name)}: {describe(leaf)}"
        for path, leaf in jtu.tree_leaves_with_path(value)
        if not _leads(leaf, depth)
    ]
    if not wrong:
        return
    cure = (
        "A value that is the same for all layers has its token outside of them:",
        "stack(x, state, count=self.count)",
    )
    expected = f"values in State with a leading axis of {depth}"
    raise StateError(explain(title, expected, f"{len(wrong)} without", places=wrong, cure=cure))


# ---- tokens of a Stack, and of its layers one by one


def _on_streams(layer: Any, change: Callable[[Stream], Stream]) -> Any:
    """A layer in which the values of the streams, where it holds them, are changed."""

    def visit(node: Any) -> Any:
        if not isinstance(node, RngStream) or node.init is None:
            return node
        return rebuilt(node, {"init": change(cast("Stream", node.init))})

    return jtu.tree_map(visit, layer, is_leaf=is_token)


def _opened(layer: Any, depth: int) -> Any:
    """The layers as one, in which streams have a leading axis like everything else."""

    def members(stream: Stream) -> Stream:
        if stream.key is None:
            return stream
        several = streams.split(stream, depth)
        return Stream(several.key, several.count, several.outer[2])

    return _on_streams(layer, members)


def _taken(layer: Any, index: Any) -> Any:
    """Some of the layers; of streams there is one for all, unless a single layer is taken."""

    def whole(node: Any) -> bool:
        return isinstance(index, slice) and isinstance(node, RngStream)

    def take(leaf: Any) -> Any:
        return leaf[index] if is_array(leaf) else leaf

    return jtu.tree_map(take, layer, is_leaf=whole)


def _closed(layer: Any) -> Any:
    """The way back: the first layer's stream goes on for all."""

    def first(leaf: jax.Array) -> jax.Array:
        return leaf[0]

    def closed(stream: Stream) -> Stream:
        return jax.tree.map(first, stream)

    return _on_streams(layer, closed)


def _marked(layer: Any, markers: Iterable[Any]) -> Any:
    """A layer whose tokens bear the markers, in order."""
    rest = iter(markers)

    def mark(node: Any) -> Any:
        return rebuilt(node, {"marker": next(rest)}) if is_token(node) else node

    return jtu.tree_map(mark, layer, is_leaf=is_token)


def _renewed(layer: Any) -> Any:
    """A layer whose tokens are new ones, which no State knows."""
    return _marked(layer, (Unnamed() for _ in tokens_of(layer)))


def _merged(layers: Sequence[Any]) -> Any:
    """Layers as one, with one token in the place of those that they have there."""
    # A name would say that some State has the value, in which it has no leading axis.
    places = [[path for path, _ in tokens_of(layer)] for layer in layers]
    markers = [Unnamed() for _ in places[0]]
    # Where tokens are not at the same places, stacking the layers says so.
    alike = [
        _marked(layer, markers) if found == places[0] else layer
        for layer, found in zip(layers, places, strict=True)
    ]
    return _closed(stack_trees(alike))
