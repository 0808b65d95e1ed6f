"""`filter_vmap`: map a function of any trees over an axis of some of their arrays.

`axes_of` turns what the user says into an axis for each leaf; JAX is given the arrays that have
one, and everything else stays outside, as it is. Which axis a result is stacked on is only known
when the function has run, and JAX wants to know before: so the arrays go out in groups (see
`boundary.packing`), one for each axis that the spec can name. What else may come, such as an axis
that a function in the spec names, is stacked on axis 0 and moved there later.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pytreemod.errors import PytreemodError, ShapeError, SpecError, describe
from pytreemod.transform.boundary.packing import Grouped, group, pack, unpack
from pytreemod.transform.boundary.signatures import check_options, place_keywords, positions_of
from pytreemod.transform.boundary.sowing import WithCollected, collecting
from pytreemod.transform.boundary.stacked_notes import result_along
from pytreemod.transform.boundary.supplying import (
    as_values,
    check_slices,
    handing,
    of_values,
    supplied,
)
from pytreemod.transform.boundary.wrapping import (
    Transformed,
    check_axis_name,
    check_callable,
    check_count,
    function_name,
)
from pytreemod.transform.host.failures import raises_checks
from pytreemod.transform.interception.argument_specs import (
    Terms,
    named_arguments,
    specs_by_argument,
)
from pytreemod.transform.maps.refusals import explain_split
from pytreemod.transform.maps.shared_streams import tell_shared_streams
from pytreemod.transform.maps.sizes import common_size
from pytreemod.tree.nodes import is_node
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array, is_array_like, is_carried
from pytreemod.tree.prefixes import By, spread
from pytreemod.tree.selecting import Rule
from pytreemod.typing import AxesSpec, AxisName, KeyPath, PyTree, jtu

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class if_array:
    """An axis for arrays, None for everything else: `in_axes=if_array(1)`.

    Args:
        axis: the axis.

    Examples:
        >>> if_array(1)(jnp.ones((2, 3))), if_array(1)("text")
        (1, None)
    """

    axis: int

    def __call__(self, x: Any) -> int | None:
        """The axis of a leaf: `axis` for an array, None for anything else."""
        return self.axis if is_array(x) else None


ON_AXIS_0 = if_array(0)


def _is_axis(value: Any) -> TypeGuard[int | None]:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def is_axes_spec(spec: Any) -> bool:
    """Whether something says which axis, and is no tree of what does."""
    return _is_axis(spec) or isinstance(spec, (By, bool)) or (callable(spec) and not is_node(spec))


def axes_of(
    spec: AxesSpec,
    tree: PyTree,
    where: str,
    root: str,
    strict: bool = True,
    *,
    is_result: bool = False,
) -> list[Any]:
    """The axis of each leaf of `tree`; None for what is not mapped.

    Args:
        spec: ints, None, functions from leaf to axis, `by(...)`, or a prefix tree of these.
        tree: the tree.
        where: what to call the spec in errors.
        root: what to call the tree in errors.
        strict: whether a path in a rule that matches nothing is a mistake.
        is_result: whether members are stacked on the axes, so that a number can have one: the
            same for all of them.

    Returns:
        An int or None for each leaf.

    Raises:
        SpecError: the spec is no prefix, or gives something that is no axis.
        ShapeError: a number is to be mapped over an axis.
    """
    if type(tree) is WithCollected:
        # What is sown has one for each member, whatever the spec says of the result.
        own = axes_of(spec, tree.result, where, root, strict, is_result=is_result)
        return [*own, *map(ON_AXIS_0, jtu.tree_leaves(tree.collected))]

    def resolve(value: Any, subtree: PyTree, path: tuple[Any, ...]) -> list[Any]:
        leaves = jtu.tree_leaves(subtree)
        # A `by` speaks of arrays: its default would be said of every number, too.
        has_axis = is_array_like if is_result and not isinstance(value, By) else is_array
        # Static values do not go to JAX, whatever a spec says of them.
        mapped = [has_axis(leaf) for leaf in leaves]
        if _is_axis(value):
            if value is not None and not is_result and not all(mapped):
                _refuse_numbers(where, root, value, subtree, path)
            return [value if is_mapped else None for is_mapped in mapped]
        if isinstance(value, By):
            values = value.values(subtree, root=path_text(path, root), strict=strict)
        else:
            values = [value] * len(leaves)
        triples = zip(values, leaves, mapped, strict=True)
        place = path_text(path, root)
        return [_axis_of(where, place, v, leaf, is_mapped) for v, leaf, is_mapped in triples]

    return spread(spec, tree, resolve=resolve, stops=is_axes_spec, where=where, root=root)


def axes_by_argument(
    in_axes: AxesSpec, names: Sequence[str], trees: Sequence[Any], positional: int, terms: Terms
) -> list[list[Any]]:
    """The axis of each leaf of each argument.

    Args:
        in_axes: one spec for all, a tuple with one for each positional argument, or a dict by name.
        names: the arguments' names, the positional ones first.
        trees: the arguments.
        positional: how many of them are positional.
        terms: what to say of the spec in errors.

    Returns:
        For each argument an int or None for each leaf.

    Raises:
        ArgumentError, ShapeError, SpecError: the spec does not fit the arguments.
    """
    specs = specs_by_argument(in_axes, names, positional, (), terms, trees)
    # One rule for several arguments need not find each of its paths in each of them.
    strict = not (isinstance(in_axes, By) and len(names) > 1)
    if isinstance(in_axes, By) and not strict:
        in_axes.check(trees)
    return [
        axes_of(spec, tree, f"{terms.where} for {name}", name, strict)
        for name, spec, tree in zip(names, specs, trees, strict=True)
    ]


def _axis_of(where: str, place: str, value: Any, leaf: Any, is_mapped: bool) -> int | None:
    """What a spec says of one leaf."""
    if callable(value) and not isinstance(value, Rule):
        value = value(leaf)
    if not _is_axis(value):
        raise SpecError(where, "an int or None for each leaf", describe(value), places=[place])
    return value if is_mapped else None


def _refuse_numbers(
    where: str, root: str, axis: int, subtree: PyTree, path: tuple[Any, ...]
) -> None:
    # An axis by number was asked for: a scalar has none. Functions and strings have no say.
    for below, leaf in jtu.tree_leaves_with_path(subtree):
        if is_array_like(leaf) and not is_array(leaf):
            raise ShapeError(
                where,
                f"arrays with an axis {axis}",
                describe(leaf),
                places=[path_text((*path, *below), root)],
                hint=[
                    "map arrays alone, and pass numbers on as they are:",
                    f"in_axes=pm.if_array({axis})",
                ],
            )


def stacking_axes(spec: AxesSpec, result: PyTree, where: str) -> tuple[PyTree, list[Any]]:
    """What a mapped function's result is stacked as, and on which axes.

    Args:
        spec: where its arrays are to be stacked.
        result: what the function returned for one member.
        where: what to call the spec in errors.

    Returns:
        The result, with arrays for the numbers that have an axis; and the axis of each leaf, None
        for what is not stacked.

    Raises:
        SpecError: the spec does not fit the result.
    """
    axes = axes_of(spec, result, where, "result", is_result=True)
    leaves, treedef = jtu.tree_flatten(result)
    late = [axis is not None and not is_array(x) for x, axis in zip(leaves, axes, strict=True)]
    if any(late):
        pairs = zip(leaves, late, strict=True)
        result = treedef.unflatten([jnp.asarray(x) if is_late else x for x, is_late in pairs])
    return result, axes


class MapOptions(NamedTuple):
    """The options of `filter_vmap`, or `filter_pmap`."""

    in_axes: AxesSpec
    out_axes: AxesSpec
    axis_name: AxisName | None
    axis_size: int | None
    jaxkwargs: tuple[tuple[str, Any], ...]
    donate: str = "none"


class Vmapped(Transformed):
    """A function under `filter_vmap`, and the base of `filter_pmap`'s."""

    __slots__ = ("names", "on_axis_0", "places", "terms", "treatments")

    options: MapOptions

    def __init__(self, fn: Callable[..., Any], options: MapOptions):
        super().__init__(fn, options)
        # Once, and not in each call: these look at every parameter, and at a whole spec.
        self.names, self.places = positions_of(fn)
        where = f"{self.transform_name}(in_axes)"
        self.terms = Terms(where, is_axes_spec, ON_AXIS_0, "in_axes", "0", "is mapped over axis 0")
        # 0 in any case: what is moved later is stacked there first.
        self.treatments = [None, 0, *sorted(known_axes(options.out_axes) - {None, 0})]
        # The default says the same of every array: JAX is given that, and the results are not
        # looked at. That is a third of what an eager call would add to JAX's own.
        self.on_axis_0 = options.out_axes is ON_AXIS_0

    transform_name = "filter_vmap"

    @raises_checks
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function on all members."""
        out_axes, axis_size = self.options.out_axes, self.options.axis_size
        args, kwargs = place_keywords(self.places, args, kwargs)
        axes, leaves, treedef = self.inputs(args, kwargs)
        # All that JAX is given: what is the same for all members stays outside, tracer or not.
        mapped = [i for i, axis in enumerate(axes) if axis is not None]
        treatments, on_axis_0 = self.treatments, self.on_axis_0
        drawn: set[Any] = set()
        fn = supplied(self.fn) if handing else self.fn
        more, count = as_values(fn), len(mapped)
        if more:
            sizes = (leaves[i].shape[axes[i]] for i in mapped)
            check_slices(f"filter_vmap of {function_name(self.fn)}", fn, next(sizes, axis_size))
        # For an error that JAX raises when the function is done, and nothing else.
        unmapped: list[Any] = []

        def run(values: list[Any]) -> Any:
            full = list(leaves)
            for i, value in zip(mapped, values, strict=False):
                full[i] = value
            args, kwargs = treedef.unflatten(full)
            own = of_values(fn, values[count:]) if more else fn
            result = result_along("map", collecting(own, drawn)(*args, **kwargs))
            if on_axis_0:
                return pack(result)
            return group_by_axis("filter_vmap(out_axes)", result, out_axes, treatments, unmapped)

        options: dict[str, Any] = {} if axis_size is None else {"axis_size": axis_size}
        if self.options.axis_name is not None:
            options["axis_name"] = self.options.axis_name
        options |= {
            "in_axes": ([*(axes[i] for i in mapped), *([0] * len(more))],),
            **dict(self.options.jaxkwargs),
        }
        out = 0 if on_axis_0 else Grouped(None, treatments)
        values = [*(leaves[i] for i in mapped), *more]
        try:
            result = unpack(jax.vmap(run, out_axes=out, **options)(values))
        except Exception as error:
            # JAX has no class of error for it, nor for the next.
            self._explain_split(args, kwargs, axes, error)
            if not isinstance(error, ValueError) or "out_axes" not in str(error) or not unmapped:
                raise
            raise SpecError(
                f"filter_vmap of {function_name(self.fn)}",
                "results that are the same for all members where out_axes is None",
                "a result that differs from member to member",
                places=[path_text(p, "result") for p in _differing(run, values, options, unmapped)],
                hint=["give it an axis:", "out_axes=0"],
            ) from error
        if drawn:
            # Anew, for the function may have used up what it was also given from outside.
            args, kwargs = treedef.unflatten(leaves)
            pairs = zip(axes, leaves, strict=True)
            are_mapped = [axis is not None for axis, leaf in pairs if is_array(leaf)]
            spec = self.options.in_axes
            tell_shared_streams(self.fn, drawn, args, kwargs, are_mapped, spec, self.terms)
        return result

    def _explain_split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], axes: list[Any], error: Exception
    ) -> None:
        """Raise a better error than JAX's, if it came from how arrays are split over a mesh."""
        if isinstance(error, PytreemodError):
            return
        where = f"{self.transform_name} of {function_name(self.fn)}"
        named = named_arguments(self.names, args, kwargs)
        explain_split(where, self.fn, named, axes, error)

    def inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[Any], Any]:
        """Axes, leaves and structure of `(args, kwargs)`.

        Raises:
            ShapeError, SpecError, ArgumentError: the axes do not fit the arguments.
        """
        in_axes, axis_size = self.options.in_axes, self.options.axis_size
        # In the order in which JAX flattens (args, kwargs): keywords sorted.
        named = named_arguments(self.names, args, kwargs)
        names, trees = [name for name, _ in named], [tree for _, tree in named]
        found = axes_by_argument(in_axes, names, trees, len(args), self.terms)
        axes = [axis for own in found for axis in own]
        leaves, treedef = jtu.tree_flatten((args, kwargs))
        where = f"{self.transform_name} of {function_name(self.fn)}"
        common_size(where, named, leaves, axes, size=axis_size, option="axis_size=n", whole=_whole)
        return axes, leaves, treedef


