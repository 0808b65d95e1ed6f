"""Find the differentiated leaves that reach the loss, and those that reach its derivative.

JAX returns a gradient of zeros for a leaf that the loss does not use. It does the same for a leaf
that is used behind `stop_gradient`, rounding or a comparison. The numbers do not distinguish these
from a gradient that happens to be zero, but the program does. The function is traced together with
its linearization, once for all leaves. A leaf that is dead code for the loss is unused. A leaf
whose tangent is dead code for the tangent of the loss is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax

from pytreemod.errors import ArgumentError, DerivativeError, UnusedParameterWarning, describe, warn
from pytreemod.tree.traces import needed_inputs
from pytreemod.typing import untyped_jax

Reach: TypeAlias = Literal["reaches", "cut off", "unused"]
Unused: TypeAlias = Literal["error", "warn", "ignore"]


def reach_of(run: Callable[[list[Any]], Any], values: Sequence[Any]) -> list[Reach]:
    """Return how each array reaches the loss.

    Args:
        run: returns the loss, a scalar, for a list of arrays.
        values: the arrays.

    Examples:
        >>> import jax.numpy as jnp
        >>> reach_of(lambda v: v[0] * jnp.sign(v[1]) + 0 * v[2], [1.0, 2.0, 3.0, 4.0])
        ['reaches', 'cut off', 'reaches', 'unused']
    """

    def both(values: list[Any], tangents: list[Any]) -> tuple[Any, Any]:
        loss, along = untyped_jax.linearize(run, values)
        return loss, along(tangents)

    values = list(values)
    jaxpr = jax.make_jaxpr(both)(values, values).jaxpr
    count = len(values)
    used = needed_inputs(jaxpr, [True, False])[:count]
    moving = needed_inputs(jaxpr, [False, True])[count:]
    return [
        "reaches" if moves else "cut off" if is_used else "unused"
        for is_used, moves in zip(used, moving, strict=True)
    ]


def check_unused(where: str, unused: Any) -> None:
    """Refuse an invalid value of `unused`.

    Raises:
        ArgumentError: if it is none of the known words.
    """
    if unused not in ("error", "warn", "ignore"):
        expected = "'error', 'warn' or 'ignore'"
        raise ArgumentError(f"{where}(unused)", expected, describe(unused))


def report_unused(
    where: str, unused: Unused, places: Sequence[tuple[str, Any]], reach: Sequence[Reach]
) -> None:
    """Refuse leaves that get no gradient, or warn about them.

    Args:
        where: the name of the transform.
        unused: what to do.
        places: the path of each leaf, and the leaf.
        reach: how each leaf reaches the loss.

    Raises:
        DerivativeError: if there are some, and `unused` is `"error"`.

    Warns:
        UnusedParameterWarning: if there are some, and `unused` is `"warn"`.
    """
    found = [
        f"{place}: {describe(leaf)}, {_WORDS[reached]}"
        for (place, leaf), reached in zip(places, reach, strict=True)
        if reached != "reaches"
    ]
    if not found:
        return
    expected, got = "a gradient for each parameter", f"{len(found)} without one"
    is_used = "unused" not in reach
    advice = "let its derivative reach the loss" if is_used else "use it in the loss"
    hint = [f"{advice}, or exclude it with `wrt`"]
    first = "cut off" if is_used else "unused"
    place = next(at for (at, _), reached in zip(places, reach, strict=True) if reached == first)
    root, dot, below = place.partition(".")
    # Only Modules have roles, and an argument that a loss names is usually one.
    if dot and root.isidentifier():
        hint = [f"{advice}, or freeze it:"]
        hint.append(f"{root} = pm.with_role({root}, {below!r}, 'buffer')")
    details: dict[str, Any] = {"at": found, "hint": hint}
    if unused == "warn":
        warn(UnusedParameterWarning, where, expected, got, **details)
    else:
        raise DerivativeError(where, expected, got, **details)


_WORDS: dict[Reach, str] = {
    "unused": "unused",
    "cut off": "cut off (by stop_gradient, rounding or a comparison)",
}
