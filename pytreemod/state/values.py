"""`State`: the values of a model's tokens.

A State is a dict from each token's marker to its value, and rows with the tokens' names and
classes. Every change makes another State with the same rows, and uses this one up: it
refuses from then on, so that no update is lost silently.

In order, the file has the methods for users, the checks of tokens and values, the interface to the
library, and the registration with JAX. A State caches its own snapshot (see `tree.snapshots`). The
initial values are in `initial_values`, the arithmetic of keys in `streams`, the relation of States
and substates in `history`, and the errors in `refusals`.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Mapping, Set
from typing import Any, TypeVar, cast

import jax

from pytreemod.errors import ArgumentError, describe
from pytreemod.state import refusals, streams
from pytreemod.state.forms import as_array, check_form, check_made_ranks, is_strong
from pytreemod.state.history import History, start_lock
from pytreemod.state.initial_values import first_values, paths_by_marker
from pytreemod.state.key_sources import InitKeys, KeyLike
from pytreemod.state.rows import Rows
from pytreemod.state.streams import Stream
from pytreemod.state.tokens import (
    AbstractToken,
    RngStream,
    StateIndex,
    Unnamed,
    holding,
    map_tokens,
    tokens_of,
)
from pytreemod.tree.comparison import are_equal
from pytreemod.tree.nodes import locations
from pytreemod.tree.paths import path_text
from pytreemod.tree.printing import rich_rows, rich_text, tree_pformat
from pytreemod.tree.renewing import EDITABLE
from pytreemod.tree.selecting import as_selector
from pytreemod.tree.snapshots import AbstractState, Snapshot, Structure, last_use, take_snapshot
from pytreemod.typing import PyTree, jtu

_M = TypeVar("_M")
_V = TypeVar("_V")


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
        "_fresh",
        "_history",
        "_rows",
        "_used",
        "_values",
    )

    _values: dict[Any, Any]
    _history: History | None
    _rows: Rows
    __cached_snapshot__: Snapshot | None
    # Deleted by the call that uses it up, which only one thread can do.
    _fresh: bool
    _used: tuple[str, Any] | None

    def __init__(self, model: PyTree):
        found = tokens_of(model)
        self._values, self._rows = first_values(model, found, [token.marker for _, token in found])
        self._used, self.__cached_snapshot__, self._history = None, None, None
        self._fresh = True
        for locs in paths_by_marker(found).values():
            if len(locs) > 1:
                raise refusals.doubled(locs)

    def get(self, item: StateIndex[_V]) -> _V:
        """Return the value of a token.

        Args:
            item: the token.

        Returns:
            The value. Lists, dicts and other containers in it are copies: changing
            them changes nothing in the State.

        Raises:
            StateError: if the State was used up.
            TokenError: if it has no such token.
            ArgumentError: if `item` is not a token.

        Examples:
            >>> import jax.numpy as jnp
            >>> import pytreemod as pm
            >>> index = pm.StateIndex(jnp.asarray(1.0))
            >>> float(pm.State(index).get(index))
            1.0
        """
        # Checked here, too, to save a call: this is the most frequent method.
        if self._used:
            self._check("get", item)
        value: Any = self._values[self._marker(item, "get", StateIndex)]
        # Nearly all values are single arrays, or tuples of them, which are immutable.
        if not isinstance(value, jax.Array):
            return _apart(value)
        return value  # pyright: ignore[reportReturnType]  (_V is Array, then)

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
            TokenError: if it has no such token.
            ArgumentError: if `item` is not a token.

        Examples:
            >>> import jax.numpy as jnp
            >>> import pytreemod as pm
            >>> index = pm.StateIndex(jnp.asarray(1.0))
            >>> state = pm.State(index)
            >>> state = state.set(index, jnp.asarray(2.0))
        """
        self._check("set", item)
        marker = self._marker(item, "set", StateIndex)
        row, old = self._rows[marker], self._values[marker]
        check_made_ranks(f"State.set({row.name})", row.name, row.ranks, old)
        values = {**self._values, marker: self._fitting(marker, value, "set")}
        return self._succeed(values, "set", marker)

    def substate(self, pytree: PyTree) -> State:
        """Return the part of this State for the tokens in a tree, such as one layer.

        Args:
            pytree: a tree with tokens in it.

        Returns:
            A new State; this one stays usable, so that the part can be put back.

        Raises:
            StateError: if the State was used up, or a token is at two paths of the tree.
            TokenError: if it lacks one of the tokens.

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
        wanted = {self._marker(token, "substate") for _, token in found}
        if len(wanted) < len(found):
            refusals.check_single("substate", paths_by_marker(found), self._rows)
        rows = self._rows.only(wanted)
        values = {row.marker: self._values[row.marker] for row in rows}
        return _make(values, rows, self._own_history().branch(values))

    def update(self, substate: State) -> State:
        """Return a State with the values of a substate instead of this one's.

        Values that the substate has not changed are taken from this State, so that an update in
        either of the two is preserved. A substate that a transform returns is another State of
        unknown origin: all of its values are taken.

        Args:
            substate: a State with some of this one's tokens.

        Returns:
            The new State; both others are used up.

        Raises:
            StateError: if one of the States was used up; or a value does not fit, or was changed in
                both since the substate was taken. Or this State has changed, and the substate has
                not.
            TokenError: if `substate` has a token that this one lacks.
            ArgumentError: if `substate` is not a State.

        Examples:
            >>> import jax.numpy as jnp
            >>> import pytreemod as pm
            >>> a, b = pm.StateIndex(jnp.asarray(1.0)), pm.StateIndex(jnp.asarray(2.0))
            >>> state = pm.State((a, b))
            >>> part = state.substate((a, b)).set(a, jnp.asarray(3.0))
            >>> state = state.set(b, jnp.asarray(4.0)).update(part)
            >>> float(state.get(a)), float(state.get(b))
            (3.0, 4.0)
        """
        self._check("update")
        if not isinstance(substate, State):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
            raise ArgumentError("State.update(substate)", "a State", describe(substate))
        substate._check("update")
        for row in substate._rows:
            if row.marker not in self._values:
                raise refusals.foreign("update", row.name, self._rows)
        changed = self._changed_in(substate)
        fitting = {m: self._fitting(m, substate._values[m], "update") for m in changed}
        # Not earlier: an update that is refused leaves both usable.
        substate._claim("update")
        if self._history is not None:
            self._history.lent -= substate._values.keys()
        return self._succeed({**self._values, **fitting}, "update")

    def _own_history(self) -> History:
        # Created on first use: most States have no substates.
        if self._history is None:
            with start_lock:
                self._history = self._history or History()
        return self._history

    def _changed_in(self, substate: State) -> list[Any]:
        """Return the markers of the values in a substate that are to replace this one's."""
        mine, others = self._values, substate._values
        taken = None if self._history is None else self._history.taken_by(substate._history)
        if taken is None:
            return [marker for marker, value in others.items() if value is not mine[marker]]
        changed = [marker for marker, value in others.items() if value is not taken[marker]]
        moved = [marker for marker, value in taken.items() if value is not mine[marker]]
        lost = [marker for marker in moved if marker in changed] if changed else moved
        if lost:
            refuse = refusals.changed_in_both if changed else refusals.changed_in_whole
            raise refuse(self._rows[marker].name for marker in lost)
        return changed

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
        # With the same history: substates of the old one can be put back into it.
        return _make(self._values, self._rows, self._history)

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
            RngError: if `key` is not a random key, or `select` picks no stream.
            SpecError: if `select` names something that is not in the State.
            StateError: if the State was used up.

        Examples:
            >>> import jax
            >>> import pytreemod as pm
            >>> stream = pm.RngStream()
            >>> state = pm.State(stream).seed(jax.random.key(0))
        """
        self._check("seed")
        if not isinstance(key, InitKeys):
            streams.check_seed("State.seed(key)", key)
        chosen = self._rows.of_kind(RngStream)
        if select is not None:
            picked = self._chosen(select)
            chosen = [marker for marker in chosen if marker in picked]
            if not chosen:
                raise refusals.nothing_to_seed(select)
        # After all checks: an error must not use up a key.
        key = next(key) if isinstance(key, InitKeys) else key
        seeded = streams.seeded(key, [self._rows[marker].name for marker in chosen])
        return self._succeed({**self._values, **dict(zip(chosen, seeded, strict=True))}, "seed")

    def next_key(self, stream: RngStream) -> tuple[Any, State]:
        """Return a new key of a random stream; this State is used up.

        Args:
            stream: the token.

        Returns:
            The key, and the new State.

        Raises:
            RngError: if the streams were not seeded, or this one was split and must be used under a
                map.
            StateError: if the State was used up.
            TokenError: if it has no such token.

        Examples:
            >>> import jax
            >>> import pytreemod as pm
            >>> stream = pm.RngStream()
            >>> state = pm.State(stream).seed(jax.random.key(0))
            >>> key, state = state.next_key(stream)
        """
        self._check("next_key", stream)
        marker = self._marker(stream, "next_key", RngStream)
        key, value = streams.use(self._single(marker, "next_key"))
        return key, self._succeed({**self._values, marker: value}, "next_key", marker)

    def split(self, n: int, select: Any = None) -> State:
        """Return a State for `n` members: chosen values get a leading axis; this one is used up.

        Streams differ from member to member; other values are repeated. Pass it with
        `in_axes=pm.by({pm.RngStream: 0, ...: None})`, or 0 for the values that were chosen. Outside
        of the map, those can be read, but not set.

        Args:
            n: how many members, at least one.
            select: a selector over this State, such as a path, `pm.RngStream` or
                `pm.StateIndex`; all random streams by default.

        Returns:
            The new State.

        Raises:
            ArgumentError: if `n` is not such a count.
            RngError: if a chosen stream was not seeded, or is already split.
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
        if type(n) is not int or n < 1:
            raise ArgumentError("State.split(n)", "a count of 1 or more", describe(n))
        chosen = self._rows.of_kind(RngStream) if select is None else self._chosen(select)
        values = dict(self._values)
        for marker in chosen:
            if issubclass(self._rows[marker].kind, RngStream):
                values[marker] = streams.split(self._single(marker, "split"), n)
            else:
                values[marker] = streams.repeated(values[marker], n)
        return self._succeed(values, "split")

    def join(self) -> State:
        """Undo `split` for the random streams: each is one again, advanced past its members.

        Values that `split` repeated are unchanged: you decide how to combine those of the members
        (the first, the mean).

        Returns:
            The new State; this one is used up.

        Raises:
            StateError: if the State was used up, or no stream in it was split.
        """
        self._check("join")
        every = self._rows.of_kind(RngStream)
        split = [marker for marker in every if self._values[marker].outer != ()]
        if not split:
            raise refusals.nothing_to_join()
        joined = {m: streams.join(self._values[m]) for m in split}
        return self._succeed({**self._values, **joined}, "join")

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
            TokenError: if a token of the model has its value in another State.
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
        locs = paths_by_marker(tokens_of(model))
        mine = {marker: found for marker, found in locs.items() if marker in self._rows}
        for marker, found in locs.items():
            if marker not in mine and not isinstance(marker, Unnamed):
                raise refusals.foreign("fill", marker, self._rows, found)
        refusals.check_single("fill", mine, self._rows)

        def restore(token: Any) -> Any:
            known = token.marker in self._rows
            return holding(token, self._values[token.marker]) if known else token

        filled = map_tokens(restore, model)
        self._claim("fill")
        return filled

    def _chosen(self, select: Any) -> list[Any]:
        # Streams without a key have no leaf to pick, so they get one.
        values = {
            marker: Stream(_UNSEEDED) if isinstance(value, Stream) and value.key is None else value
            for marker, value in self._values.items()
        }
        probe = _make(values, self._rows)
        picked = as_selector(select).mask(probe)
        names = {s.path[0].key for s, hit in zip(locations(probe), picked, strict=True) if hit}
        return [row.marker for row in self._rows if row.name in names]

    def _single(self, marker: Any, by: str) -> Stream:
        """Return the value of a stream that is seeded and not split."""
        value: Stream = self._values[marker]
        if value.key is None:
            raise refusals.unseeded(by, self._rows[marker].name)
        # A device's shard of a split stream is a single stream that still has an axis.
        if value.count.ndim and value.count.size != 1:
            name = self._rows[marker].name
            raise refusals.split_stream(name, value.count.shape[0], by)
        return value

    def _succeed(self, values: dict[Any, Any], by: str, marker: Any = None) -> State:
        self._claim(by, marker)
        if self._history is not None:
            self._history.note_used(self._values)
            self._history.lent = set()
        return _make(values, self._rows, self._history)

    def _claim(self, by: str, marker: Any = None) -> None:
        """Use this State up, which only one thread can do, and only once."""
        try:
            # Atomic in Python, unlike a check followed by a store.
            del self._fresh
        except AttributeError:
            raise refusals.used_up(by, self._user(), []) from None
        self._used = by, marker
        last_use.mark = object()

    def _check(self, by: str, item: Any = None) -> None:
        if self._used:
            marker = getattr(item, "marker", None)
            names = [row.name for row in self._rows if row.marker == marker]
            raise refusals.used_up(by, self._user(), names)

    def _user(self) -> str:
        by, marker = self._used or ("another thread", None)
        return by if marker is None else f"{by}({self._rows[marker].name})"

    def _marker(self, item: Any, by: str, kind: type = AbstractToken) -> Any:
        if not isinstance(item, kind):
            raise refusals.no_token(by, item, kind)
        if item.marker not in self._values:
            raise refusals.foreign(by, item.marker, self._rows)
        return item.marker

    def _fitting(self, marker: Any, value: Any, by: str) -> Any:
        """Return a value in its stored form, if it may replace the present one."""
        old = self._values[marker]
        # Nearly all values are single arrays, which need no other check.
        strong = is_strong(value) and isinstance(old, jax.Array)
        if strong and value.shape == old.shape and value.dtype == old.dtype:
            return value
        value = jtu.tree_map(as_array, value)
        check_form(f"State.{by} for", self._rows[marker].name, old, value)
        return value

    def __getattr__(self, name: str) -> Any:
        # A State that a jitted call returned is filled in when a value is first requested.
        if name != "_values":
            raise AttributeError(f"'State' object has no attribute {name!r}", name=name, obj=self)
        cached = cast("Snapshot", self.__cached_snapshot__)
        self._values = cached.structure.assemble(cached.arrays)._values
        # It has nodes of unknown classes: the snapshot could not be checked later.
        if cached.paths is None:
            self.__cached_snapshot__ = None
        return self._values

    def __snapshot__(self) -> Snapshot:
        self._check("use in a transform")
        cached = self.__cached_snapshot__
        if cached is None or (cached.containers and not cached.is_current()):
            cached, may_cache = take_snapshot(self)
            self.__cached_snapshot__ = cached if may_cache else None
        return cached

    def __usable__(self) -> bool:
        return not self._used

    def __values__(self) -> Mapping[Any, PyTree]:
        return self._values

    def __replaced__(self) -> Set[Any]:
        if self._used and self._used[0] != "fill":
            return self._values.keys()
        return set() if self._history is None else self._history.lent

    def __note_copy__(self, copy: State) -> None:
        if copy is not self and copy._rows is self._rows:
            self._own_history().lent |= copy.__replaced__()

    def __drawn__(self, after: State) -> list[str]:
        both = [m for m in self._rows.of_kind(RngStream) if m in after._rows]
        pairs = [(marker, self._values[marker], after._values[marker]) for marker in both]
        # A stream that got another key was seeded.
        return [
            self._rows[marker].name
            for marker, old, new in pairs
            if new.key is old.key and new.count is not old.count
        ]

    def __pending__(self) -> Any:
        paths = (
            None if self.__cached_snapshot__ is None or self.__cached_snapshot__.containers else ()
        )
        return ft.partial(_make_pending, self._rows, paths)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, State) or list(other._values) != list(self._values):
            return False
        return are_equal([*self._values.values()], [*other._values.values()])

    # It is equal by value, and arrays cannot be hashed by value.
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __reduce__(self) -> Any:
        # A copy, or a State in another process, is not related to this one's history.
        return _make_again, (self._values, self._rows, self._used)

    def __child_kinds__(self) -> list[type]:
        return [row.kind for row in self._rows]

    def __layers__(self) -> list[tuple[int, ...]]:
        # For names in files.
        return [row.layers for row in self._rows]

    def __repr__(self) -> str:
        return tree_pformat(self)

    def __pdoc__(self, **kwargs: Any) -> Any:
        import wadler_lindig as wl  # As in tree.printing.

        if self._used:
            return wl.TextDoc(f"State(<used up by {self._user()}>)")
        pairs = [(row.name, self._values[row.marker]) for row in self._rows]
        return wl.bracketed(
            begin=wl.TextDoc("State("),
            docs=wl.named_objs(pairs, **kwargs),
            sep=wl.comma,
            end=wl.TextDoc(")"),
            indent=kwargs["indent"],
        )

    def __treescope_repr__(self, path: str | None, subtree_renderer: Callable[..., Any]) -> Any:
        if self._used:
            return rich_text(f"State(<used up by {self._user()}>)")
        # Values are read by tokens, for which there is no code to show.
        rows = [(row.name, self._values[row.marker], "") for row in self._rows]
        return rich_rows(State, rows, None, subtree_renderer)


