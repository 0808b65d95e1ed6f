"""Members one by one: taken out, and put in.

What a member holds for itself is an element of each array, and tokens of its own. Only random
streams are not taken apart as arrays are: there is one for all members. And what all members share
is held back while they are taken apart: it stands there as no array, so that nothing cuts it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import jax

from pytreemod.errors import ArgumentError, describe
from pytreemod.nn.members.checks import Owner, check_leading
from pytreemod.state import streams
from pytreemod.state.streams import Stream
from pytreemod.state.tokens import RngStream, Unnamed, is_token, tokens_of, with_fields
from pytreemod.transform.maps.stacking import stack, unstack
from pytreemod.tree.predicates import is_array
from pytreemod.typing import jtu


def opened(member: Any, n: int) -> Any:
    """The members as one, in which streams have a leading axis like everything else."""

    def several_of(stream: Stream) -> Stream:
        if stream.key is None:
            return stream
        several = streams.split(stream, n)
        # These are not joined again; what the stream itself was split from goes on.
        return Stream(several.key, several.count, several.outer[2])

    return _on_streams(member, several_of)


def taken(member: Any, index: Any) -> Any:
    """Some of the members; of streams there is one for all, unless a single one is taken."""

    def whole(node: Any) -> bool:
        return isinstance(index, slice) and isinstance(node, RngStream)

    def take(leaf: Any) -> Any:
        return leaf[index] if is_array(leaf) else leaf

    return jtu.tree_map(take, member, is_leaf=whole)


def each(owner: Owner, title: str, member: Any, n: int) -> list[Any]:
    """All members one by one, each with tokens of its own.

    Raises:
        ShapeError: an array has not the leading axis.
    """
    member = opened(member, n)
    check_leading(owner, title, n, {owner.member: member})
    has_arrays = any(is_array(leaf) for leaf in jtu.tree_leaves(member))
    return [renewed(one) for one in (unstack(member) if has_arrays else [member] * n)]


def some(owner: Owner, title: str, member: Any, n: int, index: Any) -> Any:
    """A member by number, or several as one by a slice, with tokens of their own.

    Raises:
        ArgumentError: the index is neither an integer nor a slice.
        IndexError: there is no member of that number.
        ShapeError: an array has not the leading axis.
    """
    whole = opened(member, n)
    check_leading(owner, title, n, {owner.member: whole})
    if isinstance(index, slice):
        # Streams stay as they are: there is one for all, however many are taken.
        return renewed(taken(member, index))
    return renewed(taken(whole, _number(owner, n, index)))


def _number(owner: Owner, n: int, index: Any) -> int:
    where = f"{owner.name}[...]"
    try:
        number = operator.index(index)
    except TypeError as error:
        hint = ("An index that is traced takes an element of each array:",)
        one, held = owner.member, f"{owner.call}.{owner.member}"
        hint = (*hint, f"{one} = jax.tree.map(lambda leaf: leaf[i], {held})")
        raise ArgumentError(where, "an integer or a slice", describe(index), hint=hint) from error
    if not -n <= number < n:
        expected = f"an index of one of {n} {owner.member}s"
        raise IndexError(where, expected, str(number))
    return number % n


def _closed(member: Any) -> Any:
    """The way back: the first member's stream goes on for all."""

    def first(leaf: jax.Array) -> jax.Array:
        return leaf[0]

    def closed(stream: Stream) -> Stream:
        return jax.tree.map(first, stream)

    return _on_streams(member, closed)


def renewed(member: Any) -> Any:
    """Members whose tokens are new ones, which no State knows."""
    return _marked(member, (Unnamed() for _ in tokens_of(member)))


def merged(members: Sequence[Any]) -> Any:
    """Members as one, with one token in the place of those that they have there."""
    # A name would say that some State has the value, in which it has no leading axis.
    places = [[path for path, _ in tokens_of(member)] for member in members]
    markers = [Unnamed() for _ in places[0]]
    # Where tokens are not at the same places, stacking the members says so.
    alike = [
        _marked(member, markers) if found == places[0] else member
        for member, found in zip(members, places, strict=True)
    ]
    return _closed(stack(alike))


def _marked(member: Any, markers: Iterable[Any]) -> Any:
    """Members whose tokens bear the markers, in order."""
    rest = iter(markers)

    def mark(node: Any) -> Any:
        return with_fields(node, {"marker": next(rest)}) if is_token(node) else node

    return jtu.tree_map(mark, member, is_leaf=is_token)


def _on_streams(member: Any, change: Callable[[Stream], Stream]) -> Any:
    """Members in which the values of the streams, where they hold them, are changed."""

    def visit(node: Any) -> Any:
        if not isinstance(node, RngStream) or node.init is None:
            return node
        return with_fields(node, {"init": change(cast("Stream", node.init))})

    return jtu.tree_map(visit, member, is_leaf=is_token)
