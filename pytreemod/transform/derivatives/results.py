"""Check the result of a differentiated function, or of a rule: a scalar loss, or a pair."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pytreemod.errors import ArgumentError, PytreemodError, ShapeError, describe, with_article
from pytreemod.transform.boundary.wrapping import function_name
from pytreemod.tree.nodes import children_of
from pytreemod.tree.predicates import is_array_like
from pytreemod.typing import class_of


def pair_of(
    result: Any,
    where: str,
    pair: str,
    *,
    reason: str = "",
    error: type[PytreemodError] = ArgumentError,
) -> tuple[Any, Any]:
    """Return the two values that a function or a rule must return.

    Args:
        result: the value that it returned.
        where: its name in errors.
        pair: the names of the two: `loss, aux`.
        reason: why there must be two.
        error: the class of error to raise.

    Returns:
        The pair.

    Raises:
        ArgumentError: if it is not a pair, unless `error` is another class.
    """
    kind: Any = class_of(result)
    values: list[Any] = list(result) if issubclass(kind, (tuple, list)) else []
    if len(values) != 2:
        got = f"{len(values)} values" if issubclass(kind, (tuple, list)) else describe(result)
        raise error(f"{where}: the result is no pair ({pair}){reason}, but {got}")
    return values[0], values[1]


def explain_loss(
    where: str,
    fn: Any,
    value: Any,
    error: Exception | None,
    *,
    call: str = "",
    is_holomorphic: bool = False,
) -> None:
    """Raise a better error than JAX's, if the loss is not valid.

    Args:
        where: the name of the transform.
        fn: the function that returned it.
        value: the loss, or its type.
        error: the error that JAX raised, if any.
        call: the transform as code, after `pm.`, if it is not its name alone.
        is_holomorphic: whether the loss must be complex.

    Raises:
        ArgumentError: if it is not a floating number.
        ShapeError: if it is not a scalar.
    """
    title = f"{where} of {function_name(fn)}"
    if not is_array_like(value):
        is_nested = children_of(value) is not None and value is not None
        raise ArgumentError(
            f"{title}: the loss is no scalar, but "
            + (with_article(class_of(value).__name__) if is_nested else describe(value)),
            hint=f"pm.{call or where}(f, has_aux=True)",
        ) from error
    if jnp.shape(value) != ():
        raise ShapeError(
            title,
            "a scalar loss",
            describe(value),
        ) from error
    kind = jnp.inexact if is_holomorphic else jnp.floating
    if not jnp.issubdtype(jnp.result_type(value), kind):
        option = f"pm.{where}(f, holomorphic=True)"
        is_complex = jnp.issubdtype(jnp.result_type(value), jnp.complexfloating)
        raise ArgumentError(
            title,
            "a floating scalar loss",
            describe(value),
            hint=["a loss is real; for a holomorphic function:", "return jnp.abs(loss)", option]
            if is_complex
            else (),
        ) from error
