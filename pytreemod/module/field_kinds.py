"""Kinds of fields: declarations that include a check of the value.

A field of a kind is configuration whose value is checked when it is assigned: `width: int =
size()`. Defaults are given by keyword, as type checkers require: `flag(default=True)`.
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
    "It decides which program is compiled. Pass a Python bool, which is static for filter_jit:",
    "pm.filter_jit(step)(model, x, inference=True)",
    "model = pm.inference_mode(model)",
)


def checked(check: Callable[..., Any], *args: Any, optional: bool = False, **options: Any) -> Any:
    """Return a field that stores the result of `check(where, value, *args)`.

    Args:
        check: from the field's name in errors and a value to the value to store; it raises.
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
    """Return a field for an integer of at least `minimum`.

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
    """Return a field for one integer for each axis; a single integer is accepted, too.

    Args:
        minimum: the smallest integer that makes sense.
        count: the field with the number of axes; any number is accepted if None.
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
    """Return a field for a real number from `low` to `high`."""
    return checked(check_number, low, high, **options)


def fraction(**options: Any) -> Any:
    """Return a field for a number from 0 to 1."""
    return number(0.0, 1.0, **options)


def flag(**options: Any) -> Any:
    """Return a field for True or False."""
    return checked(check_flag, **options)


def choice(*words: str, optional: bool = False, **options: Any) -> Any:
    """Return a field for one of a few words; `words` are in upper case, values in either."""
    return checked(check_choice, words, optional=optional, **options)


def array(*, given: str, **options: Any) -> Any:
    """Return a field for an array, or None if the field named `given` says so."""
    return field(given=given, **options)


def assign_fields(node: Any, **values: Any) -> None:
    """Assign the arguments for fields of an instance that is being built.

    As `node.name = value`, for values of wider types than the field's kind stores.
    """
    for name, value in values.items():
        setattr(node, name, value)


# ---- checks


def check_size(where: str, value: Any, minimum: int = 0, *words: str) -> Any:
    """Accept an integer of at least `minimum`, or one of some words.

    Args:
        where: the name of the argument in the error.
        value: what the user passed.
        minimum: the smallest size that makes sense.
        *words: words that are accepted, too.

    Returns:
        A Python int, or the word.

    Raises:
        ArgumentError: if the value is not an integer, or too small.

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
        why = "Sizes are part of the program. Pass a Python int, static for filter_jit:"
        hint = (why, f"{name}=4")
    elif isinstance(value, float) and value.is_integer() and value >= minimum:
        hint = ("write the integer:", f"{name}={int(value)}")
    raise ArgumentError(where, expected, describe(value), hint=hint)


def as_integer(value: Any) -> int | None:
    """Return a Python int if `value` is a concrete integer; None otherwise.

    Booleans are not sizes: in `Linear(3, True)`, a `use_bias` is in the wrong position.
    """
    if type(value) is int:
        return value
    # `operator.index` accepts True as 1, but as a size it is a mistake.
    if type(value) in (bool, np.bool_) or is_traced(value):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_sequence(value: Any) -> Sequence[Any] | None:
    """`value` if it is a list, a tuple or the like (not a string); None otherwise."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return cast("Sequence[Any]", value)
    return None


def check_sizes(where: str, value: Any, count: int, minimum: int = 0) -> tuple[int, ...]:
    """Accept one integer for all axes, or a sequence with one for each.

    Args:
        where: the name of the argument in the error.
        value: what the user passed.
        count: how many axes there are.
        minimum: the smallest value that makes sense.

    Returns:
        `count` Python ints.

    Raises:
        ArgumentError: if it is not an integer, not `count` of them, or too small.

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
    """Whether `value` is unknown because a transform is being applied."""
    return isinstance(value, Tracer)


def as_number(value: Any) -> int | float | None:
    """Return a Python number if `value` is a concrete real number; None otherwise."""
    if not is_array_like(value) or is_traced(value) or np.ndim(value) != 0:
        return None
    number = np.asarray(value).item()
    return number if isinstance(number, (int, float)) and not isinstance(number, bool) else None


def check_number(where: str, value: Any, low: float, high: float = math.inf) -> float:
    """Accept a concrete real number from `low` to `high`.

    Args:
        where: the name of the argument in the error.
        value: what the user passed.
        low: smallest value accepted.
        high: largest value accepted.

    Returns:
        A Python float.

    Raises:
        ArgumentError: if it is not a number, or out of range.

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
        where: the name of the argument in the error.
        value: what the user passed.
        choices: the words, in upper case.

    Returns:
        The word in upper case.

    Raises:
        ArgumentError: if it is another word, or not a string.

    Examples:
        >>> check_choice("Conv2d(padding_mode)", "zeros", ("ZEROS", "REFLECT"))
        'ZEROS'
    """
    if isinstance(value, str) and value.upper() in choices:
        return value.upper()
    raise ArgumentError(where, f"one of {', '.join(map(repr, choices))}", describe(value))
