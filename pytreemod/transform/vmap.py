"""`filter_vmap`: map a function of any trees over an axis of some of their arrays.

JAX gets the arrays that have an axis; everything else stays outside, unchanged. JAX asks for the
axes of results before the function runs, when their structure is unknown. So arrays are returned in
two groups, shared and stacked on axis 0, and moved to their axes afterwards.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload

import jax

from pytreemod.errors import SharedStreamWarning, SpecError, warn
from pytreemod.transform import axes as ax
from pytreemod.transform.arguments import Named, Parameters, function_name
from pytreemod.transform.axes import ON_AXIS_0
from pytreemod.transform.packing import Grouped, pack_groups, unpack
from pytreemod.transform.sowing import collecting
from pytreemod.transform.wrapping import Transformed, check_callable
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.prefixes import By
from pytreemod.tree.snapshots import AbstractState, is_state, states_in
from pytreemod.typing import AxesSpec, AxisName, KeyPath, PyTree, jtu

_F = TypeVar("_F", bound=Callable[..., Any])


class _Options(NamedTuple):
    in_axes: AxesSpec
    out_axes: AxesSpec
    axis_size: int | None
    jax: tuple[tuple[str, Any], ...]


class _Vmapped(Transformed):
    __slots__ = ("parameters",)

    options: _Options
    transform_name = "filter_vmap"

    def __init__(self, fn: Callable[..., Any], options: _Options):
        super().__init__(fn, options)
        self.parameters = Parameters.of(fn)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function on all members."""
        in_axes, out_axes, axis_size, options = self.options
        where = f"filter_vmap of {function_name(self.fn)}"
        args, kwargs = self.parameters.place(args, kwargs)
        named, known = self.parameters.named(args, kwargs), self.parameters.every
        axes = ax.axes_by_argument(in_axes, named, len(args), known, "filter_vmap(in_axes)")
        ax.common_size(where, named, axes, axis_size, "axis_size=n")
        leaves, treedef = jtu.tree_flatten((args, kwargs))
        has_states = any(map(states_in, (args, kwargs)))
        shared = _unmapped_states(in_axes, named, axes) if has_states else {}
        mapped = [i for i, axis in enumerate(axes) if axis is not None]
        unmapped: list[Any] = []

        def run(values: list[Any]) -> Any:
            full = [*leaves]
            for i, value in zip(mapped, values, strict=True):
                full[i] = value
            args, kwargs = treedef.unflatten(full)
            states = states_in((args, kwargs)) if shared else []
            result = collecting(self.fn)(*args, **kwargs)
            if shared:
                _warn_of_shared_streams(where, shared, states, result)
            result, own = ax.stacking_axes(out_axes, result, "filter_vmap(out_axes)")
            if None in own:
                unmapped[:] = _unmapped(result, own)
            return pack_groups(result, [0 if axis is None else 1 for axis in own], 2, own)

        given: Any = {} if axis_size is None else {"axis_size": axis_size}
        given |= dict(options)
        values = [leaves[i] for i in mapped]
        over: Any = ([axes[i] for i in mapped],)
        try:
            return unpack(jax.vmap(run, over, Grouped(None, [None, 0]), **given)(values))
        except ValueError as error:
            # JAX has no class for this error, which names our lists of arrays.
            if "out_axes" not in str(error) or not unmapped:
                raise
            at = [path_text(path, "result") for path in unmapped]
            fact = f"{where}: out_axes is None for a result that differs from member to member"
            raise SpecError(fact, at=at, hint="out_axes=0") from error


def _unmapped(result: PyTree, axes: Sequence[int | None]) -> list[Any]:
    """Return the paths of the arrays that have no axis."""
    places = [path for path, x in jtu.tree_leaves_with_path(result) if is_array(x)]
    return [path for path, axis in zip(places, axes, strict=True) if axis is None]


