"""`per_layer` and `per_member`: transformations of gradients that see layers by themselves.

`Stack` and `Ensemble` store the arrays of several layers, or members, as one. Most transformations
treat each number alone, or all of them, and do the same to both forms. One that looks at a whole
array (Muon's matrix, the norms of LARS and LAMB, Adafactor's rows) is to be mapped over the layers,
and one that looks at all arrays of a model (a global norm) over the members of an Ensemble.
`is_same_stacked` tries which is which.
"""

from __future__ import annotations

import functools as ft
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError
from pytreemod.tree.members import layer_axes_of, without_axes
from pytreemod.tree.nodes import locations
from pytreemod.tree.predicates import is_array
from pytreemod.tree.traces import run_again
from pytreemod.typing import PyTree, Tracer, jtu, untyped_jax

_Which = Literal["members", "all"]


class Transformation(NamedTuple):
    """A transformation of optax."""

    init: Callable[[PyTree], Any]
    update: Callable[..., tuple[Any, Any]]


def per_layer(rule: Any) -> Transformation:
    """Map a transformation of optax over the layers of a `Stack`, and the members of an `Ensemble`.

    Arrays with layer axes of the same lengths are mapped at once, and the state has these axes,
    counts and hyperparameters, too. What the rule computes from all arrays, it computes for each
    layer: clip the norm of all gradients outside of it.

    Args:
        rule: has `init` and `update`, and looks at one array at a time.

    Returns:
        A transformation, for [`Optimizer`][pytreemod.Optimizer] or for optax.

    Raises:
        ArgumentError: from `init`, if the state has a random key: each layer would draw the same
            numbers; from `update`, if an extra argument is a function or has arrays with axes.

    Examples:
        >>> import optax
        >>> import pytreemod as pm
        >>> clip = optax.clip_by_global_norm(1.0)
        >>> opt = pm.Optimizer(optax.chain(clip, pm.per_layer(optax.lars(1e-3))))
    """
    return _mapped("per_layer", rule, "all")


def per_member(rule: Any) -> Transformation:
    """Map a transformation of optax over the members of each `Ensemble`.

    Each member has its own state, and what the rule computes from all arrays, such as a global
    norm, it computes from those of one member. Arrays outside of the Ensemble are one more group.

    Args:
        rule: has `init` and `update`.

    Returns:
        A transformation, for [`Optimizer`][pytreemod.Optimizer] or for optax.

    Raises:
        ArgumentError: from `init`, if the state has a random key: each member would draw the same
            numbers.

    Examples:
        >>> import optax
        >>> import pytreemod as pm
        >>> clip = optax.clip_by_global_norm(1.0)
        >>> opt = pm.Optimizer(optax.adam(1e-3), before=pm.per_member(clip))
    """
    return _mapped("per_member", rule, "members")


def _mapped(name: str, rule: Any, which: _Which) -> Transformation:
    def init(params: PyTree) -> Any:
        groups = _groups(params, which).values()
        states = tuple(_each(rule.init, group, which)(_only(params, group)) for group in groups)
        if any(map(_is_key, jtu.tree_leaves(states))) and any(group.axes for group in groups):
            raise ArgumentError(f"{name}: each layer would draw the same random numbers")
        return states

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Any:
        leaves, structure = jtu.tree_flatten(updates)
        news: list[Any] = []
        extra = accepted(rule, extra)
        for key, value in extra.items():
            # Its value for one layer is not known.
            if callable(value) or any(map(np.ndim, jtu.tree_leaves(value))):
                raise ArgumentError(f"{name}: the argument {key!r} is for the whole model")
        for group, old in zip(_groups(updates, which).values(), state, strict=True):
            shown = None if params is None else _only(params, group)
            step = _each(ft.partial(rule.update, **extra), group, which)
            made, new = step(_only(updates, group), old, shown)
            news.append(new)
            for i, leaf in zip(group.places, jtu.tree_leaves(made), strict=True):
                leaves[i] = leaf
        return structure.unflatten(leaves), tuple(news)

    return Transformation(init, update)


