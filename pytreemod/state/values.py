"""`State`: the values of a model's tokens.

A State is a dict from each token's marker to its value, and rows with the tokens' names and
classes. Every change makes another State with the same rows, and uses this one up: it refuses from
then on, so that no update is lost silently. A substate remembers the values that it took, and
`update` refuses it if the State has others by then.

In order, the file has the methods for users, the checks of tokens and values, what transforms ask
of a State (see `tree.snapshots`), printing, and the registration with JAX.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple, TypeVar, cast

from pytreemod.errors import ArgumentError, StateError, describe
from pytreemod.state import streams
from pytreemod.state.key_sources import InitKeys, KeyLike
from pytreemod.state.rows import Rows, check_ranks, fitting, initial_values, refuse_doubled
from pytreemod.state.streams import Stream
from pytreemod.state.tokens import (
    AbstractToken,
    RngStream,
    StateIndex,
    Unnamed,
    map_tokens,
    tokens_of,
    with_init,
)
from pytreemod.tree.comparison import are_equal
from pytreemod.tree.paths import some_of
from pytreemod.tree.printing import rich_rows, rich_text, tree_pformat
from pytreemod.tree.selecting import as_selector
from pytreemod.tree.snapshots import AbstractState, Snapshot, Structure, last_use, take_snapshot
from pytreemod.typing import PyTree, jtu

_M = TypeVar("_M")
_V = TypeVar("_V")

_FILL = "filled = state.fill(model)  # before a layer is copied"


class _Origin(NamedTuple):
    """Where a substate is from."""

    taken: dict[Any, Any]
    """The values that it took."""

    lent: tuple[set[Any], ...]
    """The sets of replaced values of the State that it was taken from, and of the outermost."""


class State(AbstractState):
    """The values of all tokens of a model, passed in and returned.

    **Form.** A pytree whose leaves are arrays; each value has the path of its token.

    **Make.** With [`make_with_state`][pytreemod.make_with_state], or `State(model)` from a model
    whose tokens still have their initial values.

    **Use.** `get`, `set`, `next_key`, `substate`, `update`; `seed`, `split`, `join` for the random
    streams; `fill` to give a model its values back. A method that returns a new State uses this one
    up: it refuses to be used again, so that no update can be lost. `restored` recovers a State that
    was used up by a call that failed.

    **Laws.** Those of [`StateIndex`][pytreemod.StateIndex]; and
    `state.update(state.substate(m)) == state`; and
    `make_with_state(state.fill)(model) == (model, state)`.

    A State identifies tokens by path alone. A part of another model at the same path, with tokens
    of the same names, counts as its own; see `fill`.

    Args:
        model: any tree with tokens in it, each at one path.

    Raises:
        StateError: if a token's initial value is already in another State; or a token is at two
            paths, for which `make_with_state` would make two tokens.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> index = pm.StateIndex(jnp.asarray(1.0))
        >>> state = pm.State(index)
        >>> new = state.set(index, jnp.asarray(2.0))
        >>> float(new.get(index))
        2.0
    """

    __slots__ = (
        "__cached_snapshot__",
        "__weakref__",
        "_lent",
        "_origin",
        "_rows",
        "_used",
        "_values",
    )

    _values: dict[Any, Any]
    _rows: Rows
    __cached_snapshot__: Snapshot | None
    # The method that has replaced it.
    _used: str | None
    # The values that its substates have replaced.
    _lent: set[Any]
    _origin: _Origin | None

    def __init__(self, model: PyTree):
        found = tokens_of(model)
        refuse_doubled("State(model)", found, "model, state = pm.make_with_state(lambda: model)()")
        self._begin(*initial_values(model, found, [token.marker for _, token in found]))

    def _begin(
        self, values: Any, rows: Rows, origin: _Origin | None = None, used: str | None = None
    ) -> None:
        self._values, self._rows, self._origin, self._used = values, rows, origin, used
        self._lent, self.__cached_snapshot__ = set(), None

    def get(self, item: StateIndex[_V]) -> _V:
        """Return the value of a token.

        Args:
            item: the token.

        Returns:
            The value. Lists, dicts and other containers in it are copies: changing
            them changes nothing in the State.

        Raises:
            StateError: if the State was used up.
            StateError: if it has no such token.
            ArgumentError: if `item` is not a token.

        Examples:
            >>> import jax.numpy as jnp
            >>> import pytreemod as pm
            >>> index = pm.StateIndex(jnp.asarray(1.0))
            >>> float(pm.State(index).get(index))
            1.0
        """
        self._check("get")
        # With new lists and dicts, which belong to the caller.
        leaves, treedef = jtu.tree_flatten(self._values[self._marker("get", item, StateIndex)])
        return treedef.unflatten(leaves)

    def set(self, item: StateIndex[_V], value: _V) -> State:
        """Return a State with another value for a token; this one is used up.

        Args:
            item: the token.
            value: a tree of the structure, shapes and dtypes of the present value.

        Returns:
            The new State.

        Raises:
            StateError: if the State was used up, or the value does not fit. Or the present value
                has more axes than it was made with, because of a map: it can only be set inside the
                map.
            StateError: if it has no such token.
            ArgumentError: if `item` is not a token.

        Examples:
            >>> import jax.numpy as jnp
            >>> import pytreemod as pm
            >>> index = pm.StateIndex(jnp.asarray(1.0))
            >>> state = pm.State(index)
            >>> state = state.set(index, jnp.asarray(2.0))
        """
        self._check("set")
        marker = self._marker("set", item, StateIndex)
        row, old = self._rows[marker], self._values[marker]
        by = f"set({row.name})"
        check_ranks(f"State.{by}", row, old)
        new = fitting(f"State.{by}", row, old, value)
        return self._successor({**self._values, marker: new}, by)

    def substate(self, pytree: PyTree) -> State:
        """Return the part of this State for the tokens in a tree, such as one layer.

        Args:
            pytree: a tree with tokens in it.

        Returns:
            A new State; this one stays usable, so that the part can be put back.

        Raises:
            StateError: if the State was used up, or a token is at two paths of the tree.
            StateError: if it lacks one of the tokens.

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
        found = tokens_of(pytree)
        refuse_doubled("State.substate", found, _FILL)
        wanted = {self._marker("substate", token, AbstractToken) for _, token in found}
        rows = Rows({marker: row for marker, row in self._rows.items() if marker in wanted})
        values = {marker: self._values[marker] for marker in rows}
        outermost = self._origin.lent[-1:] if self._origin else ()
        return _make(values, rows, _Origin(values, (self._lent, *outermost)))

    def update(self, substate: State) -> State:
        """Return a State with the values of a substate instead of this one's.

        A substate that a transform returns is a State of unknown origin, which always fits.

        Args:
            substate: a State with some of this one's tokens.

        Returns:
            The new State; both others are used up.

        Raises:
            StateError: if one of the States was used up; or a value does not fit; or this State has
                another value than when the substate was taken, which would be lost.
            StateError: if `substate` has a token that this one lacks.
            ArgumentError: if `substate` is not a State.

        Examples:
            >>> import jax.numpy as jnp
            >>> import pytreemod as pm
            >>> a, b = pm.StateIndex(jnp.asarray(1.0)), pm.StateIndex(jnp.asarray(2.0))
            >>> state = pm.State((a, b))
            >>> part = state.substate(a).set(a, jnp.asarray(3.0))
            >>> state = state.set(b, jnp.asarray(4.0)).update(part)
            >>> float(state.get(a)), float(state.get(b))
            (3.0, 4.0)
        """
        self._check("update")
        if not isinstance(substate, State):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
            raise ArgumentError("State.update(substate)", "a State", describe(substate))
        substate._check("update")
        self._refuse_foreign("update", substate._rows)
        taken = substate._origin.taken if substate._origin else {}
        newer = [self._rows[m].name for m, old in taken.items() if self._values[m] is not old]
        if newer:
            fact = "State.update: this State has other values than those that the substate took"
            raise StateError(fact, at=newer, hint="part = state.substate(layer)  # once more")
        values = dict(self._values)
        for marker, value in substate._values.items():
            if value is not values[marker]:
                row = self._rows[marker]
                values[marker] = fitting(f"State.update({row.name})", row, values[marker], value)
        # Not earlier: an update that is refused leaves both usable.
        substate._use_up("update")
        return self._successor(values, "update")

    def restored(self) -> State:
        """Return a State with the values of this one, even if this one was used up.

        For a State that was passed to a call that failed, or whose result was lost: the call's
        changes are undone, and the random streams return the same keys again.

        Returns:
            The new State; this one is unchanged.

        Examples:
            >>> import jax.numpy as jnp
            >>> import pytreemod as pm
            >>> def fail(norm, x, state):
            ...     x, state = norm(x, state)
            ...     raise ValueError("something else")
            >>> norm, state = pm.make_with_state(pm.nn.BatchNorm)(3)
            >>> try:
            ...     x, state = fail(norm, jnp.ones((4, 3)), state)
            ... except ValueError:
            ...     state = state.restored()
            >>> x, state = norm(jnp.ones((4, 3)), state)
        """
        return _make(self._values, self._rows, self._origin)

    def seed(self, key: KeyLike, select: Any = None) -> State:
        """Give every random stream its own key; this State is used up.

        The key of a stream depends only on `key` and on the stream's path. A stream that was used
        before starts again.

        Args:
            key: one random key; or the result of `init_keys`, from which the next key is taken.
            select: a selector over this State that picks streams, such as a path; all by
                default.

        Returns:
            The new State.

        Raises:
            StateError: if `select` picks no stream.
            SpecError: if `select` names something that is not in the State.
            StateError: if the State was used up.

        Examples:
            >>> import jax
            >>> import pytreemod as pm
            >>> stream = pm.RngStream()
            >>> state = pm.State(stream).seed(jax.random.key(0))
        """
        self._check("seed")
        chosen = self._streams()
        if select is not None:
            chosen = [marker for marker in self._chosen(select) if marker in chosen]
            if not chosen:
                raise StateError(f"State.seed: {select!r} picks no random stream")
        # After all checks: an error must not use up a key.
        key = next(key) if isinstance(key, InitKeys) else key
        seeded = streams.seeded(key, [self._rows[marker].name for marker in chosen])
        return self._successor({**self._values, **dict(zip(chosen, seeded, strict=True))}, "seed")

    def next_key(self, stream: RngStream) -> tuple[Any, State]:
        """Return a new key of a random stream; this State is used up.

        Args:
            stream: the token.

        Returns:
            The key, and the new State.

        Raises:
            StateError: if the State was used up, its streams were not seeded, or this one was split
                and must be used under a map.
            StateError: if it has no such token.

        Examples:
            >>> import jax
            >>> import pytreemod as pm
            >>> stream = pm.RngStream()
            >>> state = pm.State(stream).seed(jax.random.key(0))
            >>> key, state = state.next_key(stream)
        """
        self._check("next_key")
        marker = self._marker("next_key", stream, RngStream)
        by = f"next_key({self._rows[marker].name})"
        key, value = streams.use(self._single(marker, by))
        return key, self._successor({**self._values, marker: value}, by)

    def split(self, n: int, select: Any = None) -> State:
        """Return a State for `n` members: chosen values get a leading axis; this one is used up.

        Streams differ from member to member; other values are repeated. Pass it with
        `in_axes=pm.by({pm.RngStream: 0, ...: None})`, or 0 for the values that were chosen. Outside
        of the map, those can be read, but not set.

        Args:
            n: how many members.
            select: a selector over this State, such as a path, `pm.RngStream` or
                `pm.StateIndex`; all random streams by default.

        Returns:
            The new State.

        Raises:
            StateError: if a chosen stream was not seeded, or is already split.
            SpecError: if `select` names something that is not in the State.
            StateError: if the State was used up.

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
        values = dict(self._values)
        for marker in self._streams() if select is None else self._chosen(select):
            if issubclass(self._rows[marker].kind, RngStream):
                by = f"split({self._rows[marker].name})"
                values[marker] = streams.split(self._single(marker, by), n)
            else:
                values[marker] = streams.repeated(values[marker], n)
        return self._successor(values, "split")

    def join(self) -> State:
        """Undo `split` for the random streams: each is one again, advanced past its members.

        Values that `split` repeated are unchanged: you decide how to combine those of the members
        (the first, the mean).

        Returns:
            The new State; this one is used up.

        Raises:
            StateError: if the State was used up.
        """
        self._check("join")
        split = [marker for marker in self._streams() if self._values[marker].outer]
        joined = {marker: streams.join(self._values[marker]) for marker in split}
        return self._successor({**self._values, **joined}, "join")

    def fill(self, model: _M) -> _M:
        """Give a model its values back, as the initial values of its tokens; the State is used up.

        This undoes `make_with_state`, so that you can change the model, or make it a part of
        another one, and make it with a State again:

            model, state = pm.make_with_state(state.fill)(changed_model)
            model, state = pm.make_with_state(Pair)(state1.fill(model1), state2.fill(model2))

        A layer of the filled model may be put at a second path, where its values begin as they are
        at the first. A stream begins without a key there and must be seeded, because the two would
        draw the same numbers. A layer from another model brings its values only if that model was
        filled by its own State. If it was not, and has the names of this one's layers, it gets this
        State's values: nothing in it shows where it is from.

            filled = state.fill(model)
            changed = pm.tree_at(lambda m: m.encoder, filled, state2.fill(model2).encoder)
            model, state = pm.make_with_state(lambda: changed)()

        Args:
            model: a tree with tokens in it. Tokens that have no State yet are unchanged. Values
                whose tokens are not in it are dropped.

        Returns:
            A copy of the model.

        Raises:
            StateError: if a token of the model has its value in another State.
            StateError: if two tokens of the model have one name, because a layer is at two paths,
                or because they are from two models; or the State was used up.

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
        found = tokens_of(model)
        # A new layer may be at several paths: it has tokens without names.
        known = [pair for pair in found if pair[1].marker in self._rows]
        refuse_doubled("State.fill", known, _FILL)
        markers = [token.marker for _, token in found]
        self._refuse_foreign("fill", (m for m in markers if not isinstance(m, Unnamed)))

        def restore(token: Any) -> Any:
            values = self._values
            return with_init(token, values[token.marker]) if token.marker in values else token

        filled = map_tokens(restore, model)
        self._use_up("fill")
        return filled

    def _streams(self) -> list[Any]:
        return [marker for marker, row in self._rows.items() if issubclass(row.kind, RngStream)]

    def _chosen(self, select: Any) -> list[Any]:
        # Streams without a key have no leaf to pick, so they get one.
        values = {
            marker: Stream(0) if isinstance(value, Stream) and value.key is None else value
            for marker, value in self._values.items()
        }
        probe = _make(values, self._rows)
        picked = jtu.tree_structure(probe).unflatten(as_selector(select).mask(probe))
        return [marker for marker, marks in picked._values.items() if any(jtu.tree_leaves(marks))]

    def _single(self, marker: Any, by: str) -> Stream:
        """Return the value of a stream that is seeded and not split."""
        value: Stream = self._values[marker]
        if value.key is None:
            hint = "state = state.seed(jax.random.key(0))"
            raise StateError(f"State.{by}: the stream was not seeded", hint=hint)
        # A device's shard of a split stream is a single stream that still has an axis.
        if value.count.ndim and value.count.size != 1:
            fact = f"State.{by}: the stream is split and can only be used under a map"
            raise StateError(fact, hint="in_axes=pm.by({pm.RngStream: 0, ...: None})")
        return value

    def _successor(self, values: dict[Any, Any], by: str) -> State:
        self._use_up(by)
        for lent in self._origin.lent if self._origin else ():
            lent.update(self._values)
        return _make(values, self._rows, self._origin)

    def _use_up(self, by: str) -> None:
        # Once more: another thread may have used it up since the call has begun.
        self._check(by)
        self._used = by
        last_use.mark = object()

    def _check(self, by: str) -> None:
        if self._used:
            # In Equinox's words, by which people know it.
            raise StateError(
                f"State.{by}: attempted to use old state, which {self._used} has replaced",
                hint="state = state.restored()  # if the new State is lost, or not wanted",
            )

    def _marker(self, by: str, item: Any, kind: type) -> Any:
        if not isinstance(item, kind):
            raise ArgumentError(f"State.{by}(token)", f"a token ({kind.__name__})", describe(item))
        marker: Any = item.marker
        self._refuse_foreign(by, [marker])
        return marker

    def _refuse_foreign(self, by: str, markers: Iterable[Any]) -> None:
        for marker in markers:
            if marker not in self._rows:
                known = some_of([row.name for row in self._rows.values()]) or "none"
                fact = f"State.{by}: no value for the token {marker!r}, but for {known}"
                hint = "model, state = pm.make_with_state(Model)(...)"
                raise StateError(fact, hint=hint)

    # ---- what transforms ask of a State: see `tree.snapshots`

    def __getattr__(self, name: str) -> Any:
        # A State that a jitted call returned is filled in when a value is first requested.
        if name != "_values":
            raise AttributeError(f"'State' object has no attribute {name!r}", name=name, obj=self)
        cached = cast("Snapshot", self.__cached_snapshot__)
        self._values = cached.structure.assemble(cached.arrays)._values
        return self._values

    def __snapshot__(self) -> Snapshot:
        self._check("use in a transform")
        # Nobody can change a value, of which `get` returns a copy.
        if self.__cached_snapshot__ is None:
            self.__cached_snapshot__, _ = take_snapshot(self)
        return self.__cached_snapshot__

    def __usable__(self) -> bool:
        return not self._used

    def __values__(self) -> Mapping[Any, PyTree]:
        return self._values

    def __replaced__(self) -> Set[Any]:
        if self._used:
            return set() if self._used == "fill" else self._values.keys()
        return self._lent

    def __note_copy__(self, copy: State) -> None:
        if copy is not self and copy._rows is self._rows:
            self._lent.update(copy.__replaced__())

    def __drawn__(self, after: State) -> list[str]:
        both = [marker for marker in self._streams() if marker in after._rows]
        pairs = [(marker, self._values[marker], after._values[marker]) for marker in both]
        # A stream that got another key was seeded.
        return [
            self._rows[marker].name
            for marker, old, new in pairs
            if new.key is old.key and new.count is not old.count
        ]

    def __pending__(self) -> Any:
        return ft.partial(_pending, self._rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, State) or list(other._values) != list(self._values):
            return False
        return are_equal([*self._values.values()], [*other._values.values()])

    def __reduce__(self) -> Any:
        # A copy, or a State in another process, has no substates and is none.
        return _make, (self._values, self._rows, None, self._used)

    def __token_types__(self) -> list[type]:
        return [row.kind for row in self._rows.values()]

    def __layers__(self) -> list[tuple[int, ...]]:
        # For names in files.
        return [row.layers for row in self._rows.values()]

    def __repr__(self) -> str:
        return tree_pformat(self)

    def __pdoc__(self, **kwargs: Any) -> Any:
        import wadler_lindig as wl  # As in tree.printing.

        if self._used:
            return wl.TextDoc(f"State(<used up by {self._used}>)")
        docs = wl.named_objs(self._by_name(), **kwargs)
        begin, end = wl.TextDoc("State("), wl.TextDoc(")")
        return wl.bracketed(begin, docs, wl.comma, end, kwargs["indent"])

    def __treescope_repr__(self, path: str | None, subtree_renderer: Callable[..., Any]) -> Any:
        if self._used:
            return rich_text(f"State(<used up by {self._used}>)")
        # Values are read by tokens, for which there is no code to show.
        rows = [(name, value, "") for name, value in self._by_name()]
        return rich_rows(State, rows, None, subtree_renderer)

    def _by_name(self) -> list[tuple[str, Any]]:
        return [(row.name, self._values[marker]) for marker, row in self._rows.items()]


