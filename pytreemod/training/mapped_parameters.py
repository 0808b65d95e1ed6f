"""`map_parameters`: chosen parameters are a function of trained arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.computed_leaves import computed
from pytreemod.training.chosen_parameters import Parameter, replace_parameters
from pytreemod.tree.nodes import is_node
from pytreemod.tree.predicates import is_inexact_array
from pytreemod.tree.selecting import as_selector

_M = TypeVar("_M")


def map_parameters(
    fn: Callable[[Any], Any], model: _M, selector: Any, inverse: Callable[[Any], Any] | None = None
) -> _M:
    """Make chosen parameters a function of trained arrays.

    Each becomes a computed leaf, `pm.computed(fn, inverse(leaf))`: `inverse(leaf)` is trained and
    written to files, at the path `"weight.trees[0]"`; the attribute reads as `fn` of it.

    **With `inverse`** the model reads as before, if it is the inverse: the parameters have another
    form. **Without** it the leaf itself is trained, and from now on the model reads as
    `fn(leaf)`: another number than before, unless `fn` does not change it.

    In a `Stack`, `fn` gets the array of one layer.

    Args:
        fn: from the trained array to the parameter that is read: one array.
        model: any tree.
        selector: picks the parameters: a path (`"**.weight"`), a class, a selector. All of them
            have to be floating arrays.
        inverse: from the parameter that is read to the trained array, or a tree of several.

    Returns:
        A new model; all other leaves are shared with the old one.

    Raises:
        ArgumentError: if `fn` is not a function; or a chosen leaf is not a floating array, or is
            already computed.
        FieldError: if `fn` does not return an array.
        ShapeError: if `fn(inverse(leaf))` does not have the shape of the leaf.
        SpecError: if nothing is chosen.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> norm = pm.nn.LayerNorm(3)
        >>> positive = pm.map_parameters(jnp.exp, norm, "weight", inverse=jnp.log)
        >>> positive.weight, pm.named_leaves(positive)["weight.trees.0"]
        (Array([1., 1., 1.], dtype=float32), Array([0., 0., 0.], dtype=float32))
        >>> pm.map_parameters(jnp.exp, norm, "bias").bias
        Array([1., 1., 1.], dtype=float32)

    Source:
        `flax.linen.map_variables`: `fn` is its `trans_in_fn`, `inverse` its `trans_out_fn`.
    """
    # A model may be callable, too.
    if not callable(fn) or is_node(fn):
        raise ArgumentError("map_parameters(fn)", "a function", describe(fn))

    def mapped(leaf: Any) -> Any:
        made = computed(fn, leaf if inverse is None else inverse(leaf))
        shape = leaf.shape if inverse is None else jax.eval_shape(made.value).shape
        # Otherwise two functions that do not fit would fail at the first matrix product.
        if shape != leaf.shape:
            raise ShapeError("map_parameters: fn(inverse(leaf))", str(leaf.shape), str(shape))
        return made

    def make(one: Parameter) -> Any:
        if not is_inexact_array(one.node):
            at = [f"{one.text()}: {describe(one.node)}"]
            raise ArgumentError("map_parameters: only floating arrays can be mapped", at=at)
        return one.map(mapped)

    picks = as_selector(selector).mask(model)
    return replace_parameters(f"map_parameters: {selector!r}", model, picks, make)