# A mapped function keeps its type: the shapes of its arrays change, not their type.
@overload
def filter_vmap(fun: _F, **options: Any) -> _F: ...
@overload
def filter_vmap(**options: Any) -> Callable[[_F], _F]: ...
def filter_vmap(
    fun: Any = None,
    *,
    in_axes: AxesSpec = ON_AXIS_0,
    out_axes: AxesSpec = ON_AXIS_0,
    axis_name: AxisName | None = None,
    axis_size: int | None = None,
    **vmapkwargs: Any,
) -> Any:
    """`jax.vmap` for functions of any trees.

    By default every array is mapped over axis 0, and everything else is the same for all members.
    Mapping a class, or a function that builds a Module, builds the stacked Module.

    **Law.** `filter_vmap(f)(*args)` equals the stack of `f` called on each member.

    Args:
        fun: the function; without it, the result is a decorator.
        in_axes: one spec for all arguments; a tuple with one for each positional argument; or a
            dict by argument name, where missing names are mapped over axis 0. A spec is an int,
            None, a function from leaf to axis, [`by`][pytreemod.by], a Module with specs instead of
            its data, or a prefix tree of these.
        out_axes: the same for the result; None for what is the same for all members. With an int,
            numbers are repeated for each member, as in `jax.vmap`.
        axis_name: a name for collectives (`jax.lax.pmean`).
        axis_size: the number of members, if no argument is mapped.
        **vmapkwargs: options of `jax.vmap` (`spmd_axis_name`, ...).

    Returns:
        A function of the same signature; arguments by keyword are mapped, too.

    Raises:
        ShapeError: if mapped arrays disagree in size or lack the axis, or if results will lack it;
            the error names all paths.
        SpecError: if a spec does not fit the tree.
        ArgumentError: if a name in `in_axes` is not an argument, or nothing is mapped and
            `axis_size` is missing.

    Warns:
        SharedStreamWarning: if all members draw from one random stream, because it is not mapped.

    Examples:
        >>> import jax.numpy as jnp
        >>> f = filter_vmap(lambda x, how: x + 1 if how == "inc" else x, in_axes=(0, None))
        >>> f(jnp.arange(3), "inc")
        Array([1, 2, 3], dtype=int32)
    """
    if fun is None:
        given = {"in_axes": in_axes, "out_axes": out_axes, "axis_name": axis_name}
        return ft.partial(filter_vmap, **given, axis_size=axis_size, **vmapkwargs)
    check_callable("filter_vmap", fun)
    if axis_name is not None:
        vmapkwargs["axis_name"] = axis_name
    options = tuple(sorted(vmapkwargs.items()))
    return _Vmapped(fun, _Options(in_axes, out_axes, axis_size, options))


# ---- streams that all members draw from
#
# A State without a mapped axis means that they get the same numbers, and users rarely want it:
# every example would have the same dropout mask. A rule of `by` for the State says that it is so.

_Places: TypeAlias = dict[int, tuple[str, KeyPath]]
"""States in the arguments of a call, by their number: the argument, and the path in it."""


def _unmapped_states(spec: AxesSpec, named: Named, axes: Sequence[int | None]) -> _Places:
    """Return the States in some arguments that no axis maps."""
    if any(isinstance(part, By) for part in jtu.tree_leaves(spec, is_leaf=_is_by)):
        return {}
    rest, found = iter(axes), list[tuple[str, KeyPath, bool]]()
    for name, tree in named:
        for path, node in jtu.tree_leaves_with_path(tree, is_leaf=is_state):
            own = [next(rest) for _ in jtu.tree_leaves(node)]
            if is_state(node):
                found.append((name, path, not any(axis is not None for axis in own)))
    return {i: (name, path) for i, (name, path, is_shared) in enumerate(found) if is_shared}


def _is_by(node: Any) -> bool:
    return isinstance(node, By)


def _warn_of_shared_streams(
    where: str, places: _Places, before: Sequence[AbstractState], result: PyTree
) -> None:
    """Warn if one of the States before a call was drawn from, according to its successor.

    Args:
        where: the name of the transform.
        places: of those that are the same for all members, by their number.
        before: all States in the arguments.
        result: the result of the call.
    """
    after = states_in(result)
    at = [
        f"{path_text(path, argument)}[{name!r}]"
        for i, (argument, path) in places.items()
        for name in dict.fromkeys(n for new in after for n in before[i].__drawn__(new))
    ]
    if at:
        fact = f"{where}: all members draw the same random numbers"
        hint = "pm.by({pm.RngStream: 0, ...: None})  # with state.split(n)"
        warn(SharedStreamWarning, fact, at=at, hint=hint)