class _Group(NamedTuple):
    """Leaves that are mapped together."""

    axes: int
    places: list[int]


def _groups(tree: PyTree, which: _Which) -> dict[Any, _Group]:
    """Group leaves by the lengths of their axes; members by their Ensemble, too."""
    groups: dict[Any, _Group] = {}
    for i, loc in enumerate(locations(tree)):
        axes = layer_axes_of(loc)
        while which == "members" and axes and not axes[-1].is_independent:
            axes.pop()
        lengths = np.shape(loc.leaf)[: len(axes)]
        key = lengths if which == "all" else (lengths, *(axis.path for axis in axes[-1:]))
        groups.setdefault(key, _Group(len(axes), [])).places.append(i)
    return groups


def _only(tree: PyTree, group: _Group) -> PyTree:
    leaves, structure = jtu.tree_flatten(tree)
    return structure.unflatten([x if i in group.places else None for i, x in enumerate(leaves)])


def _each(
    fn: Callable[..., Any], group: _Group, which: _Which, in_axes: Any = 0, out_axes: int = 0
) -> Callable[..., Any]:
    """Map a function over the axes of a group, which its trees lack inside."""

    def inner(*args: Any) -> Any:
        with without_axes(which):
            return fn(*args)

    # Without axes to map, those that a rule around this one has hidden stay hidden.
    mapped: Callable[..., Any] = inner if group.axes else fn
    for _ in range(group.axes):
        mapped = jax.vmap(mapped, in_axes, out_axes)
    return mapped


def _is_key(leaf: Any) -> bool:
    if not is_array(leaf):
        return False
    # A raw key is two or four numbers.
    return leaf.dtype == jnp.uint32 or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# ---- trying

_SIZES = np.asarray([1.0, 0.3, 2.0, 0.7, 1.5], np.float32)


def is_same_stacked(rule: Any, params: PyTree) -> bool:
    """Whether a rule does the same to stacked arrays as to the layers, or members, by themselves.

    It is tried on the model's own tree of parameters, cut small: on the stacked arrays; and on each
    member alone, with a list of arrays instead of each stacked one. Five steps are made, along
    gradients that keep their direction, of sizes that change from step to step and from layer to
    layer: Prodigy would do the same in one step, and a clipped Adam with one size.

    Args:
        rule: has `init` and `update`.
        params: the parameters of the rule; None for those of others.

    Returns:
        False if the rule cannot be tried, too, or leaves a stacked array as it is: that says
        nothing.
    """
    leaves, structure = jtu.tree_flatten(params)
    axes = [len(layer_axes_of(loc)) for loc in locations(params)]
    toys, grads = _toys(leaves, axes)
    groups = [*_groups(structure.unflatten(toys), "members").values()]

    def in_lists(values: list[Any], group: _Group, first: int) -> PyTree:
        # The axes of members are kept, and mapped.
        made: list[Any] = [None] * len(values)
        for i in group.places:
            made[i] = _listed(values[i], first + group.axes, axes[i] - group.axes)
        return structure.unflatten(made)

    # A context manager of `contextlib` is a decorator, too.
    in_lists_alone = without_axes("all")(ft.partial(_steps, rule))

    def run(stacked: Any, alone: Any) -> Any:
        each = [_each(in_lists_alone, group, "all", (0, 1), 1) for group in groups]
        return _steps(rule, *stacked), [fn(*trees) for fn, trees in zip(each, alone, strict=True)]

    try:
        # Settings of the caller's concern the real steps.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            if not _is_state_alike(rule, leaves, structure, axes):
                return False
            stacked = structure.unflatten(toys), structure.unflatten(grads)
            alone = [(in_lists(toys, group, 0), in_lists(grads, group, 1)) for group in groups]
            made, others = _compiled(run, stacked, alone)
            as_one = structure.flatten_up_to(made)
            for group, other in zip(groups, others, strict=True):
                apart = structure.flatten_up_to(other)
                for i in group.places:
                    y = np.stack(jtu.tree_leaves(apart[i]), 1 + group.axes)
                    if not _are_close(np.asarray(as_one[i]), y, axes[i] > 0):
                        return False
    # A rule may raise anything.
    except Exception:
        return False
    return True