def _whole(name: str, path: KeyPath, axis: int) -> str:
    return f'in_axes={{"{name}": None}}'


def _differing(
    run: Callable[..., Grouped], values: list[Any], options: Any, unmapped: list[KeyPath]
) -> list[KeyPath]:
    """Which of the results that were to be the same for all members are not.

    JAX knows, and shows it where it meets a mapped array: the rule of a `custom_vmap` is called for
    no other. So the function runs a second time, where an error is certain.
    """
    places, found = unmapped.copy(), list[KeyPath]()

    def ask(values: list[Any]) -> tuple[()]:
        for path, x in zip(places, run(values).groups[0], strict=False):
            _call_if_mapped(x, ft.partial(found.append, path))
        return ()

    # It may not bear a second run: one with a State, which was used up by the first.
    with suppress(Exception):
        # Traced, so that a `vmap` around this one, which maps other things, is not asked.
        jax.eval_shape(jax.vmap(ask, out_axes=None, **options), values)
    return found or places


def _same(x: Any) -> Any:
    return x


def _call_if_mapped(x: Any, call: Callable[[], None]) -> None:
    asked: Any = custom_vmap(_same)

    @asked.def_vmap
    def rule(axis_size: int, in_batched: list[Any], x: Any) -> tuple[Any, Any]:
        call()
        return x, in_batched[0]

    asked(x)


