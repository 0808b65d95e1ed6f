"""Which of the leaves that are differentiated reach the loss, and which reach its derivative.

JAX gives a gradient of zeros to a leaf that the loss does not use, and to one that it uses where
no derivative goes: behind `stop_gradient`, rounding, a comparison. The numbers do not distinguish
these from a gradient that happens to be zero. The program does. The function is traced together
with its linearization, once for all leaves: a leaf that is dead code for the loss is unused, and
one whose tangent is dead code for the loss's tangent is cut off.
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
    """How each of some arrays gets to the loss.

    Args:
        run: gives the loss, a scalar, of a list of arrays.
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
    """Refuse what does not say what to do about leaves without a gradient.

    Raises:
        ArgumentError: it is no word for that.
    """
    if unused not in ("error", "warn", "ignore"):
        expected = "'error', 'warn' or 'ignore'"
        raise ArgumentError(f"{where}(unused)", expected, describe(unused))


def tell_unused(
    where: str, unused: Unused, places: Sequence[tuple[str, Any]], reach: Sequence[Reach]
) -> None:
    """Refuse, or warn of, leaves that get no gradient.

    Args:
        where: who asks.
        unused: what to do.
        places: where each leaf is, and the leaf.
        reach: of each.

    Raises:
        DerivativeError: there are some, and `unused` is `"error"`.

    Warns:
        UnusedParameterWarning: there are some, and `unused` is `"warn"`.
    """
    found = [
        f"{place}: {describe(leaf)}, {_WORDS[way]}"
        for (place, leaf), way in zip(places, reach, strict=True)
        if way != "reaches"
    ]
    if not found:
        return
    expected, got = "a gradient for each parameter", f"{len(found)} without one"
    is_used = "unused" not in reach
    advice = "let a derivative through to it" if is_used else "use it in the loss"
    hint = [f"{advice}, or leave it out of what is differentiated, by `wrt`"]
    first = "cut off" if is_used else "unused"
    place = next(at for (at, _), way in zip(places, reach, strict=True) if way == first)
    root, dot, below = place.partition(".")
    # Roles are of Modules, and what is named in the loss is mostly one.
    if dot and root.isidentifier():
        hint = [f"{advice}, or freeze it:"]
        hint.append(f"{root} = pm.with_role({root}, {below!r}, 'buffer')")
    details: dict[str, Any] = {"places": found, "hint": hint}
    if unused == "warn":
        warn(UnusedParameterWarning, where, expected, got, **details)
    else:
        raise DerivativeError(where, expected, got, **details)


_WORDS: dict[Reach, str] = {
    "unused": "unused",
    "cut off": "cut off (by stop_gradient, rounding or a comparison)",
}
