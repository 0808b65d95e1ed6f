"""Layers of a `Stack` one by one: taken out, and put in.

What a layer holds for itself is an element of each array, and tokens of its own. Only random
streams are not taken apart as arrays are: the Stack has one for all of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import jax

from pytreemod.state import streams
from pytreemod.state.streams import Stream
from pytreemod.state.tokens import RngStream, Unnamed, is_token, tokens_of, with_fields
from pytreemod.transform.maps.stacking import stack
from pytreemod.tree.predicates import is_array
from pytreemod.typing import jtu


def opened(layer: Any, depth: int) -> Any:
    """The layers as one, in which streams have a leading axis like everything else."""

    def members(stream: Stream) -> Stream:
        if stream.key is None:
            return stream
        several = streams.split(stream, depth)
        # These are not joined again; what the stream itself was split from goes on.
        return Stream(several.key, several.count, several.outer[2])

    return _on_streams(layer, members)


def taken(layer: Any, index: Any) -> Any:
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


def renewed(layer: Any) -> Any:
    """A layer whose tokens are new ones, which no State knows."""
    return _marked(layer, (Unnamed() for _ in tokens_of(layer)))


def merged(layers: Sequence[Any]) -> Any:
    """Layers as one, with one token in the place of those that they have there."""
    # A name would say that some State has the value, in which it has no leading axis.
    places = [[path for path, _ in tokens_of(layer)] for layer in layers]
    markers = [Unnamed() for _ in places[0]]
    # Where tokens are not at the same places, stacking the layers says so.
    alike = [
        _marked(layer, markers) if found == places[0] else layer
        for layer, found in zip(layers, places, strict=True)
    ]
    return _closed(stack(alike))


def _marked(layer: Any, markers: Iterable[Any]) -> Any:
    """A layer whose tokens bear the markers, in order."""
    rest = iter(markers)

    def mark(node: Any) -> Any:
        return with_fields(node, {"marker": next(rest)}) if is_token(node) else node

    return jtu.tree_map(mark, layer, is_leaf=is_token)


def _on_streams(layer: Any, change: Callable[[Stream], Stream]) -> Any:
    """A layer in which the values of the streams, where it holds them, are changed."""

    def visit(node: Any) -> Any:
        if not isinstance(node, RngStream) or node.init is None:
            return node
        return with_fields(node, {"init": change(cast("Stream", node.init))})

    return jtu.tree_map(visit, layer, is_leaf=is_token)
