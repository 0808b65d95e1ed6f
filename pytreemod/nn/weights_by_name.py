"""The weight of a layer that another layer changes: reads and replaces it by name."""

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
    """Return the array of a layer by its name, of real numbers.

    Args:
        where: names the argument in the error.
        layer: any Module.
        name: of its field.

    Returns:
        The value of the field.

    Raises:
        ArgumentError: if there is no such array, or it is complex.
        UnfinishedError: if the layer lacks a size.

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
    """Accept a name that the layer of a node has, whatever a transform has made of its arrays."""
    if not isinstance(name, str) or not hasattr(node.layer, name):
        _refuse_name(where, node.layer, name)
    return name


def _refuse_name(where: str, layer: Any, name: Any) -> NoReturn:
    """Raise an error that shows the names of the layer's arrays."""
    found = [
        path_text((key,))
        for key, child in children_of(layer) or ()
        if is_inexact_array(child) or is_computed(child)
    ]
    expected = f"the name of a weight in {type(layer).__name__}"
    hint = f"It has: {', '.join(found)}." if found else ()
    raise ArgumentError(where, expected, describe(name), hint=hint)


def with_weight(layer: Any, name: str, weight: Array) -> Any:
    """Return a layer with another weight, however its weight is defined.

    Args:
        layer: any Module.
        name: of the field.
        weight: the value that reading the field returns.

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
    # The layer may have a tie for the weight, which this replaces.
    if any(tie.place == path for tie in ties_of(layer)):
        layer = untie(layer, name)
    return replace_at(layer, [(path, weight)])
