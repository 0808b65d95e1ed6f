"""Kinds of fields: what a class says once of each of its fields, and what checks it.

A field of a kind is configuration whose value is checked where it is assigned: `width: int =
size()`. Defaults are given by keyword, as type checkers want it: `flag(default=True)`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.array_shapes import COUNTS
from pytreemod.module.fields import Accepts, field
from pytreemod.tree.predicates import is_array_like
from pytreemod.typing import Tracer

TRACED_HINT = (
    "It decides which program is compiled. Pass a bool of Python, which is static for filter_jit:",
    "pm.filter_jit(step)(model, x, inference=True)",
    "model = nn.inference_mode(model)",
)


def checked(check: Callable[..., Any], *args: Any, optional: bool = False, **options: Any) -> Any:
    """A field whose value is what `check(where, value, *args)` gives for it.

    Args:
        check: from the field's name in errors and a value to what is stored; it raises.
        *args: passed on to it.
        optional: whether None is accepted, too.
        **options: as for `field`.
    """

    def accept(where: str, value: Any, node: Any) -> Any:
        del node
        return None if optional and value is None else check(where, value, *args)

    return _static(accept, options)


def _static(accepts: Accepts, options: dict[str, Any]) -> Any:
    return field(static=True, accepts=accepts, **options)


def size(minimum: int = 0, *, scalar: bool = False, optional: bool = False, **options: Any) -> Any:
    """A field that holds an integer of at least `minimum`.

    Args:
        minimum: the smallest size that makes sense.
        scalar: whether `"scalar"` is accepted, which counts as 1 in the shapes of arrays.
        optional: whether None is accepted, too.
        **options: as for `field`.

    Examples:
        >>> from pytreemod import Module
        >>> class Layer(Module):
        ...     width: int = size(1)
        >>> Layer(0)
        Traceback (most recent call last):
        pytreemod.errors.ArgumentError: Layer(width): expected an integer of at least 1, got 0.
    """
    words = {"scalar": 1} if scalar else {}
    metadata = {COUNTS: words} if scalar else {}
    return checked(check_size, minimum, *words, optional=optional, metadata=metadata, **options)


def sizes(
    minimum: int = 0, *, count: str | None = None, optional: bool = False, **options: Any
) -> Any:
    """A field that holds one integer for each axis; one for all is accepted, too.

    Args:
        minimum: the smallest integer that makes sense.
        count: the field that says how many there are; as many as are given if None.
        optional: whether None is accepted, too.
        **options: as for `field`.

    Examples:
        >>> from pytreemod import Module
        >>> class Window(Module):
        ...     dims: int = size(1)
        ...     stride: tuple[int, ...] = sizes(1, count="dims")
        >>> Window(2, 3).stride, Window(2, [1, 2]).replace(stride=4).stride
        ((3, 3), (4, 4))
    """

    def accept(where: str, value: Any, node: Any) -> tuple[int, ...] | None:
        if optional and value is None:
            return None
        axes = getattr(node, count, None) if count is not None else None
        if axes is None:
            given = as_sequence(value)
            axes = 1 if given is None else len(given)
        return check_sizes(where, value, axes, minimum)

    return _static(accept, options)


def number(low: float, high: float = math.inf, **options: Any) -> Any:
    """A field that holds a real number from `low` to `high`."""
    return checked(check_number, low, high, **options)


def fraction(**options: Any) -> Any:
    """A field that holds a number from 0 to 1."""
    return number(0.0, 1.0, **options)


def flag(**options: Any) -> Any:
    """A field that holds True or False."""
    return checked(check_flag, **options)


def choice(*words: str, optional: bool = False, **options: Any) -> Any:
    """A field that holds one of a few words; they are given in upper case, and accepted in both."""
    return checked(check_choice, words, optional=optional, **options)


def array(*, given: str, **options: Any) -> Any:
    """A field that holds an array, or None where the field of the name `given` says so."""
    return field(given=given, **options)


def assign_fields(node: Any, **values: Any) -> None:
    """Assign fields of an instance that is being built what was given for them.

    As `node.name = value` does; for types that are wider than what a field's kind makes of them.
    """
    for name, value in values.items():
        setattr(node, name, value)


# ---- checks


def check_size(where: str, value: Any, minimum: int = 0, *words: str) -> Any:
    """Accept an integer of at least `minimum`, or one of some words.

    Args:
        where: names the argument in the error.
        value: what the user passed.
        minimum: the smallest size that makes sense.
        *words: what else is accepted.

    Returns:
        A Python int, or the word.

    Raises:
        ArgumentError: the value is no integer, or too small.

    Examples:
        >>> check_size("Linear(in_features)", 3)
        3
    """
    whole = as_integer(value)
    if whole is not None and whole >= minimum:
        return whole
    if isinstance(value, str) and value in words:
        return value
    expected = " or ".join([f"an integer of at least {minimum}", *map(repr, words)])
    name, hint = where.partition("(")[2].rstrip(")") or "size", tuple[str, ...]()
    if is_traced(value):
        why = "Sizes are part of the program. Pass an int of Python, static for filter_jit:"
        hint = (why, f"{name}=4")
    elif isinstance(value, float) and value.is_integer() and value >= minimum:
        hint = ("write the integer:", f"{name}={int(value)}")
    raise ArgumentError(where, expected, describe(value), hint=hint)


def as_integer(value: Any) -> int | None:
    """A Python int where `value` is an integer that is known now; None otherwise.

    Booleans are no sizes: `Linear(3, True)` is a `use_bias` in the wrong place.
    """
    if type(value) is int:
        return value
    # `operator.index` takes True for 1; as a size it is a mistake.
    if type(value) in (bool, np.bool_) or is_traced(value):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_sequence(value: Any) -> Sequence[Any] | None:
    """`value` where it is a list, a tuple or the like (no string); None otherwise."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return cast("Sequence[Any]", value)
    return None


