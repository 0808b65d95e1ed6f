"""Layers on a mesh with explicit axes: one rule for results; the compiler chooses the rest.

Inside of a layer the axes of the mesh are automatic (`jax.sharding.auto_axes`), so its formula has
no word about shardings. The result has the sharding of x along the axes whose size is that of x; a
layer with a weight names the axis of its result that is split as that of the weight, unless x is
split over the same axis of the mesh. Values of a State keep their shardings.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pytreemod.state.values import State
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import states_in
from pytreemod.tree.split_arrays import axes_of_type, explicit_mesh, spec_of_split, split_axes
from pytreemod.typing import jtu, untyped_jax

_T = TypeVar("_T")
_S = TypeVar("_S")

Features: TypeAlias = tuple[str, int, int | str] | None
"""The path of a weight, its axis, and the axis of the result that is split like it.

That axis is counted from the back, or is the name of the layer's attribute which says it.
"""

_Split: TypeAlias = tuple[tuple[str, ...], ...]


def call_on_mesh(
    mesh: Any,
    call: Callable[..., Any],
    layer: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    features: Features,
) -> Any:
    """Call a layer of which an array is on a mesh with explicit axes, by the rule above."""
    leaves, treedef = jtu.tree_flatten((layer, args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    inputs = [leaf for leaf in jtu.tree_leaves((args, kwargs)) if is_array(leaf)]
    states = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, State)]
    weight, axis = _split_of_weight(layer, features)
    # A number has no axes.
    x = inputs[0] if inputs else jnp.zeros(())
    out_tree: Any = None
    # JAX reads the list after the call: only then are the results known.
    shardings: list[NamedSharding] = [NamedSharding(mesh, PartitionSpec())]

    def run(arrays: list[Any]) -> list[Any]:
        nonlocal out_tree
        given = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            given[i] = array
        own, own_args, own_kwargs = treedef.unflatten(given)
        out = call(own, *own_args, **own_kwargs)
        results, out_tree = jtu.tree_flatten(out)
        kept: dict[int, _Split] = {}
        for new in states_in(out):
            # A State is returned with the values that it came with, so in their order.
            ours, old = jtu.tree_leaves(new), jtu.tree_leaves(states)
            if len(ours) == len(old):
                pairs = zip(ours, old, strict=True)
                kept |= {id(a): _split(b) for a, b in pairs if explicit_mesh(b) is not None}
        shardings[:] = [
            _sharding(mesh, kept.get(id(leaf)) or _like_x(leaf.shape, x, weight, axis))
            for leaf in results
        ]
        return results

    names = axes_of_type(mesh, AxisType.Explicit)
    on_mesh = untyped_jax.sharding.auto_axes(run, axes=names, out_sharding=shardings)
    results = on_mesh([leaves[i] for i in places])
    return jtu.tree_unflatten(out_tree, results)


def _split_of_weight(layer: Any, features: Features) -> tuple[tuple[str, ...], int]:
    """The mesh axes over which the named axis of a weight is split, and that of the result."""
    if features is None:
        return (), 0
    path, axis, at = features
    at = getattr(layer, at) if isinstance(at, str) else at
    *holders, name = path.split(".")
    for holder in holders:
        layer = getattr(layer, holder)
    # The parts of a computed weight: one that has all its axes is split like it.
    stored = [leaf for leaf in jtu.tree_leaves(vars(layer).get(name)) if is_array(leaf)]
    widest = max(stored, key=lambda leaf: leaf.ndim, default=None)
    return (_split(widest)[axis] if widest is not None and widest.ndim else ()), at


def _like_x(shape: tuple[int, ...], x: Any, weight: tuple[str, ...], at: int) -> _Split:
    split = _split(x)
    found = [split[i] if i < x.ndim and shape[i] == x.shape[i] else () for i in range(len(shape))]
    if at and len(shape) >= -at:
        found[at] = ()
        taken = {name for names in split for name in names}
        found[at] = tuple(name for name in weight if name not in taken)
    return tuple(found)


def _split(array: Any) -> _Split:
    """The mesh axes for each axis of an array."""
    return split_axes(array) or ((),) * array.ndim


def _sharding(mesh: Any, split: _Split) -> NamedSharding:
    return NamedSharding(mesh, spec_of_split(split))


# ---- stacked layers


def unsplit(tree: _T) -> _T:
    """Gather the arrays of a tree along their first axis, over which a scan steps."""

    def gather(x: Any) -> Any:
        split = split_axes(x) if is_array(x) else ()
        return _reshard(x, ((), *split[1:]), explicit_mesh(x)) if split and split[0] else x

    return jtu.tree_map(gather, tree)


def split_alike(
    own: _T, shared: _S, inputs: Sequence[Any], axes: Sequence[Any]
) -> tuple[_T, _S, list[Any]]:
    """Split everything that a map over members gets alike, along the members.

    It follows the inputs that have an entry for each member; if there are none, the members, except
    for mesh axes that split the inputs along other axes.

    Args:
        own: has an entry for each member, on the first axis of its arrays.
        shared: values that all members share.
        inputs: of the members.
        axes: the axis of each input that has an entry for each member, or None; an input with
            another specification is left as it is.

    Returns:
        The members' values, the shared ones, and the inputs.
    """
    mesh = explicit_mesh(*jtu.tree_leaves((own, shared, inputs)))
    if mesh is None:
        return own, shared, [*inputs]
    plain = [
        (x, axis) for x, axis in zip(inputs, axes, strict=True) if axis is None or type(axis) is int
    ]
    rows = [(leaf, axis) for x, axis in plain for leaf in jtu.tree_leaves(x) if is_array(leaf)]
    given = [_split(x)[axis] for x, axis in rows if axis is not None and _split(x)[axis]]
    held = [_split(x)[0] for x in jtu.tree_leaves(own) if is_array(x) and _split(x)[0]]
    elsewhere = {
        name
        for x, axis in rows
        for i, names in enumerate(_split(x))
        for name in names
        if axis is None or i != axis % x.ndim
    }
    names = given[0] if given else tuple(n for n in (*held, ())[0] if n not in elsewhere)

    def along(x: Any, axis: Any) -> Any:
        if not is_array(x) or not (axis is None or type(axis) is int):
            return x
        after = [tuple(name for name in at if name not in names) for at in _split(x)]
        if axis is not None:
            after[axis] = names
        return _reshard(x, tuple(after), mesh)

    def all_along(tree: Any, axis: Any) -> Any:
        return jtu.tree_map(ft.partial(along, axis=axis), tree)

    moved = [all_along(x, axis) for x, axis in zip(inputs, axes, strict=True)]
    return all_along(own, 0), all_along(shared, None), moved


def _reshard(x: Any, after: _Split, mesh: Any) -> Any:
    before = _split(x)
    if explicit_mesh(x) is None:
        return untyped_jax.sharding.reshard(x, _sharding(mesh, after))
    names = {name for at in after for name in at}
    # In two steps if some mesh axes leave and others enter: XLA cannot do both at once.
    kept = tuple(tuple(name for name in at if name in names) for at in before)
    for split in (kept, after):
        x = x if split == _split(x) else untyped_jax.sharding.reshard(x, _sharding(mesh, split))
    return x