# pyright: reportPrivateUsage=false
# The functions below belong to the class State: JAX needs functions.


def _make(values: Any, rows: Rows, origin: _Origin | None = None, used: str | None = None) -> State:
    # Bypass `__init__`, which takes initial values out of a model.
    state = object.__new__(State)
    state._begin(values, rows, origin, used)
    return state


def _pending(rows: Rows, structure: Structure, arrays: Any) -> State:
    state = _make(None, rows)
    # `__getattr__` computes them at the first read.
    del state._values
    state.__cached_snapshot__ = Snapshot(arrays, structure)
    return state


def named_state(model: PyTree, names: list[str]) -> State:
    """Return the State of a model, in which each token is identified by a name.

    Args:
        model: any tree with tokens in it.
        names: for each token, in order.

    Raises:
        StateError: if a token's initial value is gone.
    """
    return _make(*initial_values(model, tokens_of(model), names))


def _flatten(state: State) -> tuple[tuple[Any, ...], Rows]:
    state._check("use in a transform")
    return tuple(state._values.values()), state._rows


def _flatten_with_keys(state: State) -> tuple[tuple[Any, ...], Rows]:
    state._check("use in a transform")
    return tuple((jtu.DictKey(name), value) for name, value in state._by_name()), state._rows


def _unflatten(rows: Rows, children: Any) -> State:
    return _make(dict(zip(rows, children, strict=True)), rows)


jtu.register_pytree_with_keys(State, _flatten_with_keys, _unflatten, _flatten)