class _Unseeded:
    """The key of a stream that is not seeded."""


_UNSEEDED = _Unseeded()


def _apart(value: Any) -> Any:
    """Return a value in new containers, which may be changed without changing the State."""
    if type(value) is tuple:
        for part in cast("tuple[Any, ...]", value):
            if not isinstance(part, jax.Array):
                break
        else:
            return cast("Any", value)
    leaves, treedef = jtu.tree_flatten(value)
    return treedef.unflatten(leaves)


# pyright: reportPrivateUsage=false
# The functions below belong to the class State: JAX needs functions.


def _make(values: dict[Any, Any], rows: Rows, history: History | None = None) -> State:
    # Bypass `__init__`, which takes initial values out of a model.
    state = object.__new__(State)
    state._values, state._rows, state._history = values, rows, history
    state._used, state.__cached_snapshot__ = None, None
    state._fresh = True
    return state


def _make_again(values: dict[Any, Any], rows: Rows, used: Any) -> State:
    state = _make(values, rows)
    state._used = used
    return state


def _make_pending(rows: Rows, paths: Any, structure: Structure, arrays: Any) -> State:
    # `_values` stays unset: `__getattr__` computes it at the first read.
    state = object.__new__(State)
    state._rows, state._used, state._history = rows, None, None
    state._fresh = True
    state.__cached_snapshot__ = Snapshot(arrays, structure, (), paths)
    return state


def named_by_path(model: PyTree) -> tuple[State, list[str]]:
    """Return a State whose values are identified by the paths of their tokens.

    Args:
        model: any tree with tokens in it.

    Returns:
        The State, and the path of each token, in order.

    Raises:
        StateError: if a token's initial value is gone, or two tokens have the same path.
    """
    found = tokens_of(model)
    names = [path_text(path) for path, _ in found]
    values, rows = first_values(model, found, names)
    refusals.check_paths_differ(names)
    return _make(values, rows), names


def _flatten(state: State) -> tuple[tuple[Any, ...], Rows]:
    state._check("use in a transform")
    return tuple(state._values.values()), state._rows


def _flatten_with_keys(state: State) -> tuple[tuple[Any, ...], Rows]:
    children, rows = _flatten(state)
    pairs = zip(rows, children, strict=True)
    return tuple((jtu.DictKey(row.name), child) for row, child in pairs), rows


def _unflatten(rows: Rows, children: Any) -> State:
    return _make(dict(zip(rows.by_marker, children, strict=True)), rows)


jtu.register_pytree_with_keys(State, _flatten_with_keys, _unflatten, _flatten)
EDITABLE[State] = False
