"""`State`: the values of a model's tokens."""

from __future__ import annotations

import functools as ft
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, StateError, describe, explain
from pytreemod.state import refusals, streams
from pytreemod.state.entries import Entry, Register
from pytreemod.state.streams import Stream
from pytreemod.state.tokens import AbstractToken, RngStream, StateIndex, Unnamed, rebuilt
from pytreemod.tree.comparison import are_equal
from pytreemod.tree.nodes import places
from pytreemod.tree.paths import PathName, path_text
from pytreemod.tree.predicates import is_array_like
from pytreemod.tree.printing import tree_pformat
from pytreemod.tree.selecting import as_selector
from pytreemod.tree.snapshots import AbstractKeeper, Snapshot, Structure, take_snapshot
from pytreemod.tree.successions import note_made, note_part, note_used
from pytreemod.typing import PyTree, jtu

_M = TypeVar("_M")
_V = TypeVar("_V")


def is_token(node: Any) -> bool:
    """Whether a node of a tree is a token."""
    return isinstance(node, AbstractToken)


def tokens_of(tree: PyTree) -> list[tuple[tuple[Any, ...], Any]]:
    """The tokens in a tree with their paths."""
    return [
        (path, node)
        for path, node in jtu.tree_leaves_with_path(tree, is_leaf=is_token)
        if is_token(node)
    ]


