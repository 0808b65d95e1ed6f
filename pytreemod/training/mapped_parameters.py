"""Parameters that a selector picks, to be replaced by another form; `map_parameters` is the first.

A parameter is an array, or a computed leaf as a whole. In a Stack or an Ensemble it is the array of
one layer or member: the replacement is made under a map, so that a computed leaf has the shapes of
one layer's arrays, and can be read when a layer is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from pytreemod.errors import ArgumentError, ShapeError, SpecError, describe
from pytreemod.module.computed_leaves import computed
from pytreemod.module.reading import is_computed
from pytreemod.transform.vmap import filter_vmap
from pytreemod.tree.members import count_member_axes
from pytreemod.tree.nodes import DEFAULT_ROLE, is_node, locations, schema_of, with_new_containers
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_inexact_array
from pytreemod.tree.selecting import as_selector
from pytreemod.tree.surgery import replace_at
from pytreemod.typing import KeyPath, jtu, untyped_jax

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


class Parameter(NamedTuple):
    """An array, a computed leaf, or another leaf, with its path."""

    path: KeyPath
    node: Any
    first: int
    """The number of its first leaf that is picked."""

    axes: int
    """The number of its layer axes."""

    is_declared: bool
    """Whether its class declares no role for it, whatever role it was given since."""

    def text(self) -> str:
        """Return the path."""
        return path_text(self.path)

    def map(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a function with the array of each layer, which may be abstract."""
        for _ in range(self.axes):
            fn = filter_vmap(fn)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jtu.tree_leaves(self.node)):
            return untyped_jax.eval_shape(fn, self.node, *args)
        return fn(self.node, *args)


def replace_parameters(
    where: str, model: _M, picks: Sequence[bool], make: Callable[[Parameter], Any]
) -> _M:
    """Replace the parameters that are picked; a computed leaf, once, if any part of it is.

    Args:
        where: the name of the function, and what picks them, for the error.
        model: any tree.
        picks: whether each leaf is picked.
        make: returns the new node for a parameter; None leaves it.

    Returns:
        A new model.

    Raises:
        SpecError: if none is replaced.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> linear = pm.nn.Linear(3, 2, key=jax.random.key(0))
        >>> picks = pm.select.path("bias").mask(linear)
        >>> replace_parameters("halve", linear, picks, lambda one: one.node / 2).bias.shape
        (2,)
    """
    chosen: dict[KeyPath, Parameter] = {}
    for i, (loc, is_picked) in enumerate(zip(locations(model), picks, strict=True)):
        nodes = loc.holders
        length = next((i for i, node in enumerate(nodes) if is_computed(node)), len(nodes))
        path, node = loc.path[:length], (*nodes, loc.leaf)[length]
        schemas = zip(map(schema_of, nodes), path, strict=False)
        roles = (DEFAULT_ROLE if r is None else r.role(key.name) for r, key in schemas)
        is_declared = len(nodes) == len(loc.nodes) and all(r == DEFAULT_ROLE for r in roles)
        if is_picked:
            axes = count_member_axes(nodes[:length], path)
            chosen.setdefault(path, Parameter(path, node, i, axes, is_declared))
    pairs = [(one.path, make(one)) for one in chosen.values()]
    changes = [(path, made) for path, made in pairs if made is not None]
    if not changes:
        at = [f"{one.text()}: {describe(one.node)}" for one in chosen.values()]
        raise SpecError(f"{where} picks nothing that can be replaced", at=at)
    return replace_at(with_new_containers(model), changes)
