"""`State`: the values of a model's tokens."""

import functools as ft
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import wadler_lindig as wl

from pytreemod.errors import ArgumentError, RngError, StateError, TokenError, describe, explain
from pytreemod.state import streams
from pytreemod.state.entries import Entry, Register
from pytreemod.state.streams import Stream
from pytreemod.state.tokens import AbstractToken, RngStream, StateIndex, Unnamed
from pytreemod.tree.comparison import tree_equal
from pytreemod.tree.nodes import places
from pytreemod.tree.paths import PathName, path_text
from pytreemod.tree.predicates import is_array_like
from pytreemod.tree.printing import tree_pformat
from pytreemod.tree.selecting import as_selector
from pytreemod.tree.snapshots import AbstractKeeper, Snapshot, Structure, take_snapshot
from pytreemod.typing import PyTree, class_of, jtu

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

    **Use.** `get`, `set`, `substate`, `update`. A State is used up by `set` and `update`: they
    return a new one, and the old one refuses to be used again, so that no update can be lost.

    **Laws.** Those of [`StateIndex`][pytreemod.StateIndex]; and
    `state.update(state.substate(m)) == state`.

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

    _kept: Snapshot | None
    _entries: dict[Any, Any]
    _register: Register
    _used: str

    def __init__(self, model: PyTree):
        values: dict[Any, Any] = {}
        entries: dict[Any, Entry] = {}
        for path, token in tokens_of(model):
            known = entries.get(token.marker)
            if known is not None:
                entries[token.marker] = known._replace(places=known.places + 1)
                continue
            entries[token.marker] = Entry(token.marker, PathName.of(path), type(token), 1)
            values[token.marker] = _initial(path, token)
        self._entries, self._register = values, Register(entries.values())
        self._used, self._kept = "", None

    def get(self, item: "StateIndex[_V]") -> _V:
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
        self._check("get")
        return self._entries[self._marker(item, "get", StateIndex)]

    def set(self, item: "StateIndex[_V]", value: _V) -> "State":
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
        self._check("set")
        marker = self._marker(item, "set", StateIndex)
        value = jtu.tree_map(_as_array, value)
        self._check_fit(marker, value)
        return self._succeed({**self._entries, marker: value}, "set")

    def substate(self, pytree: PyTree) -> "State":
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
        return _make(
            {m: v for m, v in self._entries.items() if m in wanted},
            {m: n for m, n in self._names.items() if m in wanted},
            {m: k for m, k in self._kinds.items() if m in wanted},
        )

    def update(self, substate: "State") -> "State":
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
        if not isinstance(substate, State):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(explain("State.update(substate)", "a State", describe(substate)))
        substate._check("update")
        for marker, value in substate._entries.items():
            if marker not in self._entries:
                self._refuse_foreign(substate._names[marker], "update")
            self._check_fit(marker, value)
        entries = {**self._entries, **substate._entries}
        substate._used = "update"
        return self._succeed(entries, "update")

    def seed(self, key: Any) -> "State":
        """Give every random stream a key of its own; this State is used up.

        The key of a stream depends on `key` and on the stream's path alone.

        Args:
            key: one random key.

        Returns:
            The new State.

        Raises:
            RngError: `key` is no random key.
            StateError: the State was used up.

        Examples:
            >>> import jax
            >>> import pytreemod as pm
            >>> stream = pm.RngStream()
            >>> state = pm.State(stream).seed(jax.random.key(0))
        """
        self._check("seed")
        streams.check_key("State.seed(key)", key)
        seeded = {m: streams.seeded(key, self._names[m]) for m in self._streams()}
        return self._succeed({**self._entries, **seeded}, "seed")

    def next_key(self, stream: RngStream) -> tuple[Any, "State"]:
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
        self._check("next_key")
        marker = self._marker(stream, "next_key", RngStream)
        value = self._seeded(marker, "next_key")
        if value.count.ndim:
            raise RngError(
                explain(
                    f"State.next_key({self._names[marker]})",
                    "one stream",
                    f"{value.count.shape[0]} of them, for the State was split",
                    cure=["map over them:", "in_axes=pm.by({pm.RngStream: 0, ...: None})"],
                )
            )
        key, value = streams.use(value)
        return key, self._succeed({**self._entries, marker: value}, "next_key")

    def split(self, n: int, select: Any = None) -> "State":
        """A State for `n` members: the chosen entries get a leading axis; this one is used up.

        Streams differ from member to member; other values are repeated. Pass it with
        `in_axes=pm.by({pm.RngStream: 0, ...: None})`, or 0 for the entries that were chosen.

        Args:
            n: how many members.
            select: a selector over this State, such as a path, `pm.RngStream` or
                `pm.StateIndex`; all random streams by default.

        Returns:
            The new State.

        Raises:
            ArgumentError: `n` is no count.
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
        if type(n) is not int or n < 0:
            raise ArgumentError(explain("State.split(n)", "a count", describe(n)))
        if select is None:
            chosen = self._streams()
        else:
            spots = list(places(self))
            picked = as_selector(select).mask(self)
            names = {s.path[0].key for s, hit in zip(spots, picked, strict=True) if hit}
            chosen = [m for m in self._entries if self._names[m] in names]
        entries = dict(self._entries)
        for marker in chosen:
            if self._kinds[marker] is RngStream:
                entries[marker] = streams.split(self._seeded(marker, "split"), n)
            else:
                entries[marker] = jtu.tree_map(ft.partial(_repeat, n), entries[marker])
        return self._succeed(entries, "split")

    def join(self) -> "State":
        """Undo `split` for the random streams: each is one again, past what its members used.

        Values that were repeated by `split` stay as they are: what to make of different members
        (the first, the mean) is for you to say.

        Returns:
            The new State; this one is used up.

        Raises:
            StateError: the State was used up, or no stream in it was split.
        """
        self._check("join")
        split = [m for m in self._streams() if self._entries[m].outer != ()]
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

    def _streams(self) -> list[Any]:
        return [m for m, kind in self._kinds.items() if kind is RngStream]

    def _seeded(self, marker: Any, by: str) -> Stream:
        value: Stream = self._entries[marker]
        if value.key is None:
            raise RngError(
                explain(
                    f"State.{by}({self._names[marker]})",
                    "a stream with a key",
                    "one that was not seeded",
                    cure=["once, after making the model:", "state = state.seed(jax.random.key(0))"],
                )
            )
        return value

    def _succeed(self, entries: dict[Any, Any], by: str) -> "State":
        self._used = by
        return _make(entries, self._names, self._kinds)

    def _check(self, by: str) -> None:
        if self._used:
            raise StateError(
                explain(
                    f"State.{by}",
                    "the newest State",
                    f"Attempted to use old state: one that {self._used} has already replaced",
                    cure=[
                        "go on with what came back; using the old one would lose an update:",
                        "x, state = layer1(x, state)",
                        "x, state = layer2(x, state)",
                    ],
                )
            )

    def _marker(self, item: Any, by: str, kind: type = AbstractToken) -> Any:
        if not isinstance(item, kind):
            name = "token" if kind is AbstractToken else kind.__name__
            raise ArgumentError(explain(f"State.{by}(item)", f"a {name}", describe(item)))
        if item.marker not in self._entries:
            name = "one without a name" if isinstance(item.marker, Unnamed) else repr(item.marker)
            self._refuse_foreign(name, by)
        return item.marker

    def _refuse_foreign(self, name: str, by: str) -> None:
        raise TokenError(
            explain(
                f"State.{by}",
                f"a token of the model that this State was made with ({self._listing()})",
                f"a token of another model: {name}",
                cure=[
                    "make model and State together:",
                    "model, state = pm.make_with_state(Model)(...)",
                ],
            )
        )

    def _listing(self) -> str:
        names = list(self._names.values())
        return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") or "it has none"

    def _check_fit(self, marker: Any, value: Any) -> None:
        old = self._entries[marker]
        name = self._names[marker]
        if jtu.tree_structure(old) != jtu.tree_structure(value):
            got = tree_pformat(value)
            raise StateError(
                explain(f"State.set for {name}", f"a value of structure {tree_pformat(old)}", got)
            )
        for (path, was), now in zip(
            jtu.tree_leaves_with_path(old), jtu.tree_leaves(value), strict=True
        ):
            if _kind(was) != _kind(now):
                raise StateError(
                    explain(
                        f"State.set for {path_text(path, name)}",
                        f"{describe(was)}, as before",
                        describe(now),
                        cure="shape and dtype of a value cannot change; "
                        "cast or reshape the new one",
                    )
                )

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

    def __pending__(self) -> Any:
        paths = None if self._kept is None or self._kept.containers else ()
        return ft.partial(_make_pending, self._names, self._kinds, paths)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, State) or list(other._entries) != list(self._entries):
            return False
        return bool(tree_equal([*self._entries.values()], [*other._entries.values()]))

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __child_kinds__(self) -> list[type]:
        return list(self._kinds.values())

    def __repr__(self) -> str:
        return tree_pformat(self)

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        if self._used:
            return wl.TextDoc(f"State(<used up by {self._used}>)")
        pairs = [(self._names[m], v) for m, v in self._entries.items()]
        return wl.bracketed(
            begin=wl.TextDoc("State("),
            docs=wl.named_objs(pairs, **kwargs),
            sep=wl.comma,
            end=wl.TextDoc(")"),
            indent=kwargs["indent"],
        )


def _kind(leaf: Any) -> Any:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return tuple(leaf.shape), leaf.dtype
    return class_of(leaf)


def _as_array(leaf: Any) -> Any:
    given = isinstance(leaf, jax.Array) or not is_array_like(leaf)
    return leaf if given else jnp.asarray(leaf)


def _repeat(n: int, leaf: Any) -> Any:
    return jnp.broadcast_to(leaf, (n, *jnp.shape(leaf)))


def _make(entries: dict[Any, Any], names: dict[Any, str], kinds: dict[Any, type]) -> State:
    state = object.__new__(State)
    state._entries, state._names = entries, names  # pyright: ignore[reportPrivateUsage]
    state._kinds, state._used = kinds, ""  # pyright: ignore[reportPrivateUsage]
    state._kept = None  # pyright: ignore[reportPrivateUsage]
    return state


def _make_pending(names: Any, kinds: Any, paths: Any, structure: Structure, arrays: Any) -> State:
    state = object.__new__(State)
    state._names, state._kinds = names, kinds  # pyright: ignore[reportPrivateUsage]
    state._used = ""  # pyright: ignore[reportPrivateUsage]
    state._kept = Snapshot(arrays, structure, (), paths)  # pyright: ignore[reportPrivateUsage]
    return state


def name_entries(state: State, names: dict[Any, str]) -> State:
    """A State whose entries are known by path: `names` goes from old markers to paths."""
    return _make(
        {names[m]: v for m, v in state._entries.items()},  # pyright: ignore[reportPrivateUsage]
        {n: n for n in names.values()},
        {names[m]: k for m, k in state._kinds.items()},  # pyright: ignore[reportPrivateUsage]
    )


def _flatten(state: State) -> tuple[tuple[Any, ...], Any]:
    state._check("use in a transform")  # pyright: ignore[reportPrivateUsage]
    entries, names = state._entries, state._names  # pyright: ignore[reportPrivateUsage]
    kinds = state._kinds  # pyright: ignore[reportPrivateUsage]
    return tuple(entries.values()), tuple((m, names[m], kinds[m]) for m in entries)


def _flatten_with_keys(state: State) -> tuple[tuple[Any, ...], Any]:
    children, aux = _flatten(state)
    pairs = zip(aux, children, strict=True)
    return tuple((jtu.DictKey(name), child) for (_, name, _), child in pairs), aux


def _unflatten(aux: Any, children: Any) -> State:
    markers = [marker for marker, _, _ in aux]
    return _make(
        dict(zip(markers, children, strict=True)),
        {marker: name for marker, name, _ in aux},
        {marker: kind for marker, _, kind in aux},
    )


jtu.register_pytree_with_keys(State, _flatten_with_keys, _unflatten, _flatten)
