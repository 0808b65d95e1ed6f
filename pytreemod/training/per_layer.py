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
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, describe
from pytreemod.tree.members import Hold, holds_of, without_axes
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


def check_transformation(where: str, rule: Any) -> None:
    """Refuse what has no `init` and `update`.

    Raises:
        ArgumentError: if it has not.
    """
    if isinstance(rule, type) or not (hasattr(rule, "init") and hasattr(rule, "update")):
        hint = f"pm.{where.partition('(')[0]}(optax.adam(1e-3))"
        raise ArgumentError(where, "a transformation of optax", describe(rule), hint=hint)


def _mapped(name: str, rule: Any, which: _Which) -> Transformation:
    check_transformation(f"{name}(rule)", rule)

    def init(params: PyTree) -> Any:
        groups = _groups(params, which).values()
        states = tuple(_each(rule.init, group, which, 1)(_only(params, group)) for group in groups)
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
            step = _each(ft.partial(rule.update, **extra), group, which, 3)
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
        holds = _mapped_axes(holds_of(loc), which)
        lengths = np.shape(loc.leaf)[: len(holds)]
        key = lengths if which == "all" else (lengths, *(hold.path for hold in holds[-1:]))
        groups.setdefault(key, _Group(len(holds), [])).places.append(i)
    return groups


def _mapped_axes(holds: Sequence[Hold], which: _Which) -> Sequence[Hold]:
    if which == "all":
        return holds
    ends = [i + 1 for i, hold in enumerate(holds) if hold.is_independent]
    return holds[: ends[-1]] if ends else ()


def _only(tree: PyTree, group: _Group) -> PyTree:
    leaves, structure = jtu.tree_flatten(tree)
    return structure.unflatten([x if i in group.places else None for i, x in enumerate(leaves)])


def _each(fn: Callable[..., Any], group: _Group, which: _Which, count: int) -> Callable[..., Any]:
    def inner(*args: Any) -> Any:
        with without_axes(which):
            return fn(*args)

    mapped: Callable[..., Any] = inner if group.axes else fn
    for _ in range(group.axes):
        mapped = jax.vmap(mapped, in_axes=(0,) * count)
    return mapped


def _is_key(leaf: Any) -> bool:
    # A raw key is two or four numbers.
    is_raw = is_array(leaf) and leaf.dtype == jnp.uint32
    return is_raw or (is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


# ---- trying


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
    axes = [len(holds_of(loc)) for loc in locations(params)]
    try:
        # Settings of the caller's concern the real steps.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            if not _is_state_alike(rule, leaves, structure, axes):
                return False
            rng, small, slopes = np.random.default_rng(0), [], []
            for leaf, count in zip(leaves, axes, strict=True):
                shape = (*(2,) * count, *(min(n, 4) for n in leaf.shape[count:]))
                layers = 1 + 2 * np.indices(shape, np.float32)[:count].sum(0)
                small.append(rng.normal(size=shape).astype(leaf.dtype))
                slopes.append((rng.normal(size=shape) * layers).astype(leaf.dtype))

            def run(small: list[Any], slopes: list[Any]) -> tuple[list[Any], list[Any]]:
                together = _steps(rule, *map(structure.unflatten, (small, slopes)))
                return jtu.tree_leaves(together), _apart(rule, structure, axes, small, slopes)

            made = _compiled(run, small, slopes)
            rows = zip(made[: len(axes)], made[len(axes) :], axes, strict=True)
    # A rule may raise anything.
    except Exception:
        return False
    return all(_are_close(np.asarray(x), np.asarray(y), count > 0) for x, y, count in rows)


def _are_close(x: Any, y: Any, is_stacked: bool) -> bool:
    largest = np.abs(y).max(initial=0.0)
    moves = largest > 0 or not is_stacked or not y.size
    return bool(moves and (np.abs(x - y) <= 1e-3 * largest).all())


def _is_state_alike(rule: Any, leaves: list[Any], structure: Any, axes: list[int]) -> bool:
    """Whether a state has all the numbers that it has for layers in lists.

    At their real sizes, by which some rules decide: Adafactor keeps less for an array whose two
    largest axes are long, and one of these may be that of the layers.
    """
    whole = [np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in leaves]
    listed = [_listed(x, count) for x, count in zip(whole, axes, strict=True)]
    states = [untyped_jax.eval_shape(rule.init, structure.unflatten(whole))]
    with without_axes("all"):
        states.append(untyped_jax.eval_shape(rule.init, structure.unflatten(listed)))
    as_one, apart = (sum(x.size for x in jtu.tree_leaves(state)) for state in states)
    return as_one >= apart


def _listed(x: Any, axes: int) -> Any:
    """Return an array as a list of layers, if it has any."""
    return [x[at] for at in np.ndindex(x.shape[:axes])] if axes else x


def _steps(rule: Any, params: PyTree, slopes: PyTree) -> PyTree:
    """Return the updates of five steps."""

    def slope(size: Any, g: Any, p: Any) -> Any:
        return (size * g + 0.1 * size**2 * jnp.abs(g)).astype(p.dtype)

    def add(p: Any, u: Any) -> Any:
        return (p + u).astype(p.dtype)

    def step(carry: Any, size: Any) -> Any:
        params, state = carry
        grads = jtu.tree_map(ft.partial(slope, size), slopes, params)
        updates, state = rule.update(grads, state, params, **accepted(rule, {"value": 1 / size}))
        params = jtu.tree_map(add, params, updates)
        return (params, state), updates

    sizes = np.asarray([1.0, 0.3, 2.0, 0.7, 1.5], np.float32)
    return jax.lax.scan(step, (params, rule.init(params)), sizes)[1]


def _apart(
    rule: Any, structure: Any, axes: list[int], small: list[Any], slopes: list[Any]
) -> list[Any]:
    """Return the updates of each member alone, with lists of layers; stacked again."""
    made: list[Any] = [None] * len(small)
    for group in _groups(structure.unflatten(small), "members").values():
        members: list[list[Any]] = []
        for at in np.ndindex((2,) * group.axes):

            def one(arrays: list[Any], at: Any = at, group: _Group = group) -> PyTree:
                mine = [None] * len(arrays)
                for i in group.places:
                    mine[i] = _listed(arrays[i][at], axes[i] - group.axes)
                return structure.unflatten(mine)

            with without_axes("all"):
                members.append(structure.flatten_up_to(_steps(rule, one(small), one(slopes))))
        for i in group.places:
            layers = jtu.tree_leaves([member[i] for member in members])
            steps = len(layers[0])
            made[i] = jnp.stack(layers, axis=1).reshape(steps, *small[i].shape)
    return made


def _compiled(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the leaves of a result, by one program with the cheapest settings of the compiler."""
    closed = jax.make_jaxpr(fn)(*args)
    # A rate may be traced: any number does here.
    consts = [np.full(x.shape, 0.1, x.dtype) if isinstance(x, Tracer) else x for x in closed.consts]

    def run(*values: Any) -> list[Any]:
        return run_again(closed.jaxpr, consts, values)

    options: dict[str, str | bool] = {
        "xla_backend_optimization_level": "0",
        "xla_llvm_disable_expensive_passes": True,
    }
    leaves, is_cpu = jtu.tree_leaves(args), jax.default_backend() == "cpu"
    return jax.jit(run).lower(*leaves).compile(options if is_cpu else None)(*leaves)


def accepted(rule: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """Return the extra arguments that the `update` of a rule takes."""
    if not extra:
        return extra
    parameters = inspect.signature(rule.update).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: x for name, x in extra.items() if takes_any or name in parameters}