def _check_out_axes(where: str, rows: Iterable[tuple[Any, Any, int | None]]) -> None:
    """Refuse axes that the stacked results will not have.

    Args:
        where: what to call the spec in errors.
        rows: the arrays of one member's result: path, array, and where the members are stacked.

    Raises:
        ShapeError: there are some; their paths are named.
    """
    wrong = [
        f"{path_text(path, 'result')}: {describe(array)} for each member, axis {axis}"
        for path, array, axis in rows
        if axis is not None and not -array.ndim - 1 <= axis <= array.ndim
    ]
    if wrong:
        expected = "axes that the stacked results have: one more than each member's"
        raise ShapeError(where, expected, "others", places=wrong)


def known_axes(spec: Any) -> set[Any]:
    """The axes that may occur in an out_axes spec, as far as is known before it is applied."""
    found: set[Any] = set()
    for leaf in jtu.tree_leaves(spec, is_leaf=is_axes_spec):
        values = [value for _, value in leaf.items] if isinstance(leaf, By) else [leaf]
        for value in values:
            value = value.axis if isinstance(value, if_array) else value
            if _is_axis(value):
                found.add(value)
    return found


def group_by_axis(
    where: str,
    result: PyTree,
    spec: AxesSpec,
    treatments: Sequence[int | None],
    unmapped: list[Any] | None = None,
) -> Grouped:
    """Pack a mapped function's result in groups, one for each axis that its spec can name.

    JAX wants `out_axes` before the function runs, when its result's structure is not known yet.

    Args:
        where: what to call the spec in errors.
        result: what the function returned for one member.
        spec: where its arrays are to be stacked.
        treatments: the axes that JAX was given. An axis that only a function in the spec names,
            or a negative one, is none of them: such an array is stacked on axis 0, and moved later.
        unmapped: gets the paths of what is to be the same for all members.

    Raises:
        ShapeError: the stacked results will not have an axis.
        SpecError: the spec does not fit the result.
    """
    result, spread_axes = stacking_axes(spec, result, where)
    pairs = zip(jtu.tree_leaves(result), spread_axes, strict=True)
    arrays = [(x, axis) for x, axis in pairs if axis is not None or is_carried(x)]
    axes: list[Any] = [axis for _, axis in arrays]
    # Paths take a second walk, and are made only where an error may need them.
    if None in axes or not all(-x.ndim - 1 <= axis <= x.ndim for x, axis in arrays):
        named = zip(jtu.tree_leaves_with_path(result), spread_axes, strict=True)
        rows = [(path, x, axis) for (path, x), axis in named if is_carried(x)]
        _check_out_axes(where, rows)
        if unmapped is not None:
            unmapped += [path for path, _, axis in rows if axis is None]
    late = [axis not in treatments for axis in axes]

    def move(arrays: list[Any]) -> list[Any]:
        moves = zip(arrays, axes, late, strict=True)
        return [jnp.moveaxis(x, 0, axis) if is_late else x for x, axis, is_late in moves]

    positions = [treatments.index(0 if n else axis) for axis, n in zip(axes, late, strict=True)]
    return group(result, positions, len(treatments), move if any(late) else None)