class State(AbstractKeeper):
    """The values of all tokens of a model: what goes in and comes out.

    **Form.** A pytree whose leaves are arrays; each entry bears the path of its token.

    **Make.** With [`make_with_state`][pytreemod.make_with_state], or `State(model)` from a model
    whose tokens still hold their initial values.

    **Use.** `get`, `set`, `next_key`, `substate`, `update`; `seed`, `split`, `join` for the random
    streams; `fill` to give a model its values back. What returns a new State uses this one up: it
    refuses to be used again, so that no update can be lost.

    **Laws.** Those of [`StateIndex`][pytreemod.StateIndex]; and
    `state.update(state.substate(m)) == state`; and
    `make_with_state(state.fill)(model) == (model, state)`.

    Args:
        model: any tree with tokens in it.

    Raises:
        StateError: a token's initial value is gone, for another State already has it.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> index = pm.StateIndex(jnp.asarray(1.0))
        >>> state = pm.State(index)
        >>> new = state.set(index, jnp.asarray(2.0))
        >>> float(new.get(index))
        2.0
    """

    __slots__ = ("_entries", "_kept", "_register", "_used")

    _entries: dict[Any, Any]
    _register: Register
    _kept: Snapshot | None
    _used: tuple[str, Any] | None

    def __init__(self, model: PyTree):
        values: dict[Any, Any] = {}
        entries: dict[Any, Entry] = {}
        for path, token in tokens_of(model):
            known = entries.get(token.marker)
            if known is not None:
                entries[token.marker] = known._replace(places=known.places + 1)
                continue
            values[token.marker] = _initial(path, token)
            entries[token.marker] = Entry(token.marker, PathName.of(path), type(token), 1)
        self._entries, self._register = values, Register(entries.values())
        self._used, self._kept = None, None
        note_made(self)

    def get(self, item: StateIndex[_V]) -> _V:
        """The value of a token.

        Args:
            item: the token.

        Returns:
            The value.

        Raises:
            StateError: the State was used up.
            TokenError: it has no such token.
            ArgumentError: `item` is no token.

        Examples:
            >>> import jax.numpy as jnp
            >>> import pytreemod as pm
            >>> index = pm.StateIndex(jnp.asarray(1.0))
            >>> float(pm.State(index).get(index))
            1.0
        """
        self._check("get", item)
        return self._entries[self._marker(item, "get", StateIndex)]

    def set(self, item: StateIndex[_V], value: _V) -> State:
        """A State with another value for a token; this one is used up.

        Args:
            item: the token.
            value: a tree of the structure, shapes and dtypes of the present value.

        Returns:
            The new State.

        Raises:
            StateError: the State was used up, or the value does not fit.
            TokenError: it has no such token.
            ArgumentError: `item` is no token.

        Examples:
            >>> import jax.numpy as jnp
            >>> import pytreemod as pm
            >>> index = pm.StateIndex(jnp.asarray(1.0))
            >>> state = pm.State(index)
            >>> state = state.set(index, jnp.asarray(2.0))
        """
        self._check("set", item)
        marker = self._marker(item, "set", StateIndex)
        entries = {**self._entries, marker: self._fitting(marker, value, "set")}
        return self._succeed(entries, "set", marker)

    def substate(self, pytree: PyTree) -> State:
        """The part of this State that concerns the tokens in a tree, such as one layer's.

        Args:
            pytree: a tree with tokens in it.

        Returns:
            A State of its own; this one stays usable, so that the part can be put back.

        Raises:
            StateError: the State was used up.
            TokenError: it lacks one of the tokens.

        Examples:
            >>> import jax.numpy as jnp
            >>> import pytreemod as pm
            >>> a, b = pm.StateIndex(jnp.asarray(1.0)), pm.StateIndex(jnp.asarray(2.0))
            >>> state = pm.State((a, b))
            >>> part = state.substate(a)
            >>> state = state.update(part.set(a, jnp.asarray(3.0)))
            >>> float(state.get(a)), float(state.get(b))
            (3.0, 2.0)
        """
        self._check("substate")
        wanted = {self._marker(token, "substate") for _, token in tokens_of(pytree)}
        register = self._register.only(wanted)
        part = _make({entry.marker: self._entries[entry.marker] for entry in register}, register)
        note_part(part)
        return part

    def update(self, substate: State) -> State:
        """A State in which the values of a substate take the places of this one's.

        Args:
            substate: a State with some of this one's tokens.

        Returns:
            The new State; both others are used up.

        Raises:
            StateError: one of the States was used up, or a value does not fit.
            TokenError: `substate` has a token that this one lacks.
            ArgumentError: `substate` is no State.
        """
        self._check("update")
        if not isinstance(substate, State):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
            raise ArgumentError(explain("State.update(substate)", "a State", describe(substate)))
        substate._check("update")
        entries = dict(self._entries)
        for marker, value in substate._entries.items():
            if marker not in entries:
                raise refusals.foreign("update", substate._register[marker].name, self._register)
            entries[marker] = self._fitting(marker, value, "update")
        substate.__use_up__("update")
        return self._succeed(entries, "update")

    def seed(self, key: Any, select: Any = None) -> State:
        """Give every random stream a key of its own; this State is used up.

        The key of a stream depends on `key` and on the stream's path alone. A stream that was used
        before starts anew.

        Args:
            key: one random key.
            select: a selector over this State that says which streams, such as a path; all by
                default.

        Returns:
            The new State.

        Raises:
            RngError: `key` is no random key, or `select` picks no stream.
            SpecError: `select` names something that is not there.
            StateError: the State was used up.

        Examples:
            >>> import jax
            >>> import pytreemod as pm
            >>> stream = pm.RngStream()
            >>> state = pm.State(stream).seed(jax.random.key(0))
        """
        self._check("seed")
        streams.check_key("State.seed(key)", key)
        chosen = self._register.of_kind(RngStream)
        if select is not None:
            picked = self._chosen(select)
            chosen = [marker for marker in chosen if marker in picked]
            if not chosen:
                raise refusals.nothing_to_seed(select)
        seeded = streams.seeded(key, [self._register[marker].name for marker in chosen])
        return self._succeed({**self._entries, **dict(zip(chosen, seeded, strict=True))}, "seed")

    def next_key(self, stream: RngStream) -> tuple[Any, State]:
        """A new key of a random stream; this State is used up.

        Args:
            stream: the token.

        Returns:
            The key, and the new State.

        Raises:
            RngError: the streams were not seeded, or this one was split and belongs under a map.
            StateError: the State was used up.
            TokenError: it has no such token.

        Examples:
            >>> import jax
            >>> import pytreemod as pm
            >>> stream = pm.RngStream()
            >>> state = pm.State(stream).seed(jax.random.key(0))
            >>> key, state = state.next_key(stream)
        """
        self._check("next_key", stream)
        marker = self._marker(stream, "next_key", RngStream)
        value = self._seeded(marker, "next_key")
        if value.count.ndim:
            raise refusals.split_stream(self._register[marker].name, value.count.shape[0])
        key, value = streams.use(value)
        return key, self._succeed({**self._entries, marker: value}, "next_key", marker)

    def split(self, n: int, select: Any = None) -> State:
        """A State for `n` members: the chosen entries get a leading axis; this one is used up.

        Streams differ from member to member; other values are repeated. Pass it with
        `in_axes=pm.by({pm.RngStream: 0, ...: None})`, or 0 for the entries that were chosen.

        Args:
            n: how many members, at least one.
            select: a selector over this State, such as a path, `pm.RngStream` or
                `pm.StateIndex`; all random streams by default.

        Returns:
            The new State.

        Raises:
            ArgumentError: `n` is no such count.
            RngError: a chosen stream was not seeded.
            SpecError: `select` names something that is not there.
            StateError: the State was used up.

        Examples:
            >>> import jax
            >>> import pytreemod as pm
            >>> stream = pm.RngStream()
            >>> state = pm.State(stream).seed(jax.random.key(0)).split(3)
            >>> axes = pm.by({pm.RngStream: 0, ...: None})
            >>> draw = lambda state: state.next_key(stream)
            >>> keys, state = pm.filter_vmap(draw, in_axes=(axes,), out_axes=(0, axes))(state)
            >>> keys.shape
            (3,)
            >>> state = state.join()
        """
        self._check("split")
        if type(n) is not int or n < 1:
            raise ArgumentError(explain("State.split(n)", "a count of 1 or more", describe(n)))
        chosen = self._register.of_kind(RngStream) if select is None else self._chosen(select)
        entries = dict(self._entries)
        for marker in chosen:
            if issubclass(self._register[marker].kind, RngStream):
                entries[marker] = streams.split(self._seeded(marker, "split"), n)
            else:
                entries[marker] = jtu.tree_map(ft.partial(_repeat, n), entries[marker])
        return self._succeed(entries, "split")

    def join(self) -> State:
        """Undo `split` for the random streams: each is one again, past what its members used.

        Values that were repeated by `split` stay as they are: what to make of different members
        (the first, the mean) is for you to say.

        Returns:
            The new State; this one is used up.

        Raises:
            StateError: the State was used up, or no stream in it was split.
        """
        self._check("join")
        every = self._register.of_kind(RngStream)
        split = [marker for marker in every if self._entries[marker].outer != ()]
        if not split:
            raise StateError(
                explain(
                    "State.join",
                    "a State whose streams were split",
                    "one in which none was",
                    cure=["split it first:", "state = state.split(n)"],
                )
            )
        joined = {m: streams.join(self._entries[m]) for m in split}
        return self._succeed({**self._entries, **joined}, "join")

    def fill(self, model: _M) -> _M:
        """Give a model its values back, as the initial values of its tokens; the State is used up.

        This undoes `make_with_state`, so that the model can be changed, or become a part of
        another one, and be made with a State again:

            model, state = pm.make_with_state(state.fill)(changed_model)
            model, state = pm.make_with_state(Pair)(state1.fill(model1), state2.fill(model2))

        Args:
            model: a tree with tokens in it. Those that have no State yet stay as they are. Values
                whose tokens are not in it are forgotten.

        Returns:
            A copy of the model.

        Raises:
            TokenError: a token of the model has its value in another State.
            StateError: two tokens of the model have one name, for they come from two models; or
                the State was used up.

        Examples:
            >>> import jax.numpy as jnp
            >>> import pytreemod as pm
            >>> make = pm.make_with_state(lambda: {"a": pm.StateIndex(jnp.asarray(1.0))})
            >>> model, state = make()
            >>> model["b"] = pm.StateIndex(jnp.asarray(2.0))
            >>> model, state = pm.make_with_state(state.fill)(model)
            >>> state
            State(['a']=f32[], ['b']=f32[])
        """
        self._check("fill")
        found: dict[Any, list[str]] = {}
        for path, token in tokens_of(model):
            if token.marker in self._register:
                found.setdefault(token.marker, []).append(path_text(path))
            elif not isinstance(token.marker, Unnamed):
                raise refusals.foreign("fill", token.marker, self._register, [path_text(path)])
        for marker, spots in found.items():
            if len(spots) > self._register[marker].places:
                raise refusals.ambiguous(self._register[marker], spots)
        fresh = {marker: Unnamed() for marker in found}

        def restore(node: Any) -> Any:
            if not is_token(node) or node.marker not in fresh:
                return node
            marker = node.marker
            return rebuilt(node, {"init": self._entries[marker], "marker": fresh[marker]})

        filled = jtu.tree_map(restore, model, is_leaf=is_token)
        self._used = "fill", None
        return filled

    def _chosen(self, select: Any) -> list[Any]:
        # Streams without a key have no leaf that could be picked, so they are given one.
        entries = {
            marker: Stream(_UNSEEDED) if _is_unseeded(value) else value
            for marker, value in self._entries.items()
        }
        probe = _make(entries, self._register)
        picked = as_selector(select).mask(probe)
        names = {s.path[0].key for s, hit in zip(places(probe), picked, strict=True) if hit}
        return [entry.marker for entry in self._register if entry.name in names]

    def _seeded(self, marker: Any, by: str) -> Stream:
        value: Stream = self._entries[marker]
        if value.key is None:
            raise refusals.unseeded(by, self._register[marker].name)
        return value

    def _succeed(self, entries: dict[Any, Any], by: str, marker: Any = None) -> State:
        self._used = by, marker
        note_used(self)
        return _make(entries, self._register)

    def _check(self, by: str, item: Any = None) -> None:
        if self._used:
            marker = getattr(item, "marker", None)
            names = [e.name for e in self._register if e.marker == marker]
            raise refusals.used_up(by, self._user(), names)

    def _user(self) -> str:
        by, marker = self._used or ("", None)
        return by if marker is None else f"{by}({self._register[marker].name})"

    def _marker(self, item: Any, by: str, kind: type = AbstractToken) -> Any:
        if not isinstance(item, kind):
            name = "token" if kind is AbstractToken else kind.__name__
            raise ArgumentError(explain(f"State.{by}(item)", f"a {name}", describe(item)))
        if item.marker not in self._entries:
            raise refusals.foreign(by, item.marker, self._register)
        return item.marker

    def _fitting(self, marker: Any, value: Any, by: str) -> Any:
        """A value as it is stored, if it may take the place of the present one."""
        old = self._entries[marker]
        # Nearly all values are single arrays, and nothing else need be looked at.
        strong = _is_strong(value) and isinstance(old, jax.Array)
        if strong and value.shape == old.shape and value.dtype == old.dtype:
            return value
        value = jtu.tree_map(_as_array, value)
        refusals.check_fit(f"State.{by} for", self._register[marker].name, old, value)
        return value

    def __getattr__(self, name: str) -> Any:
        # A State that a jitted call returned is filled in when it is first asked for a value.
        if name != "_entries":
            raise AttributeError(f"'State' object has no attribute {name!r}", name=name, obj=self)
        kept = cast("Snapshot", self._kept)
        self._entries = kept.structure.assemble(kept.arrays)._entries
        if kept.paths is None:
            self._kept = None
        return self._entries

    def __snapshot__(self) -> Snapshot:
        self._check("use in a transform")
        kept = self._kept
        if kept is None or (kept.containers and not kept.is_current()):
            kept, may_keep = take_snapshot(self)
            self._kept = kept if may_keep else None
        return kept

    def __usable__(self) -> bool:
        return not self._used

    def __entries__(self) -> Mapping[Any, PyTree]:
        return self._entries

    def __use_up__(self, by: str) -> None:
        self._used = by, None
        note_used(self)

    def __pending__(self) -> Any:
        paths = None if self._kept is None or self._kept.containers else ()
        return ft.partial(_make_pending, self._register, paths)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, State) or list(other._entries) != list(self._entries):
            return False
        return are_equal([*self._entries.values()], [*other._entries.values()])

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __child_kinds__(self) -> list[type]:
        return [entry.kind for entry in self._register]

    def __repr__(self) -> str:
        return tree_pformat(self)

    def __pdoc__(self, **kwargs: Any) -> Any:
        import wadler_lindig as wl  # As in tree.printing.

        if self._used:
            return wl.TextDoc(f"State(<used up by {self._user()}>)")
        pairs = [(entry.name, self._entries[entry.marker]) for entry in self._register]
        return wl.bracketed(
            begin=wl.TextDoc("State("),
            docs=wl.named_objs(pairs, **kwargs),
            sep=wl.comma,
            end=wl.TextDoc(")"),
            indent=kwargs["indent"],
        )