def check_sizes(where: str, value: Any, count: int, minimum: int = 0) -> tuple[int, ...]:
    """Accept one integer for all axes, or a sequence with one for each.

    Args:
        where: names the argument in the error.
        value: what the user passed.
        count: how many axes there are.
        minimum: the smallest value that makes sense.

    Returns:
        `count` Python ints.

    Raises:
        ArgumentError: not an integer, not `count` of them, or too small.

    Examples:
        >>> check_sizes("Conv2d(stride)", 2, 2)
        (2, 2)
    """
    whole, given = as_integer(value), as_sequence(value)
    sizes = [whole] * count if given is None else [as_integer(size) for size in given]
    if len(sizes) == count and None not in sizes:
        found = cast("tuple[int, ...]", tuple(sizes))
        if min(found, default=minimum) >= minimum:
            return found
    expected = f"an integer of at least {minimum}, or a sequence of {count} of them"
    raise ArgumentError(where, expected, describe(value))


def is_traced(value: Any) -> bool:
    """Whether `value` is not known yet, because a transform is being applied."""
    return isinstance(value, Tracer)


def as_number(value: Any) -> int | float | None:
    """A Python number where `value` is a real one that is known now; None otherwise."""
    if not is_array_like(value) or is_traced(value) or np.ndim(value) != 0:
        return None
    number = np.asarray(value).item()
    return number if isinstance(number, (int, float)) and not isinstance(number, bool) else None


def check_number(where: str, value: Any, low: float, high: float = math.inf) -> float:
    """Accept a real number that is known now, within `low` and `high`.

    Args:
        where: names the argument in the error.
        value: what the user passed.
        low: smallest value accepted.
        high: largest value accepted.

    Returns:
        A Python float.

    Raises:
        ArgumentError: not a number, or out of range.

    Examples:
        >>> check_number("Dropout(p)", 0.5, 0.0, 1.0)
        0.5
    """
    number = as_number(value)
    if number is not None and low <= number <= high:
        return float(number)
    expected = f"a number from {low:g} to {high:g}" if high < math.inf else f"a number >= {low:g}"
    raise ArgumentError(where, expected, describe(value))


def check_flag(where: str, value: Any) -> bool:
    """Accept True or False (NumPy's included); a traced or truthy value is a mistake."""
    if type(value) in (bool, np.bool_):
        return bool(value)
    hint = TRACED_HINT[0].rstrip(":") + "." if is_traced(value) else ()
    raise ArgumentError(where, "True or False", describe(value), hint=hint)


def check_choice(where: str, value: Any, choices: Sequence[str]) -> str:
    """Accept one of a few words, in upper or lower case.

    Args:
        where: names the argument in the error.
        value: what the user passed.
        choices: the words, in upper case.

    Returns:
        The word in upper case.

    Raises:
        ArgumentError: another word, or no string.

    Examples:
        >>> check_choice("Conv2d(padding_mode)", "zeros", ("ZEROS", "REFLECT"))
        'ZEROS'
    """
    if isinstance(value, str) and value.upper() in choices:
        return value.upper()
    raise ArgumentError(where, f"one of {', '.join(map(repr, choices))}", describe(value))
