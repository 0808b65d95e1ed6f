"""What scans refuse."""

from __future__ import annotations

from typing import Any

from pytreemod.errors import (
    ArgumentError,
    SpecError,
    StructureError,
    describe,
)
from pytreemod.transform.boundary.wrapping import check_count
from pytreemod.typing import Tracer, class_of


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
    # A bool is an int to Python; the others would fail in JAX, by names that no user has written.
    if isinstance(length, (bool, float, str, Tracer)):
        raise ArgumentError(
            f"{where}(length)", "an int that is known while tracing", describe(length)
        )
    if isinstance(length, int) and length < 0:
        raise ArgumentError(f"{where}(length)", "a count", str(length))
    return length


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
