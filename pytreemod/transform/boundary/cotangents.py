"""Ask for the cotangent of a recorded value.

A recorded value goes through `look` with an array of zeros. The zeros add nothing to the value, but
their derivative is that of the value. So the gradient by the zeros is the cotangent of the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from pytreemod.tree.predicates import is_inexact_array
from pytreemod.typing import PyTree, jtu


class WithCotangent:
    """A recorded value with its cotangent; a pytree of both.

    Attributes:
        value: the value.
        cotangent: a tree like it, with None for leaves that have none; None if there is none.
        mark: identifies its `Cotangent`, if that is recorded later.
    """

    __slots__ = ("cotangent", "mark", "value")

    def __init__(self, value: PyTree, cotangent: PyTree, mark: int | None = None):
        self.value = value
        self.cotangent = cotangent
        self.mark = mark


class Cotangent:
    """The cotangent of a value that was recorded before; a pytree of it.

    Attributes:
        value: the cotangent.
        mark: the mark of the `WithCotangent`.
    """

    __slots__ = ("mark", "value")

    def __init__(self, value: PyTree, mark: int):
        self.value = value
        self.mark = mark


def _flatten_with(node: WithCotangent) -> tuple[tuple[Any, ...], Any]:
    keys = jtu.GetAttrKey("value"), jtu.GetAttrKey("cotangent")
    return tuple(zip(keys, (node.value, node.cotangent), strict=True)), node.mark


def _flatten(node: Cotangent) -> tuple[tuple[Any, ...], Any]:
    return ((jtu.GetAttrKey("value"), node.value),), node.mark


def _unflatten_with(mark: int | None, children: Any) -> WithCotangent:
    value, cotangent = children
    return WithCotangent(value, cotangent, mark)


def _unflatten(mark: int, children: Any) -> Cotangent:
    return Cotangent(children[0], mark)


jtu.register_pytree_with_keys(WithCotangent, _flatten_with, _unflatten_with)
jtu.register_pytree_with_keys(Cotangent, _flatten, _unflatten)


@jax.custom_jvp
def _look(value: Any, zeros: Any) -> Any:
    return value


@_look.defjvp
def _look_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    moved, added = tangents
    return primals[0], moved + added


def look(value: PyTree, zeros: Sequence[Any]) -> PyTree:
    """Return a value unchanged; its cotangent becomes that of the zeros.

    Args:
        value: any tree.
        zeros: an array for each floating array in it.

    Examples:
        >>> import jax.numpy as jnp
        >>> jax.grad(lambda zeros: (look(jnp.asarray(3.0), [zeros]) ** 2))(jnp.zeros(()))
        Array(6., dtype=float32)
    """
    leaves, treedef = jtu.tree_flatten(value)
    more = iter(zeros)
    leaves = [_look(x, next(more)) if is_inexact_array(x) else x for x in leaves]
    return treedef.unflatten(leaves)


def beside_value(value: PyTree, cotangents: Sequence[Any]) -> PyTree:
    """Return a tree like a value with a cotangent for each floating array, and None elsewhere.

    None, if there are no cotangents.
    """
    if not cotangents:
        return None
    leaves, treedef = jtu.tree_flatten(value)
    more = iter(cotangents)
    return treedef.unflatten([next(more) if is_inexact_array(x) else None for x in leaves])
