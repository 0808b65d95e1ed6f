"""New initial values for chosen arrays of a model."""

from __future__ import annotations

import functools as ft
import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.module.constrained_leaves import Constrained
from pytreemod.module.constraining import take_in
from pytreemod.module.reading import evaluate_each, is_computed
from pytreemod.module.unfinished import refuse_unfinished
from pytreemod.nn.arguments import check_key
from pytreemod.nn.convolution import Conv
from pytreemod.nn.einsum_layers import Einsum, LinearGeneral, initial_factors, initial_tensor
from pytreemod.nn.initializing import Initializer, initial_bias, initial_weight, initialize
from pytreemod.nn.linear import Linear
from pytreemod.nn.recurrent_cells import GRUCell, LSTMCell, SimpleCell, initial_gates
from pytreemod.nn.transposed_convolution import ConvTranspose
from pytreemod.state.key_sources import KeyLike
from pytreemod.tree.members import count_member_axes
from pytreemod.tree.nodes import Location, Represents, locations
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_inexact_array
from pytreemod.tree.renewing import with_new_containers
from pytreemod.tree.selecting import as_selector
from pytreemod.tree.surgery import replace_at
from pytreemod.typing import KeyPath, jtu

Model = TypeVar("Model")


# Fields whose layout differs from the one that initializers expect: the functions by which their
# constructors draw them.
_STARTS: dict[type, dict[str, Callable[..., Array]]] = {
    **{
        cls: {"weight": initial_weight, "bias": initial_bias}
        for cls in (Linear, Conv, ConvTranspose)
    },
    LinearGeneral: {"weight": initial_tensor},
    Einsum: {"weight": initial_factors},
    **{
        cell: {name: ft.partial(initial_gates, name=name) for name in cell.rows}
        for cell in (GRUCell, LSTMCell, SimpleCell)
    },
}


def reinitialize(model: Model, selector: Any, init: Initializer, key: KeyLike) -> Model:
    """Draw new initial values for chosen arrays of a model.

    The initializer is called as the layer itself would call it: with the shape that
    `jax.nn.initializers` expect, so that fan-in is the layer's. An array of any other Module is
    drawn in its own shape, and so is an array from which a leaf is computed. Layers that are stored
    as one, as in a `Stack` or an `Ensemble`, are drawn one by one. For a constrained field, the
    constrained value is drawn.

    Args:
        model: any tree.
        selector: which arrays: a path (`"layers.*.weight"`), a class (`pm.nn.Linear`, for all
            arrays of such layers), or a selector.
        init: `(key, shape, dtype) -> array`, as in `jax.nn.initializers`; called with the dtype
            of the array.
        key: used once, split between the arrays.

    Returns:
        A new model, which shares all other arrays with the old one.

    Raises:
        ArgumentError: if init is not a function, or its result is invalid. Also if a chosen leaf is
            not a floating array, or all arrays of a computed leaf are chosen.
        FieldError: if a value is outside the bound of a constrained field.
        RngError: if key is not a random key.
        SpecError: if nothing is chosen.
        UnfinishedError: if the model lacks sizes.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> mlp = pm.nn.MLP(8, 8, 64, 2, key=jax.random.key(0))
        >>> he = jax.nn.initializers.he_normal()
        >>> new = pm.reinitialize(mlp, "layers.*.weight", he, jax.random.key(1))
        >>> zeros = jax.nn.initializers.zeros
        >>> new = pm.reinitialize(new, "layers.*.bias", zeros, jax.random.key(2))
        >>> new.layers[0].bias[:2].tolist()
        [0.0, 0.0]
    """
    if not callable(init):
        hint = ["the arguments are", "pm.reinitialize(model, selector, init, key)"]
        expected = "a function (key, shape, dtype) -> array"
        raise ArgumentError("reinitialize(init)", expected, describe(init), hint=hint)
    refuse_unfinished("reinitialize", model)
    model = with_new_containers(model)
    locs = list(locations(model))
    chosen = [
        loc
        for loc, is_chosen in zip(locs, as_selector(selector).mask(model), strict=True)
        if is_chosen
    ]
    if not chosen:
        raise SpecError("reinitialize(selector)", "some arrays of the model", "none")
    others = [path_text(loc.path) for loc in chosen if not is_inexact_array(loc.leaf)]
    if others:
        expected = "only floating arrays to be chosen"
        raise ArgumentError("reinitialize(selector)", expected, "something else", at=others)
    meant = _meant(locs, chosen)
    keys = jax.random.split(check_key("reinitialize(key)", key), len(meant))
    changes = [
        (path, _renewed(path, nodes, old, init, one))
        for (path, (nodes, old)), one in zip(meant.items(), keys, strict=True)
    ]
    return replace_at(model, changes)


