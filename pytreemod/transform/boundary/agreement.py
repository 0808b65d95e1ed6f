"""Find the dtype on which values agree that JAX treats as one: results of branches, a carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def may_be_promoted(weak: Any, other: Any) -> Any:
    """The dtype that JAX would give a weakly typed value beside another; None if it would not.

    Args:
        weak: the type (shape, dtype, weak type) of the value.
        other: the type of the other value.
    """
    if not getattr(weak, "weak_type", False):
        return None
    try:
        return jnp.result_type(_example(weak), _example(other))
    except (TypeError, ValueError):
        # Strict promotion does not join these.
        return None


def _example(aval: Any) -> Any:
    # A weak type promotes as the Python numbers of its kind do.
    if not getattr(aval, "weak_type", False):
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return next(number(0) for number, kind in _KINDS if jnp.issubdtype(aval.dtype, kind))


_KINDS = ((int, jnp.integer), (float, jnp.floating), (complex, jnp.complexfloating), (bool, object))


def agreeing_dtype(avals: Sequence[Any]) -> Any:
    """Return the dtype on which values agree that must share one; None if they do not.

    Strongly typed values must have it already, weakly typed ones (Python numbers) must promote to
    it.
    """
    strong = [aval for aval in avals if not getattr(aval, "weak_type", False)]
    target = strong[0] if strong else _highest(avals)
    # A strong value is never promoted: it has the target's dtype, or they do not agree.
    for aval in avals:
        if aval.dtype != target.dtype and may_be_promoted(aval, target) != target.dtype:
            return None
    return target.dtype


def _highest(avals: Sequence[Any]) -> Any:
    best = avals[0]
    for aval in avals[1:]:
        if may_be_promoted(best, aval) == aval.dtype:
            best = aval
    return best
