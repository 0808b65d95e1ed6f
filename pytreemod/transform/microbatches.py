"""The gradient of a batch in parts, by one scan: `filter_value_and_grad(microbatches=n)`.

Part i has every n-th example, from the i-th on: a batch that is split over devices stays where it
is. What the function returns beside the loss is put together by its shape for the whole batch, in
one abstract evaluation. That also shows which results are arguments, unchanged, as the parameters
of a net that comes back with its State are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.transform.abstract_calls import filter_make_jaxpr
from pytreemod.transform.chosen_leaves import as_derivatives
from pytreemod.transform.scans import filter_scan
from pytreemod.tree.nodes import Location, locations
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array, is_inexact_array
from pytreemod.tree.snapshots import AbstractState, divide
from pytreemod.typing import jtu

Differentiate = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any, Any]]
"""Returns the loss, the gradient by the first argument, and what comes beside the loss."""


def in_microbatches(
    where: str,
    differentiate: Differentiate,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Any,
) -> tuple[Any, Any, Any]:
    """Return the loss, the gradient and the rest of a whole batch, computed in parts.

    Args:
        where: the name of the transform.
        differentiate: does it for one part.
        args: the arguments of the call.
        kwargs: those by keyword.
        options: the `microbatches`, and whether to `reduce` them as a `"mean"` or a `"sum"`.

    Raises:
        ShapeError: if the arrays to be split differ in size, or it is no multiple of the number.
        ArgumentError: if an option is wrong, or a result can be put together in no way.
    """
    n, reduce = options.microbatches, options.reduce
    if n < 1 or reduce not in ("mean", "sum") or options.argnums not in (None, 0):
        fact = "microbatches >= 1, reduce is 'mean' or 'sum', and argument 0 alone has a gradient"
        raise ArgumentError(f"{where}: {fact}")
    leaves, treedef = jtu.tree_flatten((args, kwargs))
    locs = list(locations((args, kwargs)))
    kinds = [_kind(loc) for loc in locs]
    sizes = {i: leaves[i].shape[0] for i, kind in enumerate(kinds) if kind == "split"}
    if not sizes or len({*sizes.values()}) > 1 or min(sizes.values()) % n:
        at = [f"{path_text(locs[i].path[1:])}: {describe(leaves[i])}" for i in sizes]
        raise ShapeError(f"{where}: no axis 0 of one size that is a multiple of {n}", at=at)

    def call(leaves: list[Any]) -> list[Any]:
        out = differentiate(*treedef.unflatten(leaves))
        arrays, structure = divide(out)
        form[:] = structure, [loc for loc in locations(out) if is_array(loc.leaf)]
        return arrays

    form: list[Any] = []
    closed, shapes, _ = filter_make_jaxpr(call)(leaves)
    structure, places = form
    arrays: list[Any] = [x for x in leaves if is_array(x)]
    inputs = dict(zip(map(id, closed.jaxpr.invars), arrays, strict=True))
    results = [inputs.get(id(var)) for var in closed.jaxpr.outvars]
    ways = [_way(place, same) for place, same in zip(places, results, strict=True)]
    if "state" not in ways:
        # None comes back: each part reads the same.
        kinds = ["whole" if kind == "state" else kind for kind in kinds]
    # Sums of half precision would lose what is small; a zero is split as its parameter.
    loss, grads, _ = structure.assemble(shapes)
    pairs = zip(
        jtu.tree_leaves(args[0]), jtu.tree_structure(args[0]).flatten_up_to(grads), strict=True
    )
    likes = [x for x, gradient in pairs if gradient is not None]
    zeros = [jnp.zeros_like(x, dtype=_wide(x.dtype)) for x in (loss, *likes)]

    def step(carry: Any, part: Any) -> Any:
        (totals, states), each = carry, iter(part)
        now = {"state": iter(states), "split": each, "key": each}
        made = call([next(now[k]) if k in now else x for k, x in zip(kinds, leaves, strict=True)])
        pairs = zip(totals, _of("sum", ways, made), strict=True)
        totals = [total + x.astype(total.dtype) for total, x in pairs]
        return (totals, _of("state", ways, made)), _of("part", ways, made)

    parts = [_part(k, x, n) for k, x in zip(kinds, leaves, strict=True) if k in ("split", "key")]
    (totals, states), rest = filter_scan(step, (zeros, _of("state", kinds, leaves)), parts)
    found = {"sum": iter(totals), "state": iter(states), "part": iter(rest)}
    for i, (way, place, shape) in enumerate(zip(ways, places, shapes, strict=True)):
        if way in found:
            x = next(found[way])
            if way == "sum":
                x = (x / n if reduce == "mean" else x).astype(shape.dtype)
            results[i] = x if way != "part" else _together(where, place, x, shape.shape, reduce)
    loss, grads, aux = structure.assemble(results)
    return loss, as_derivatives(grads), aux


def _of(way: str, ways: list[str], values: list[Any]) -> list[Any]:
    return [x for own, x in zip(ways, values, strict=True) if own == way]


def _way(place: Location, same: Any) -> str:
    """Return how parts of a result are put together; `"same"` for an argument as it came."""
    if place.path[0].idx < 2:
        return "sum"
    return "state" if _is_in_state(place) else "part" if same is None else "same"


def _is_in_state(loc: Location) -> bool:
    return any(isinstance(node, AbstractState) for node in loc.nodes)


def _kind(loc: Location) -> str:
    """Return what happens to an argument's leaf: `"state"`, `"split"`, `"key"`, or `"whole"`."""
    if _is_in_state(loc):
        return "state"
    is_first = loc.path[0].idx == 0 and loc.path[1].idx == 0
    if is_first or not is_array(loc.leaf):
        return "whole"
    if loc.leaf.ndim:
        return "split"
    return "key" if jnp.issubdtype(loc.leaf.dtype, jax.dtypes.prng_key) else "whole"


def _part(kind: str, x: Any, n: int) -> Any:
    if kind == "key":
        return jax.random.split(x, n)
    return jnp.swapaxes(jnp.reshape(x, (x.shape[0] // n, n, *x.shape[1:])), 0, 1)


def _wide(dtype: Any) -> Any:
    return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype


def _together(where: str, loc: Location, x: Any, shape: tuple[int, ...], reduce: str) -> Any:
    """Put the results of all parts together, as the whole batch would have them."""
    if x.shape[1:] == shape and is_inexact_array(x):
        return x.mean(axis=0) if reduce == "mean" else x.sum(axis=0)
    if x.shape[1:] != shape and (x.shape[0] * x.shape[1], *x.shape[2:]) == shape:
        return jnp.reshape(jnp.swapaxes(x, 0, 1), shape)
    path = path_text(loc.path[1:], "aux")
    fact = f"{where}: {path} has no axis of examples, and no mean: {describe(x[0])} in each part"
    raise ArgumentError(fact)
