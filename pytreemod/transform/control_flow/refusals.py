"""What scans refuse, and what they say of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytreemod.errors import (
    ArgumentError,
    ShapeError,
    SpecError,
    StructureError,
    describe,
)
from pytreemod.transform.boundary.wrapping import check_count
from pytreemod.tree.paths import path_text
from pytreemod.typing import PyTree, Tracer, class_of, jtu


def refuse_unroll(where: str, unroll: Any) -> None:
    """Refuse an `unroll` that is neither bool nor count.

    Raises:
        ArgumentError: it is none.
    """
    if not isinstance(unroll, bool):
        check_count(f"{where}(unroll)", unroll)


def as_length(where: str, length: Any) -> Any:
    """`length` as it was given, if it is a count.

    Raises:
        ArgumentError: it is none, or is known only when the program runs.
    """
    # A bool is an int to Python; the others would fail in JAX, by names that nobody has written.
    if isinstance(length, (bool, float, str, Tracer)):
        raise ArgumentError(
            f"{where}(length)", "an int that is known while tracing", describe(length)
        )
    if isinstance(length, int) and length < 0:
        raise ArgumentError(f"{where}(length)", "a count", str(length))
    return length


def refuse_no_array(where: str, root: str) -> None:
    """Raise the error for a tree without an array that says how many steps there are."""
    or_length = where == "filter_scan"
    raise ArgumentError(
        f"{where}({root})",
        "an array to take apart, or a length" if or_length else "an array to take apart",
        "neither" if or_length else "none",
        hint=["say how many steps there are:", "length=n"] if or_length else (),
    )


def refuse_axis(where: str, root: str, tree: PyTree, axes: Sequence[int | None]) -> None:
    """Raise the error for arrays that lack the axis that they are to be taken apart along."""
    wrong = [
        (path, place, axis)
        for path, place, leaf, axis in _taken_apart(root, tree, axes)
        if not -leaf.ndim <= axis < leaf.ndim
    ]
    path, _, axis = wrong[0]
    rule = f"pm.by({{{path_text(path)!r}: None, ...: {axis}}})" if path else "None"
    raise ShapeError(
        f"{where}({root})",
        f"arrays with the axis {axis} that they are taken apart along",
        "one without" if len(wrong) == 1 else f"{len(wrong)} without",
        places=[place for _, place, _ in wrong],
        hint=["what is the same for all steps has the axis None:", f"in_axes={rule}"]
        if "associative" not in where
        else (),
    )


def refuse_sizes(
    where: str, root: str, tree: PyTree, axes: Sequence[int | None], length: Any
) -> None:
    """Raise the error for arrays that disagree on the number of steps."""
    sizes: dict[Any, list[str]] = {} if length is None else {length: [f"length={length}"]}
    for _, place, leaf, axis in _taken_apart(root, tree, axes):
        sizes.setdefault(leaf.shape[axis], []).append(f"{place}, axis {axis}")
    more = {size: f" (and {len(of) - 1} more)" if len(of) > 1 else "" for size, of in sizes.items()}
    raise ShapeError(
        f"{where}({root})",
        "one number of steps",
        f"{len(sizes)} numbers",
        places=[f"{size} steps of {of[0]}{more[size]}" for size, of in sorted(sizes.items())],
    )


def _taken_apart(
    root: str, tree: PyTree, axes: Sequence[int | None]
) -> list[tuple[tuple[Any, ...], str, Any, int]]:
    leaves = jtu.tree_leaves_with_path(tree)
    return [
        (path, f"{path_text(path, root)}: {describe(leaf)}", leaf, axis)
        for (path, leaf), axis in zip(leaves, axes, strict=True)
        if axis is not None
    ]


def as_pair(where: str, result: Any) -> tuple[Any, Any]:
    """What a step returned, as a pair.

    Raises:
        StructureError: it is none.
    """
    is_sequence = issubclass(class_of(result), (tuple, list))
    if is_sequence and len(result) == 2:
        return result[0], result[1]
    raise StructureError(
        where,
        "a step that returns a pair (carry, y)",
        f"{len(result)} values" if is_sequence else describe(result),
        hint=["return both, with None for what there is none of:", "return carry, None"],
    )


def axis_in_stack(where: str, place: str, leaf: Any, axis: int | None) -> int:
    """The axis of the stacked results, counted from the front.

    Args:
        where: what to call the transform in errors.
        place: where the array is in the result.
        leaf: the array, as one step returns it.
        axis: what `out_axes` says.

    Raises:
        SpecError: the stacked results will not have such an axis.
    """
    if axis is None:
        raise SpecError(
            f"{where}(out_axes)",
            "an axis for each array that a step returns",
            "None",
            places=[f"{place}: {describe(leaf)}"],
            hint="each step has one of its own; what is to be returned once is carried",
        )
    rank = leaf.ndim + 1
    if not -rank <= axis < rank:
        raise SpecError(
            f"{where}(out_axes)",
            f"an axis from {-rank} to {rank - 1}",
            str(axis),
            places=[f"{place}: {describe(leaf)} in each step"],
        )
    return axis % rank
