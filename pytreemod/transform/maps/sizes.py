"""The number of members of a tree: the size of its arrays along their axes, which must agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.tree.nodes import record_of
from pytreemod.tree.paths import path_text
from pytreemod.typing import KeyPath, PyTree, jtu


def common_size(
    where: str,
    named: Sequence[tuple[str, PyTree]],
    leaves: Sequence[Any],
    axes: Sequence[int | None],
    *,
    size: Any = None,
    option: str = "",
    whole: Callable[[str, KeyPath, int], str] | None = None,
) -> Any:
    """Return the size of the arrays of trees along their axes.

    Args:
        where: the name of the transform in errors.
        named: the trees with their names.
        leaves: their leaves, in order.
        axes: the axis of each leaf; None if it is the same for all members.
        size: the size that an option gives; None without such an option.
        option: the name of this option, with a value: `length=n`.
        whole: returns code that makes a leaf the same for all members.

    Raises:
        ShapeError: if an array lacks its axis, or the sizes disagree; the error names all paths.
        ArgumentError: if no array and no option gives the size.
    """
    # Paths are made in a second walk, which calls without a mistake never need.
    pairs = [pair for pair in zip(leaves, axes, strict=True) if pair[1] is not None]
    if all(-leaf.ndim <= axis < leaf.ndim for leaf, axis in pairs):
        sizes = {leaf.shape[axis] for leaf, axis in pairs} | ({size} - {None})
        if len(sizes) == 1:
            return sizes.pop()
    raise _error(where, named, axes, size, option, whole)


def _error(
    where: str, named: Any, axes: Sequence[int | None], size: Any, option: str, whole: Any
) -> ShapeError | ArgumentError:
    paths = [(n, path, leaf) for n, tree in named for path, leaf in jtu.tree_leaves_with_path(tree)]
    places: dict[Any, list[str]] = (
        {} if size is None else {size: [option.replace("=n", f"={size}")]}
    )
    last: list[str] = []
    for (name, path, leaf), axis in zip(paths, axes, strict=True):
        if axis is None:
            continue
        fits = -leaf.ndim <= axis < leaf.ndim
        place = f"{path_text(path, name)}: {describe(leaf)}, axis {axis}"
        # For the first that lacks its axis, or else for the last.
        if whole is not None and None not in places:
            last = [whole(name, path, axis)]
            if leaf.ndim and not fits:
                last = [last[0].replace("None", "0")]
        places.setdefault(leaf.shape[axis] if fits else None, []).append(place)
    if None in places:
        expected, got = "arrays with the mapped axis", "other arrays"
        return ShapeError(where, expected, got, at=places[None], hint=last)
    if not places:
        expected, got = "an array with an axis to map over", "none"
        if option:
            expected, got = f"{expected}, or {option}", "neither"
            hint = ["pass the number of members:", option.replace("=n", "=8")]
            return ArgumentError(where, expected, got, hint=hint)
        return ArgumentError(where, expected, got)
    models = [name for name, tree in named if record_of(tree) is not None]
    if whole is not None and len(models) == 1 and len(named) > 1 and not size:
        last = [whole(models[0], (), 0)]
    more = {
        size: f" (and {len(of) - 1} more)" if len(of) > 1 else "" for size, of in places.items()
    }
    return ShapeError(
        where,
        "one size of the mapped axis",
        " and ".join(map(str, sorted(places))),
        at=[f"{of[0]}{more[size]}" for size, of in sorted(places.items())],
        hint=last,
    )
