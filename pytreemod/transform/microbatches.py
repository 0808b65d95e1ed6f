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
from pytreemod.tree.snapshots import AbstractState
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
        loss, grads, aux = differentiate(*treedef.unflatten(leaves))
        found, structure = jtu.tree_flatten((loss, grads, aux))
        outputs[:] = [structure, found, list(locations((loss, grads, aux)))]
        return [x for x in found if is_array(x)]

    outputs: list[Any] = []
    closed, shapes, _ = filter_make_jaxpr(call)(leaves)
    structure, found, places = outputs
    own = [i for i, x in enumerate(found) if is_array(x)]
    invars = map(id, closed.jaxpr.invars)
    inputs = dict(zip(invars, (x for x in leaves if is_array(x)), strict=True))
    outvars = zip(own, map(id, closed.jaxpr.outvars), strict=True)
    states = [i for i in own if _is_in_state(places[i])]
    if not states:
        # None comes back: each part reads the same.
        kinds = ["whole" if kind == "state" else kind for kind in kinds]
    summed = [i for i in own if places[i].path[0].idx < 2]
    given = {i: inputs[v] for i, v in outvars if v in inputs and i not in summed}
    others = [i for i in own if i not in {*given, *states, *summed}]
    # Sums of half precision would lose what is small; a zero is split as its parameter.
    params = jtu.tree_structure(args[0]).flatten_up_to(structure.unflatten(found)[1])
    likes = [x for x, g in zip(jtu.tree_leaves(args[0]), params, strict=True) if g is not None]
    zeros = [jnp.zeros_like(x, dtype=_wide(x.dtype)) for x in (found[0], *likes)]

    def step(carry: Any, part: Any) -> Any:
        totals, now = carry
        each, now = iter(part), iter(now)
        mine = [
            next(now) if k == "state" else next(each) if k in ("split", "key") else x
            for k, x in zip(kinds, leaves, strict=True)
        ]
        made = dict(zip(own, call(mine), strict=True))
        totals = [t + made[i].astype(t.dtype) for t, i in zip(totals, summed, strict=True)]
        return (totals, [made[i] for i in states]), [made[i] for i in others]

    first = [x for k, x in zip(kinds, leaves, strict=True) if k == "state"]
    parts = [_part(k, x, n) for k, x in zip(kinds, leaves, strict=True) if k in ("split", "key")]
    (totals, last), rest = filter_scan(step, (zeros, first), parts)
    scale = n if reduce == "mean" else 1
    shape_of = dict(zip(own, shapes, strict=True))
    results = list(found)
    for i, total in zip(summed, totals, strict=True):
        results[i] = (total / scale).astype(shape_of[i].dtype)
    for i, x in (*given.items(), *zip(states, last, strict=True)):
        results[i] = x
    for i, x in zip(others, rest, strict=True):
        results[i] = _together(where, places[i], x, shape_of[i].shape, reduce)
    loss, grads, aux = structure.unflatten(results)
    return loss, as_derivatives(grads, jtu.tree_structure(grads)), aux


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
