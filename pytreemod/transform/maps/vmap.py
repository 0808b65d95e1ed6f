"""`filter_vmap`: map a function of any trees over an axis of some of their arrays.

`axes_of` turns the user's spec into an axis for each leaf. JAX gets the arrays that have one;
everything else remains outside, unchanged. The axes on which results are stacked are known only
after the function has run, but JAX needs them before. So the arrays are returned in groups (see
`boundary.packing`), one for each axis that the spec can name. Results with other axes, such as
those from a function in the spec, are stacked on axis 0 and moved later.
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
from pytreemod.transform.maps.shared_streams import warn_of_shared_streams
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
        """Return the axis of a leaf: `axis` for an array, None for anything else."""
        return self.axis if is_array(x) else None


ON_AXIS_0 = if_array(0)


def _is_axis(value: Any) -> TypeGuard[int | None]:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def is_axes_spec(spec: Any) -> bool:
    """Whether a value is an axis spec by itself, not a tree of such specs."""
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
    """Return the axis of each leaf of `tree`; None for leaves that are not mapped.

    Args:
        spec: ints, None, functions from leaf to axis, `by(...)`, or a prefix tree of these.
        tree: the tree.
        where: the name of the spec in errors.
        root: the name of the tree in errors.
        strict: whether a path in a rule that matches nothing is an error.
        is_result: whether members are stacked on the axes. If so, a number can have an axis, and
            is repeated.

    Returns:
        An int or None for each leaf.

    Raises:
        SpecError: if the spec is not a prefix, or contains a value that is not an axis.
        ShapeError: if a number is to be mapped over an axis.
    """
    if type(tree) is WithCollected:
        # Sown values have one for each member, whatever the spec says of the result.
        own = axes_of(spec, tree.result, where, root, strict, is_result=is_result)
        return [*own, *map(ON_AXIS_0, jtu.tree_leaves(tree.collected))]

    def resolve(value: Any, subtree: PyTree, path: tuple[Any, ...]) -> list[Any]:
        leaves = jtu.tree_leaves(subtree)
        # A `by` applies to arrays: otherwise its default would apply to every number, too.
        has_axis = is_array_like if is_result and not isinstance(value, By) else is_array
        # JAX does not get static values, whatever the spec says of them.
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
    """Return the axis of each leaf of each argument.

    Args:
        in_axes: one spec for all, a tuple with one for each positional argument, or a dict by name.
        names: the names of the arguments, the positional ones first.
        trees: the arguments.
        positional: the number of positional arguments.
        terms: the words for the spec in errors.

    Returns:
        For each argument an int or None for each leaf.

    Raises:
        ArgumentError, ShapeError, SpecError: if the spec does not fit the arguments.
    """
    specs = specs_by_argument(in_axes, names, positional, (), terms, trees)
    # With one rule for several arguments, each path need not match in each argument.
    strict = not (isinstance(in_axes, By) and len(names) > 1)
    if isinstance(in_axes, By) and not strict:
        in_axes.check(trees)
    return [
        axes_of(spec, tree, f"{terms.where} for {name}", name, strict)
        for name, spec, tree in zip(names, specs, trees, strict=True)
    ]


def _axis_of(where: str, place: str, value: Any, leaf: Any, is_mapped: bool) -> int | None:
    """Return the value of a spec for one leaf."""
    if callable(value) and not isinstance(value, Rule):
        value = value(leaf)
    if not _is_axis(value):
        raise SpecError(where, "an int or None for each leaf", describe(value), at=[place])
    return value if is_mapped else None


def _refuse_numbers(
    where: str, root: str, axis: int, subtree: PyTree, path: tuple[Any, ...]
) -> None:
    # The user asked for an axis by number, and a scalar has none. Other leaves do not matter.
    for below, leaf in jtu.tree_leaves_with_path(subtree):
        if is_array_like(leaf) and not is_array(leaf):
            raise ShapeError(
                where,
                f"arrays with an axis {axis}",
                describe(leaf),
                at=[path_text((*path, *below), root)],
                hint=[
                    "map only arrays, and pass numbers unchanged:",
                    f"in_axes=pm.if_array({axis})",
                ],
            )


def stacking_axes(spec: AxesSpec, result: PyTree, where: str) -> tuple[PyTree, list[Any]]:
    """Return the arrays to stack in the result of a mapped function, and their axes.

    Args:
        spec: the axes on which to stack its arrays.
        result: the result of the function for one member.
        where: the name of the spec in errors.

    Returns:
        The result, with arrays instead of numbers that have an axis; and the axis of each leaf,
        None for those that are not stacked.

    Raises:
        SpecError: if the spec does not fit the result.
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
        # Once, not in each call: these look at every parameter, and at the whole spec.
        self.names, self.places = positions_of(fn)
        where = f"{self.transform_name}(in_axes)"
        self.terms = Terms(where, is_axes_spec, ON_AXIS_0, "in_axes", "0", "is mapped over axis 0")
        # 0 in any case: arrays that are moved later are stacked there first.
        self.treatments = [None, 0, *sorted(known_axes(options.out_axes) - {None, 0})]
        # The default is the same for every array: JAX gets that axis, and the results are not
        # inspected. That saves a third of the time that an eager call adds to JAX's own.
        self.on_axis_0 = options.out_axes is ON_AXIS_0

    transform_name = "filter_vmap"

    @raises_checks
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function on all members."""
        out_axes, axis_size = self.options.out_axes, self.options.axis_size
        args, kwargs = place_keywords(self.places, args, kwargs)
        axes, leaves, treedef = self.inputs(args, kwargs)
        # Only mapped arrays go to JAX. Values shared by all members remain outside, tracers or not.
        mapped = [i for i, axis in enumerate(axes) if axis is not None]
        treatments, on_axis_0 = self.treatments, self.on_axis_0
        drawn: dict[Any, bool] = {}
        fn = supplied(self.fn) if handing else self.fn
        more, count = as_values(fn), len(mapped)
        if more:
            sizes = (leaves[i].shape[axes[i]] for i in mapped)
            check_slices(f"filter_vmap of {function_name(self.fn)}", fn, next(sizes, axis_size))
        # Only for an error that JAX raises when the function is done.
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
            # JAX has no class for this error, nor for the next.
            self._explain_split(args, kwargs, axes, error)
            if not isinstance(error, ValueError) or "out_axes" not in str(error) or not unmapped:
                raise
            raise SpecError(
                f"filter_vmap of {function_name(self.fn)}: members differ in a result of "
                "out_axes=None",
                at=[path_text(p, "result") for p in _differing(run, values, options, unmapped)],
                hint="out_axes=0",
            ) from error
        if drawn:
            # Assembled again, because the function may have used up its States.
            args, kwargs = treedef.unflatten(leaves)
            pairs = zip(axes, leaves, strict=True)
            are_mapped = [axis is not None for axis, leaf in pairs if is_array(leaf)]
            spec = self.options.in_axes
            warn_of_shared_streams(self.fn, drawn, args, kwargs, are_mapped, spec, self.terms)
        return result

    def _explain_split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], axes: list[Any], error: Exception
    ) -> None:
        """Raise a better error than JAX's, if the reason is how arrays are split over a mesh."""
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
            ShapeError, SpecError, ArgumentError: if the axes do not fit the arguments.
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
    """Return the results that differ between members although their spec is None.

    JAX knows them, and shows it where it meets a mapped array: it calls the rule of a
    `custom_vmap` for mapped arrays alone. So the function runs a second time, when an error is
    certain.
    """
    places, found = unmapped.copy(), list[KeyPath]()

    def ask(values: list[Any]) -> tuple[()]:
        for path, x in zip(places, run(values).groups[0], strict=False):
            _call_if_mapped(x, ft.partial(found.append, path))
        return ()

    # A second run may fail: for example, if the first has used up a State.
    with suppress(Exception):
        # Traced, so that a surrounding `vmap`, which maps other arrays, is not asked.
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
        where: the name of the spec in errors.
        rows: the arrays of one member's result: path, array, and the axis to stack on.

    Raises:
        ShapeError: if there are some; the error names their paths.
    """
    wrong = [
        f"{path_text(path, 'result')}: {describe(array)} for each member, axis {axis}"
        for path, array, axis in rows
        if axis is not None and not -array.ndim - 1 <= axis <= array.ndim
    ]
    if wrong:
        expected = "axes that the stacked results have: one more than each member's"
        raise ShapeError(where, expected, "others", at=wrong)


def known_axes(spec: Any) -> set[Any]:
    """Return the axes that may occur in an out_axes spec, as far as they are known beforehand."""
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
    """Pack the result of a mapped function in groups, one for each axis that its spec can name.

    JAX needs `out_axes` before the function runs, when the structure of the result is unknown.

    Args:
        where: the name of the spec in errors.
        result: the result of the function for one member.
        spec: the axes on which to stack its arrays.
        treatments: the axes that JAX got. They do not include negative axes, or axes that only a
            function in the spec returns. Such an array is stacked on axis 0, and moved later.
        unmapped: gets the paths of results that must be the same for all members.

    Raises:
        ShapeError: if the stacked results will not have an axis.
        SpecError: if the spec does not fit the result.
    """
    result, spread_axes = stacking_axes(spec, result, where)
    pairs = zip(jtu.tree_leaves(result), spread_axes, strict=True)
    arrays = [(x, axis) for x, axis in pairs if axis is not None or is_carried(x)]
    axes: list[Any] = [axis for _, axis in arrays]
    # Paths need a second walk, so they are made only if an error may need them.
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


# A mapped function keeps its type: the shapes of its arrays change, not their type.
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

    By default every array is mapped over axis 0, and everything else is the same for all members.
    Mapping a class, or a function that builds a Module, builds the stacked Module.

    **Law.** `filter_vmap(f)(*args)` equals the stack of `f` called on each member.

    Args:
        fun: the function; without it, the result is a decorator.
        in_axes: one spec for all arguments; a tuple with one for each positional argument; or a
            dict by argument name, where missing names are mapped over axis 0. A spec is an int,
            None, a function from leaf to axis, [`by`][pytreemod.by], a Module with specs instead of
            its data, or a prefix tree of these. A single argument needs no tuple.
        out_axes: the same for the result. A number that has an axis, by an int or a function, is
            repeated for each member, as in `jax.vmap`.
        axis_name: a name for collectives (`jax.lax.pmean`).
        axis_size: the number of members, if no argument is mapped.
        **vmapkwargs: options of `jax.vmap` (`spmd_axis_name`, ...).

    Returns:
        A function of the same signature; arguments by keyword are mapped, too.

    Raises:
        ShapeError: if mapped arrays disagree in size or lack the axis, or if results will lack it;
            the error names all paths.
        SpecError: if a spec does not fit the tree.
        ArgumentError: if a name in `in_axes` is not an argument, nothing is mapped and `axis_size`
            is missing or not a count, or an option does not exist.

    Warns:
        SharedStreamWarning: if all members draw from one random stream, because it is not mapped.

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
