"""What a differentiated function, or a rule, returns: a pair, where there have to be two."""

from __future__ import annotations

from typing import Any

from pytreemod.errors import ArgumentError, PytreemodError, describe
from pytreemod.typing import class_of


def pair_of(
    result: Any,
    where: str,
    pair: str,
    *,
    reason: str = "",
    error: type[PytreemodError] = ArgumentError,
) -> tuple[Any, Any]:
    """The two values that a function or a rule has to return.

    Args:
        result: what it returned.
        where: what to call it in errors.
        pair: what the two are: `loss, aux`.
        reason: why there have to be two.
        error: the class of error to raise.

    Returns:
        The pair.

    Raises:
        ArgumentError: it is no pair, unless `error` says otherwise.
    """
    kind: Any = class_of(result)
    values: list[Any] = list(result) if issubclass(kind, (tuple, list)) else []
    if len(values) != 2:
        got = f"{len(values)} values" if issubclass(kind, (tuple, list)) else describe(result)
        hint = ["return both:", f"return {pair}"]
        raise error(where, f"a pair ({pair}){reason}", got, hint=hint)
    return values[0], values[1]