def _toys(leaves: list[Any], axes: list[int]) -> tuple[list[Any], list[Any]]:
    """Return a small array for each parameter, and its gradients in all steps."""
    rng, toys, grads = np.random.default_rng(0), list[Any](), list[Any]()
    for leaf, count in zip(leaves, axes, strict=True):
        shape = (*(2,) * count, *(min(n, 4) for n in leaf.shape[count:]))
        slope = rng.normal(size=shape) * (1 + 2 * np.indices(shape)[:count].sum(0))
        steps = [size * slope + 0.1 * size**2 * np.abs(slope) for size in _SIZES]
        toys.append(rng.normal(size=shape).astype(leaf.dtype))
        grads.append(np.stack(steps).astype(leaf.dtype))
    return toys, grads


def _are_close(x: Any, y: Any, is_stacked: bool) -> bool:
    y = y.reshape(x.shape)
    largest = np.abs(y).max(initial=0.0)
    moves = largest > 0 or not is_stacked or not y.size
    return bool(moves and (np.abs(x - y) <= 1e-3 * largest).all())


def _is_state_alike(rule: Any, leaves: list[Any], structure: Any, axes: list[int]) -> bool:
    """Whether a state has all the numbers that it has for layers in lists.

    At their real sizes, by which some rules decide: Adafactor keeps less for an array whose two
    largest axes are long, and one of these may be that of the layers.
    """
    whole = [np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in leaves]
    listed = [_listed(x, 0, count) for x, count in zip(whole, axes, strict=True)]
    states = [untyped_jax.eval_shape(rule.init, structure.unflatten(whole))]
    with without_axes("all"):
        states.append(untyped_jax.eval_shape(rule.init, structure.unflatten(listed)))
    as_one, apart = (sum(x.size for x in jtu.tree_leaves(state)) for state in states)
    return as_one >= apart


def _listed(x: Any, first: int, count: int) -> Any:
    """Return an array as a list of layers, if it has any: along some axes, from the first on."""
    places = np.ndindex(x.shape[first : first + count])
    return [x[(slice(None),) * first + at] for at in places] if count else x


def _steps(rule: Any, params: PyTree, grads: PyTree) -> PyTree:
    """Return the updates of five steps."""

    def add(p: Any, u: Any) -> Any:
        return (p + u).astype(p.dtype)

    def step(carry: Any, now: Any) -> Any:
        (params, state), (grads, size) = carry, now
        updates, state = rule.update(grads, state, params, **accepted(rule, {"value": 1 / size}))
        return (jtu.tree_map(add, params, updates), state), updates

    return jax.lax.scan(step, (params, rule.init(params)), (grads, _SIZES))[1]


def _compiled(fn: Callable[..., Any], *args: Any) -> Any:
    """Return a result of NumPy's arrays, by one program with the compiler's cheapest settings."""
    closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    # A rate may be traced: any number does here.
    consts = [np.full(x.shape, 0.1, x.dtype) if isinstance(x, Tracer) else x for x in closed.consts]

    def run(*values: Any) -> list[Any]:
        return run_again(closed.jaxpr, consts, values)

    options: dict[str, str | bool] = {
        "xla_backend_optimization_level": "0",
        "xla_llvm_disable_expensive_passes": True,
    }
    leaves, is_cpu = jtu.tree_leaves(args), jax.default_backend() == "cpu"
    made = jax.jit(run).lower(*leaves).compile(options if is_cpu else None)(*leaves)
    return jtu.tree_structure(out).unflatten(made)


def accepted(rule: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """Return the extra arguments that the `update` of a rule takes."""
    parameters = inspect.signature(rule.update).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: x for name, x in extra.items() if takes_any or name in parameters}
