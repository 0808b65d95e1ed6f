"""Splits and joins members: their arrays, tokens, and shared parts.

Each member has an element of each array, and its own tokens. Two things are not stacked: random
streams, of which all members use one, and shared parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import jax

from pytreemod.errors import ArgumentError
from pytreemod.state import streams
from pytreemod.state.streams import Stream
from pytreemod.state.tokens import RngStream, Unnamed, map_tokens, tokens_of, with_fields
from pytreemod.tree import stacking
from pytreemod.tree.kinds import are_one
from pytreemod.tree.partitioning import partition
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.typing import IsLeaf, jtu


def is_shared(path: tuple[Any, ...], shared: Sequence[str]) -> bool:
    """Whether a path is a shared one, or below one."""
    return any(path_text(path[:i]) in shared for i in range(1, len(path) + 1))


def split_members(member: Any, shared: Sequence[str], is_leaf: IsLeaf = None) -> tuple[Any, Any]:
    """Partition the arrays that have an entry for each member from everything else."""
    if not shared:
        return partition(member, is_array, is_leaf=is_leaf)

    def is_own(path: Any, leaf: Any) -> bool:
        return is_array(leaf) and not is_shared(path, shared)

    mask = jtu.tree_map_with_path(is_own, member, is_leaf=is_leaf)
    return partition(member, mask, is_leaf=is_leaf)


def split_streams(member: Any, n: int) -> Any:
    """Give the streams of the members a leading axis, like everything else."""

    def several_of(stream: Stream) -> Stream:
        if stream.key is None:
            return stream
        several = streams.split(stream, n)
        # These are not joined again; the original stream goes on.
        return Stream(several.key, several.count, several.outer[2])

    return _on_streams(member, several_of)


def renewed(member: Any) -> Any:
    """Give members new tokens, which no State has."""
    return _marked(member, (Unnamed() for _ in tokens_of(member)))


def stack_members(members: Sequence[Any], shared: Sequence[str] = ()) -> Any:
    """Join members: one token for those at the same path, and the shared parts once.

    Raises:
        ArgumentError: if the shared parts differ between members.
        StructureError: if two members differ in something else.
    """
    # A name would mean that a State has the value, without the leading axis.
    paths = [[path for path, _ in tokens_of(member)] for member in members]
    markers = [Unnamed() for _ in paths[0]]
    # If the paths of tokens differ, the error of stacking reports it.
    members = [
        _marked(member, markers) if found == paths[0] else member
        for member, found in zip(members, paths, strict=True)
    ]
    if not shared:
        return _first_streams(stacking.stack(members))
    commons = [_shared_leaves(member, shared) for member in members]
    _check_same(commons)

    def hide(path: Any, leaf: Any) -> Any:
        return _SHARED if path_text(path) in commons[0] else leaf

    def show(path: Any, leaf: Any) -> Any:
        return commons[0][path_text(path)] if leaf is _SHARED else leaf

    one = stacking.stack([jtu.tree_map_with_path(hide, member) for member in members])
    return jtu.tree_map_with_path(show, _first_streams(one))


_SHARED = object()


def _shared_leaves(member: Any, shared: Sequence[str]) -> dict[str, Any]:
    leaves = jtu.tree_leaves_with_path(member)
    return {path_text(path): leaf for path, leaf in leaves if is_shared(path, shared)}


def _check_same(commons: Sequence[dict[str, Any]]) -> None:
    ours = commons[0]
    for i, theirs in enumerate(commons[1:], 1):
        # Stacking reports leaves that only one of them has.
        differing = [p for p in ours if p in theirs and not are_one(ours[p], theirs[p])]
        if differing:
            raise ArgumentError(
                "Ensemble.from_members(shared)",
                "members with equal values at shared paths",
                f"a different or unknown value in members[{i}]",
                at=differing,
                hint="copy the value from the first member, or do not share it",
            )


def _first_streams(member: Any) -> Any:
    """Join members so that all use the first one's streams."""

    def first(leaf: jax.Array) -> jax.Array:
        return leaf[0]

    return _on_streams(member, lambda stream: jax.tree.map(first, stream))


def _marked(member: Any, markers: Iterable[Any]) -> Any:
    """Give the tokens of members these markers, in order."""
    rest = iter(markers)

    return map_tokens(lambda token: with_fields(token, {"marker": next(rest)}), member)


def _on_streams(member: Any, change: Callable[[Stream], Stream]) -> Any:
    """Change the values of the streams that members have."""

    def visit(token: Any) -> Any:
        if not isinstance(token, RngStream) or token.init is None:
            return token
        return with_fields(token, {"init": change(cast("Stream", token.init))})

    return map_tokens(visit, member)