def _meant(locs: list[Location], chosen: list[Location]) -> dict[KeyPath, tuple[list[Any], Any]]:
    """Return the chosen arrays and constrained values by path, each with the nodes above it."""
    paths = {loc.path for loc in chosen}
    meant: dict[KeyPath, tuple[list[Any], Any]] = {}
    for loc in chosen:
        # `Represents` only marks the owner of a node; it has no component in the path.
        nodes = [node for node in loc.nodes if type(node) is not Represents]
        path = loc.path
        for i, node in enumerate(nodes):
            if not is_computed(node):
                continue
            # In a computed leaf, either a part is chosen, or the value as a whole.
            inside = {other.path for other in locs if other.path[:i] == path[:i]}
            if inside <= paths:
                if not isinstance(node, Constrained):
                    _refuse_computed(path_text(path[:i]), inside)
                path = path[:i]
                break
        meant[path] = nodes[: len(path)], (*nodes, loc.leaf)[len(path)]
    return meant


def _renewed(
    path: KeyPath, nodes: list[Any], old: Any, init: Initializer, key: PRNGKeyArray
) -> Any:
    """Draw new values for one array, or for the value of a constrained field."""
    where = f"reinitialize(init) at {path_text(path)}"
    if not isinstance(old, Constrained):
        return _drawn(where, path, nodes, old, init, key)
    value = jax.eval_shape(lambda: evaluate_each(old, where))
    new = _drawn(where, path, nodes, value, init, key)
    return take_in(old.constraint, new, where, old)


def _drawn(
    where: str, path: KeyPath, nodes: list[Any], old: Any, init: Initializer, key: PRNGKeyArray
) -> Array:
    """Draw new values of the shape and dtype of old ones."""
    start = _start_of(nodes[-1], path[-1]) if path else None
    one = old.shape[count_member_axes(nodes, path) :]

    def draw(key: PRNGKeyArray) -> Array:
        if start is None:
            return initialize(where, init, key, one, old.dtype)
        return start(nodes[-1], init, key, old.dtype, where)

    # Leading axes are for several layers stored as one. For a field of a layer in `_STARTS`, the
    # number of its own axes is known, so this includes the axes of a map.
    shape = one if start is None else jax.eval_shape(draw, key).shape
    several = old.shape[: max(old.ndim - len(shape), 0)]
    if (*several, *shape) != old.shape:
        raise ArgumentError(where, f"an array of shape {shape}", describe(old))
    if not several:
        return draw(key)
    values = jax.vmap(draw)(jax.random.split(key, math.prod(several)))
    return jnp.reshape(values, old.shape)


def _start_of(layer: Any, step: Any) -> Callable[..., Array] | None:
    for cls in type(layer).__mro__:
        if cls in _STARTS and isinstance(step, jtu.GetAttrKey):
            return _STARTS[cls].get(step.name)
    return None


def _refuse_computed(place: str, inside: set[KeyPath]) -> NoReturn:
    parts = sorted(map(path_text, inside))
    raise ArgumentError(
        "reinitialize(selector)",
        "arrays, or some of the parts of a computed leaf",
        f"all parts of {place}",
        at=parts,
        hint=[
            "resolve it to an array first, or choose one part:",
            f"model = pm.resolve(model, {place!r})",
            f"pm.reinitialize(model, {parts[0]!r}, init, key)",
        ],
    )
