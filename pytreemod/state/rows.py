"""What a State knows of each of its values: the first value, its name, and which others fit.

The rows are the part of a State that JAX does not see. States that follow from one another share
one `Rows`, so that comparing two of them costs nothing.
"""

from __future__ import annotations

import functools as ft
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import StateError, describe
from pytreemod.module.reading import ranks_of
from pytreemod.state.streams import Stream, numbers_of
from pytreemod.state.tokens import Nothing, RngStream, is_moved, is_token
from pytreemod.tree.comparison import compare
from pytreemod.tree.members import layer_fields
from pytreemod.tree.paths import PathName, path_text
from pytreemod.tree.predicates import is_array_like
from pytreemod.typing import PyTree, Tracer, jtu

_WithPaths: TypeAlias = list[tuple[tuple[Any, ...], Any]]


class Row(NamedTuple):
    """The description of one token, without its value."""

    name: PathName
    """The token's path in the model that the State was made with."""

    kind: type
    """The token's class."""

    ranks: tuple[int, ...] = ()
    """The number of axes of each leaf of its value when it was made; () if that is not checked."""

    layers: tuple[int, ...] = ()
    """Which components of the path are fields of layers, whose values have an axis for them."""


class Rows(dict[Any, Row]):
    """The rows of a State by the markers of their tokens, in order; never changed."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Rows) and tuple(self.items()) == tuple(other.items())

    def __ne__(self, other: object) -> bool:
        return not self == other  # A dict's own, which JAX asks, ignores the order.

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        return f"<tokens {', '.join(row.name for row in self.values())}>"


def refuse_doubled(where: str, found: _WithPaths, hint: str) -> None:
    """Refuse a token at several paths: its layers would share a value, but no weights.

    Raises:
        StateError: if there is one.
    """
    paths: dict[Any, str] = {}
    for path, token in found:
        if token.marker in paths:
            at = [paths[token.marker], path_text(path)]
            raise StateError(f"{where}: one token is at several paths", at=at, hint=hint)
        paths[token.marker] = path_text(path)


def initial_values(
    model: PyTree, found: _WithPaths, markers: list[Any]
) -> tuple[dict[Any, Any], Rows]:
    """Return the values of a model's tokens, which share nothing, and their rows.

    Args:
        model: any tree.
        found: its tokens.
        markers: for each token, what identifies it in the State.

    Raises:
        StateError: if the initial value of a token is in another State.
    """
    values: dict[Any, Any] = {}
    rows = Rows()
    # The ids of arrays and the numbers of keys; the model keeps the arrays alive.
    seen: set[Any] = set()
    fields = layer_fields(model, is_token) if found else []
    for (path, token), marker, layers in zip(found, markers, fields, strict=True):
        if is_moved(token):
            fact = "the value of a token is already in a State"
            hint = "model, state = pm.make_with_state(state.fill)(model)"
            raise StateError(fact, at=[path_text(path)], hint=hint)
        if isinstance(token, RngStream):
            # It checks its own value, and is one for all layers.
            values[marker], form = _unshared_stream(token.init, seen), ()
        else:
            init = None if isinstance(token.init, Nothing) else token.init
            value = jtu.tree_map(ft.partial(_unshared, seen=seen), init)
            values[marker], form = value, (ranks_of(value), layers)
        rows[marker] = Row(PathName.of(path), type(token), *form)
    return values, rows


def _unshared_stream(stream: Stream | None, seen: set[Any]) -> Stream:
    """A stream that appeared before starts without a key: both would draw the same numbers."""
    if stream is None or stream.key is None:
        return Stream()
    # By its numbers, because a copy may have come from another process.
    is_traced = isinstance(stream.key, Tracer)
    key = id(stream.key) if is_traced else np.asarray(numbers_of(stream.key)).tobytes()
    if key in seen:
        return Stream()
    seen.add(key)
    return stream


def _unshared(leaf: Any, seen: set[Any]) -> Any:
    """One array at two paths could not be donated: the second one is copied."""
    array = as_array(leaf)
    if id(array) in seen and isinstance(array, jax.Array) and not isinstance(array, Tracer):
        return jnp.copy(array)
    seen.add(id(array))
    return array


def as_array(leaf: Any) -> Any:
    """Return a leaf as a State stores it: numbers and arrays become JAX arrays of a strong type."""
    if is_strong(leaf) or not is_array_like(leaf):
        return leaf
    # A weak type would not survive the first step, which would therefore be compiled twice.
    array = jnp.asarray(leaf)
    return jax.lax.convert_element_type(array, array.dtype)


def is_strong(leaf: Any) -> bool:
    """Whether a leaf is a JAX array with a strong dtype."""
    return isinstance(leaf, jax.Array) and not getattr(leaf, "weak_type", False)


def check_ranks(where: str, row: Row, value: Any) -> None:
    """Refuse a value with a leaf that has more axes than when it was made: those of a map.

    Fewer axes are correct inside a map over values that were made for all members.

    Raises:
        StateError: if there is such a leaf.
    """
    leaves = jtu.tree_leaves_with_path(value)
    # The number of leaves differs if some were taken out.
    pairs = zip(leaves, row.ranks, strict=True) if len(leaves) == len(row.ranks) else ()
    more = [
        f"{path_text(path, row.name)}: {describe(leaf)}, made with {rank} axes"
        for (path, leaf), rank in pairs
        if getattr(leaf, "ndim", 0) > rank
    ]
    if more:
        fact = f"{where}: a value with the axes of a map can only be set inside of one"
        raise StateError(fact, at=more, hint="y, states = jax.vmap(layer)(xs, states)")


def fitting(where: str, row: Row, old: Any, new: Any) -> Any:
    """Return a new value as a State stores it, if it has the structure, shapes and dtypes of `old`.

    Raises:
        StateError: if it has not.
    """
    new = jtu.tree_map(as_array, new)
    at = [each.line(row.name) for each in compare(old, new, _fits)]
    if at:
        raise StateError(f"{where}: a value keeps its structure, shapes and dtypes", at=at)
    return new


def _fits(old: Any, new: Any) -> bool:
    return old.shape == new.shape and old.dtype == new.dtype
