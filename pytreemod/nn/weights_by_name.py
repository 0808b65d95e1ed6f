"""The weight of a layer that another layer changes: found by its name, and put back."""

from __future__ import annotations

from typing import Any, NoReturn

import jax.numpy as jnp
from jaxtyping import Array

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.reading import is_computed, ties_of
from pytreemod.module.ties import untie
from pytreemod.module.unfinished import refuse_unfinished
from pytreemod.tree.nodes import children_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_inexact_array
from pytreemod.tree.surgery import replace_at
from pytreemod.typing import jtu


def weight_by_name(where: str, layer: Any, name: Any) -> Array:
    """The array of a layer by its name, of real numbers.

    Args:
        where: names the argument in the error.
        layer: any Module.
        name: of its field.

    Returns:
        What reading the field gives.

    Raises:
        ArgumentError: there is no such array, or it is complex.
        UnfinishedError: the layer lacks a size.

    Examples:
        >>> from types import SimpleNamespace
        >>> weight_by_name("Half(name)", SimpleNamespace(weight=jnp.ones(3)), "weight").shape
        (3,)
    """
    refuse_unfinished(where, layer)
    weight: Any = getattr(layer, name, None) if isinstance(name, str) else None
    if not is_inexact_array(weight):
        _refuse_name(where, layer, name)
    if jnp.issubdtype(weight.dtype, jnp.complexfloating):
        raise ArgumentError(where, "a weight of real numbers", describe(weight))
    return weight


def accept_weight_name(where: str, name: Any, node: Any) -> str:
    """Accept what a node's layer has, whatever a transform has made of its arrays."""
    if not isinstance(name, str) or not hasattr(node.layer, name):
        _refuse_name(where, node.layer, name)
    return name


def _refuse_name(where: str, layer: Any, name: Any) -> NoReturn:
    """Raise an error that shows which names there would have been."""
    found = [
        path_text((key,))
        for key, child in children_of(layer) or ()
        if is_inexact_array(child) or is_computed(child)
    ]
    expected = f"the name of a weight in {type(layer).__name__}"
    hint = f"It has: {', '.join(found)}." if found else ()
    raise ArgumentError(where, expected, describe(name), hint=hint)


def with_weight(layer: Any, name: str, weight: Array) -> Any:
    """A layer with another weight, wherever the one that it has comes from.

    Args:
        layer: any Module.
        name: of the field.
        weight: what it is to read as.

    Returns:
        A new layer.

    Examples:
        >>> import pytreemod as pm
        >>> class Half(pm.Module):
        ...     weight: Array
        >>> with_weight(Half(jnp.ones(2)), "weight", jnp.zeros(3)).weight.shape
        (3,)
    """
    path = (jtu.GetAttrKey(name),)
    # The layer may hold a tie of its own: this call of it has another weight, all the same.
    if any(tie.place == path for tie in ties_of(layer)):
        layer = untie(layer, name)
    return replace_at(layer, [(path, weight)])
