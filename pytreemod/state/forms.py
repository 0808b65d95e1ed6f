"""The form of a State's value, which a new value must preserve: structure, shapes, dtypes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pytreemod.errors import StateError, describe
from pytreemod.tree.comparison import Difference, compare
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array_like
from pytreemod.typing import class_of, jtu


def is_strong(leaf: Any) -> bool:
    """Whether a leaf is a JAX array with a strong dtype."""
    return isinstance(leaf, jax.Array) and not getattr(leaf, "weak_type", False)


def as_array(leaf: Any) -> Any:
    """Return a leaf as a State stores it: numbers and arrays become JAX arrays."""
    if is_strong(leaf) or not is_array_like(leaf):
        return leaf
    # A weak type would not survive the first step, which would therefore be compiled twice.
    array = jnp.asarray(leaf)
    return jax.lax.convert_element_type(array, array.dtype)


def ranks_of(value: Any) -> tuple[int, ...]:
    """Return the number of axes of each leaf of a value; () for a leaf that is not an array."""
    if isinstance(value, jax.Array):
        return (value.ndim,)
    return tuple(getattr(leaf, "ndim", 0) for leaf in jtu.tree_leaves(value))


def check_made_ranks(where: str, name: str, ranks: tuple[int, ...], value: Any) -> None:
    """Refuse a value with a leaf that has more axes than when it was made: those of a map.

    Fewer axes are correct inside a map over values that were made for all members.

    Raises:
        StateError: if there is such a leaf.
    """
    now = ranks_of(value)
    # The number of leaves differs if some were taken out.
    if now == ranks or len(now) != len(ranks):
        return
    leaves = jtu.tree_leaves_with_path(value)
    more = [
        f"{path_text(path, name)}: {describe(leaf)}, made with {made}"
        for (path, leaf), made in zip(leaves, ranks, strict=True)
        if getattr(leaf, "ndim", 0) > made
    ]
    if more:
        raise StateError(
            where,
            "the original number of axes",
            "more axes: a map returned the State, or it was split for one",
            at=more,
            hint=[
                "return values shared by all members without an axis; map over the others:",
                "y, state = jax.vmap(layer, in_axes=(0, None), out_axes=(0, None))(xs, state)",
                "y, states = jax.vmap(layer)(xs, states)  # a value for each member",
                "model, state = pm.make_with_state(state.fill)(model)  # one value, with axes",
            ],
        )


def check_form(where: str, name: str, old: Any, new: Any) -> None:
    """Refuse a new value that differs from the old one in structure, shape or dtype.

    Raises:
        StateError: if it differs.
    """
    found = [each for each in compare(old, new, _fits) if not _is_other_text(each)]
    if found:
        raise StateError(
            f"{where} {name}: a value keeps its structure, shapes and dtypes",
            at=[each.line(name) for each in found],
        )


def _fits(old: Any, new: Any) -> bool:
    return (jnp.shape(old), jnp.result_type(old)) == (jnp.shape(new), jnp.result_type(new))


def _is_other_text(each: Difference) -> bool:
    """Whether two non-array leaves are of one class: such a value may change."""
    is_leaf = not each.is_static and jtu.all_leaves([each.old]) and not is_array_like(each.old)
    return is_leaf and class_of(each.old) is class_of(each.new)