class _Unseeded:
    """Stands for the key that a stream has not got yet."""


_UNSEEDED = _Unseeded()


def _is_unseeded(value: Any) -> bool:
    return isinstance(value, Stream) and value.key is None


def _initial(path: tuple[Any, ...], token: Any) -> Any:
    is_stream = isinstance(token, RngStream)
    is_new = isinstance(token.marker, Unnamed)
    if token.init is None and not (is_stream and is_new):
        raise refusals.moved(path_text(path))
    if is_stream:
        return Stream() if token.init is None else token.init
    return jtu.tree_map(_as_array, token.init)


def _is_strong(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not getattr(leaf, "weak_type", False)


def _as_array(leaf: Any) -> Any:
    if _is_strong(leaf) or not is_array_like(leaf):
        return leaf
    # A weak type would not outlive the first step, which would be compiled twice therefore.
    array = jnp.asarray(leaf)
    return jax.lax.convert_element_type(array, array.dtype)


def _repeat(n: int, leaf: Any) -> Any:
    return jnp.broadcast_to(leaf, (n, *jnp.shape(leaf)))


# pyright: reportPrivateUsage=false
# What follows are State's own other halves: JAX wants functions.


def _make(entries: dict[Any, Any], register: Register) -> State:
    state = object.__new__(State)
    state._entries, state._register = entries, register
    state._used, state._kept = None, None
    note_made(state)
    return state


def _make_pending(register: Register, paths: Any, structure: Structure, arrays: Any) -> State:
    state = object.__new__(State)
    state._register, state._used = register, None
    state._kept = Snapshot(arrays, structure, (), paths)
    return state


def named_by_path(state: State) -> tuple[State, dict[Any, str]]:
    """A State whose entries are recognized by their paths, and from old markers to new."""
    old, new = state._register, state._register.named()
    markers = {a.marker: b.marker for a, b in zip(old, new, strict=True)}
    return _make({markers[m]: value for m, value in state._entries.items()}, new), markers


def exchange_entries(
    state: State, old: Collection[Any], new: Mapping[Any, tuple[type, Any]], by: str
) -> State:
    """A State in which some entries have taken the place of others; `state` is used up.

    Args:
        state: any State.
        old: the markers of entries that go.
        new: for the marker of each that comes, the class of its token, and its value.
        by: what to call this in errors.

    Returns:
        The new State: the new entries stand where the first old one stood.

    Raises:
        StateError: `state` was used up, or a new entry has the marker of one that stays.
    """
    state._check(by)
    register = state._register
    places = max((register[marker].places for marker in old), default=1)
    rows = [
        Entry(m, PathName.parse(m if isinstance(m, str) else "<unnamed>"), kind, places)
        for m, (kind, _) in new.items()
    ]
    at = next((i for i, entry in enumerate(register) if entry.marker in old), len(register.entries))
    before = [entry for entry in register.entries[:at] if entry.marker not in old]
    after = [entry for entry in register.entries[at:] if entry.marker not in old]
    values = {entry.marker: state._entries[entry.marker] for entry in (*before, *after)}
    for marker, (_, value) in new.items():
        if marker in values:
            raise refusals.taken(by, register[marker].name)
        values[marker] = value
    state.__use_up__(by)
    after_all = Register((*before, *rows, *after))
    return _make({entry.marker: values[entry.marker] for entry in after_all}, after_all)


def _flatten(state: State) -> tuple[tuple[Any, ...], Register]:
    state._check("use in a transform")
    return tuple(state._entries.values()), state._register


def _flatten_with_keys(state: State) -> tuple[tuple[Any, ...], Register]:
    children, register = _flatten(state)
    pairs = zip(register, children, strict=True)
    return tuple((jtu.DictKey(entry.name), child) for entry, child in pairs), register


def _unflatten(register: Register, children: Any) -> State:
    return _make(dict(zip(register.by_marker, children, strict=True)), register)


jtu.register_pytree_with_keys(State, _flatten_with_keys, _unflatten, _flatten)
