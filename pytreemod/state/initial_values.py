"""The initial values of a State: those of a model's tokens, without shared arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.state import refusals, streams
from pytreemod.state.forms import as_array, ranks_of
from pytreemod.state.rows import Row, Rows
from pytreemod.state.streams import Stream
from pytreemod.state.tokens import Nothing, RngStream, is_moved, is_token
from pytreemod.tree.members import layer_fields
from pytreemod.tree.paths import PathName, path_text
from pytreemod.typing import PyTree, Tracer, jtu

_WithPaths: TypeAlias = list[tuple[tuple[Any, ...], Any]]


def first_values(
    model: PyTree, found: _WithPaths, markers: Iterable[Any]
) -> tuple[dict[Any, Any], Rows]:
    """Return the values of a model's tokens, and their rows, by the given markers."""
    values: dict[Any, Any] = {}
    rows: list[Row] = []
    initial = _Initial()
    fields = layer_fields(model, is_token) if found else []
    for (path, token), marker, layers in zip(found, markers, fields, strict=True):
        value = values[marker] = initial.value(path, token)
        # A stream checks its own value, and is one for all layers.
        form = () if isinstance(token, RngStream) else (ranks_of(value), layers)
        rows.append(Row(marker, PathName.of(path), type(token), *form))
    return values, Rows(rows)


class _Initial:
    """Collects the initial values of the tokens of one model, which must share nothing."""

    def __init__(self) -> None:
        # By id: the model keeps them all alive, so that no id is used twice.
        self.arrays: set[int] = set()
        self.keys: set[Any] = set()

    def value(self, path: tuple[Any, ...], token: Any) -> Any:
        """Return the initial value of a token."""
        if is_moved(token):
            raise refusals.moved(path_text(path))
        if isinstance(token, RngStream):
            return Stream() if token.init is None else self._stream(token.init)
        return None if isinstance(token.init, Nothing) else jtu.tree_map(self._array, token.init)

    def _stream(self, stream: Stream) -> Stream:
        """A stream that appeared before starts without a key: both would draw the same numbers."""
        if stream.key is None:
            return stream
        # By its numbers, because a copy may have come from another process.
        is_traced = isinstance(stream.key, Tracer)
        key = id(stream.key) if is_traced else np.asarray(streams.numbers_of(stream.key)).tobytes()
        if key in self.keys:
            return Stream()
        self.keys.add(key)
        return stream

    def _array(self, leaf: Any) -> Any:
        array = as_array(leaf)
        if id(array) not in self.arrays:
            self.arrays.add(id(array))
            return array
        # One array at two paths could not be donated.
        can_be_donated = isinstance(array, jax.Array) and not isinstance(array, Tracer)
        return jnp.copy(array) if can_be_donated else array


def paths_by_marker(found: _WithPaths) -> dict[Any, list[str]]:
    """Return the paths of each marker."""
    paths: dict[Any, list[str]] = {}
    for path, token in found:
        paths.setdefault(token.marker, []).append(path_text(path))
    return paths