# A mapped function keeps its type: what changes are the shapes of its arrays, not their type.
@overload
def filter_vmap(
    fun: _F,
    *,
    in_axes: AxesSpec = ...,
    out_axes: AxesSpec = ...,
    axis_name: AxisName | None = ...,
    axis_size: int | None = ...,
    **vmapkwargs: Any,
) -> _F: ...
@overload
def filter_vmap(
    *,
    in_axes: AxesSpec = ...,
    out_axes: AxesSpec = ...,
    axis_name: AxisName | None = ...,
    axis_size: int | None = ...,
    **vmapkwargs: Any,
) -> Callable[[_F], _F]: ...
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

    By default every array is mapped over axis 0 and everything else is the same for all members.
    Over a class, or a function that builds a Module, it builds the stacked Module.

    **Law.** `filter_vmap(f)(*args)` equals the stack of `f` called on each member.

    Args:
        fun: the function; left out, a decorator is returned.
        in_axes: one spec for all arguments; a tuple with one for each positional argument; or a
            dict by argument name, what is left out being mapped over axis 0. A spec is an int,
            None, a function from leaf to axis, [`by`][pytreemod.by], a Module that holds specs in
            the place of its data, or a prefix tree of these. For a single argument it need not be
            wrapped in a tuple.
        out_axes: the same for the result. A number to which it gives an axis, by an int or a
            function, is repeated for each member, as in `jax.vmap`.
        axis_name: a name for collectives (`jax.lax.pmean`).
        axis_size: how many members, if no argument is mapped.
        **vmapkwargs: for `jax.vmap` (`spmd_axis_name`, ...).

    Returns:
        A function of the same signature; arguments by keyword are mapped, too.

    Raises:
        ShapeError: mapped arrays disagree in size, or lack the axis, or results will lack it; all
            paths are named.
        SpecError: a spec does not fit the tree.
        ArgumentError: a name in `in_axes` is no argument; nothing is mapped and `axis_size` is
            missing, or is no count; an option does not exist.

    Warns:
        SharedStreamWarning: all members draw from one random stream, for it is not mapped.

    Examples:
        >>> f = filter_vmap(lambda x, how: x + 1 if how == "inc" else x, in_axes=(0, None))
        >>> f(jnp.arange(3), "inc")
        Array([1, 2, 3], dtype=int32)
    """
    if fun is None:
        return ft.partial(
            filter_vmap,
            in_axes=in_axes,
            out_axes=out_axes,
            axis_name=axis_name,
            axis_size=axis_size,
            **vmapkwargs,
        )
    check_callable("filter_vmap", fun)
    check_options("filter_vmap", vmapkwargs, jax.vmap, filter_vmap)
    check_axis_name("filter_vmap", axis_name)
    if axis_size is not None:
        check_count("filter_vmap(axis_size)", axis_size)
    jaxkwargs = tuple(sorted(vmapkwargs.items()))
    return Vmapped(fun, MapOptions(in_axes, out_axes, axis_name, axis_size, jaxkwargs))
