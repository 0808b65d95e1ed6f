"""`resolve`: a model with arrays instead of computed leaves."""

from __future__ import annotations

from typing import Any, TypeVar

from pytreemod.module.reading import evaluate_each, is_computed
from pytreemod.module.ties import untie
from pytreemod.tree.nodes import children_of, locations
from pytreemod.tree.paths import path_text
from pytreemod.tree.renewing import with_children, with_new_containers
from pytreemod.tree.selecting import as_selector
from pytreemod.typing import KeyPath, class_of

_T = TypeVar("_T")


def resolve(model: _T, selector: Any = ...) -> _T:
    """Replace computed leaves by arrays.

    Use it before a loop that uses a model many times, or to merge an update into its base for good.

    **Laws.** The result reads as the model does. `resolve(resolve(m))` equals `resolve(m)`.
    `resolve` of models that were made at once (by `filter_vmap`, in a `Stack`) equals the resolved
    models, stacked. With no selector, ties are resolved as well: tied paths get their own leaves.

    Args:
        model: any tree.
        selector: picks the computed leaves, by any part of them; all of them by default.

    Returns:
        A new tree; the model itself if there is nothing to compute.

    Raises:
        SpecError: if the selector matches nothing.
        ShapeError: if a computed leaf cannot be read: see [`Computed`][pytreemod.Computed].

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> linear = pm.nn.Linear(2, 2, key=jax.random.key(0))
        >>> half = linear.replace(weight=pm.computed(jnp.multiply, linear.weight, 0.5))
        >>> pm.resolve(half)
        Linear(weight=f32[2,2], bias=f32[2], in_features=2, out_features=2)
    """
    model = with_new_containers(model)
    if selector is ...:
        return _resolved(untie(model), None, ())
    locs = list(locations(model))
    picked = as_selector(selector).mask(model)
    return _resolved(model, [loc.path for loc, hit in zip(locs, picked, strict=True) if hit], ())


def _resolved(node: Any, picked: list[KeyPath] | None, path: KeyPath) -> Any:
    if is_computed(node):
        is_meant = picked is None or any(leaf[: len(path)] == path for leaf in picked)
        where = path_text(path) if path else class_of(node).__qualname__
        return evaluate_each(node, where) if is_meant else node
    children = children_of(node) or []
    return with_children(
        node, children, [_resolved(child, picked, (*path, key)) for key, child in children]
    )
