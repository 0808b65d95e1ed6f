"""Loops over the members of a tree: `filter_scan`, `filter_map`, `filter_associative_scan`.

The tree is taken apart along an axis of its arrays, and each step gets one element. So a scan
applies a stack of layers. The carry is taken apart before the loop and assembled in each step (see
`carries`). The other results of the steps are packed like the results of any transform, and
stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, describe
from pytreemod.transform.boundary.packing import pack, unpack
from pytreemod.transform.boundary.sowing import call_tracked, collect, collecting, with_collected
from pytreemod.transform.boundary.stacked_notes import AxisKind, result_along, stacked_along
from pytreemod.transform.boundary.supplying import (
    as_values,
    check_slices,
    handing,
    numbered_steps,
    of_values,
    supplied,
)
from pytreemod.transform.boundary.wrapping import check_callable, check_count, function_name
from pytreemod.transform.compilation.weak_functions import (
    Parts,
    cached,
    functions,
    spec_key,
    weak_ids,
)
from pytreemod.transform.control_flow.carries import returned
from pytreemod.transform.control_flow.refusals import (
    as_length,
    as_pair,
    axis_in_stack,
    refuse_split,
    refuse_unroll,
)
from pytreemod.transform.host.failures import raises_checks
from pytreemod.transform.maps.sizes import common_size
from pytreemod.transform.maps.stacking import refuse_other_than_int
from pytreemod.transform.maps.vmap import ON_AXIS_0, axes_of, stacking_axes
from pytreemod.tree.differences import is_value
from pytreemod.tree.effects import Effects, TraceEffects
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import divide
from pytreemod.typing import AxesSpec, KeyPath, PyTree, jtu

_Carry = TypeVar("_Carry")
_Out = TypeVar("_Out")
_Tree = TypeVar("_Tree")

_lax: Any = jax.lax


def filter_scan(
    f: Callable[[_Carry, Any], tuple[_Carry, _Out]],
    init: _Carry,
    xs: PyTree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    in_axes: AxesSpec = ON_AXIS_0,
    out_axes: AxesSpec = ON_AXIS_0,
) -> tuple[_Carry, _Out]:
    """`jax.lax.scan` for steps of any trees: `carry, y = f(carry, x)` for every `x` in `xs`.

    A Module whose arrays have a leading axis is taken apart along it. So
    `filter_scan(lambda x, layer: (layer(x), None), x, layers)` applies a stack of layers.

    Static values in the carry (functions, strings) must be unchanged by every step; Python numbers
    count as arrays, as in `jax.lax.scan`. In `xs`, and in results beside the carry, all leaves
    except arrays are static, numbers included. They are the same for all steps: each step gets
    them unchanged, and they are returned once.

    **Law.** With `members = unstack(xs)`, it equals the Python loop `carry, y = f(carry, member)`
    over them, and the second result is the `stack` of all `y`.

    Args:
        f: the step, which may be a Module or a bound method; it returns a pair.
        init: the first carry.
        xs: the tree to scan over; None if `length` gives the number of steps.
        length: the number of steps.
        reverse: whether to go through `xs`, and stack the results, from the end.
        unroll: as for `jax.lax.scan`.
        in_axes: the axes along which the arrays in `xs` are taken apart, by default 0: an int, a
            function from leaf to axis, [`by`][pytreemod.by], or a prefix tree of these. With None,
            every step gets the whole array.
        out_axes: the same for the axes on which results are stacked; None is not possible.

    Returns:
        The last carry, and the stacked results.

    Raises:
        ArgumentError: if `f` is not callable, or there is neither an array to scan over nor
            `length`.
        ShapeError: if arrays in `xs` disagree in size or lack the axis; the error names all paths.
        SpecError: if a spec does not fit the tree.
        StructureError: if the carry changes in structure, shape, dtype, or static values (the error
            shows before and after by path), or if `f` does not return a pair.

    Examples:
        >>> def step(carry, x):
        ...     total = carry["total"] + x
        ...     return {**carry, "total": total}, total
        >>> carry, totals = filter_scan(step, {"total": 0, "name": "sum"}, jnp.arange(4))
        >>> carry, totals
        ({'name': 'sum', 'total': Array(6, dtype=int32)}, Array([0, 1, 3, 6], dtype=int32))
    """
    return scan_steps(
        f, init, xs, length, reverse, unroll, in_axes=in_axes, out_axes=out_axes, are_numbered=True
    )


@raises_checks
def scan_steps(
    f: Callable[..., Any],
    init: PyTree,
    xs: PyTree,
    length: int | None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    in_axes: AxesSpec = ON_AXIS_0,
    out_axes: AxesSpec = ON_AXIS_0,
    are_numbered: bool = False,
) -> tuple[PyTree, PyTree]:
    """`filter_scan`, whose steps have numbers if `are_numbered`; layers have their own numbers."""
    check_callable("filter_scan", f, "f")
    f = supplied(f)
    refuse_unroll("filter_scan", unroll)
    if not isinstance(reverse, (bool, np.bool_)):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
        raise ArgumentError("filter_scan(reverse)", "a bool", describe(reverse))
    where = f"filter_scan of {function_name(f)}"
    elements = _Elements("filter_scan", in_axes, xs, length)
    if are_numbered and handing:
        f = numbered_steps(f, elements.length)

    def call(f: Callable[..., Any], carry: Any, x: Any) -> tuple[Any, Any]:
        return as_pair(where, f(carry, x))

    return _scan(
        "filter_scan",
        f,
        functions([f]),
        call,
        Parts(init, is_value),
        elements,
        out_axes,
        where,
        reverse=reverse,
        unroll=unroll,
    )


@raises_checks
def filter_map(
    f: Callable[[Any], _Out],
    xs: PyTree,
    *,
    batch_size: int | None = None,
    in_axes: AxesSpec = ON_AXIS_0,
    out_axes: AxesSpec = ON_AXIS_0,
) -> _Out:
    """`jax.lax.map` for functions of any trees: one member of `xs` after the other.

    Like [`filter_vmap`][pytreemod.filter_vmap], with less memory and more time. Outside compiled
    code each call traces and compiles `f` again, as JAX's does.

    **Law.** `filter_map(f, xs)` equals `filter_vmap(f)(xs)`.

    Args:
        f: a function of one argument.
        xs: the tree to map over.
        batch_size: the number of members that are computed at once, by `vmap`.
        in_axes: the axes along which the arrays in `xs` are taken apart; see
            [`filter_scan`][pytreemod.filter_scan].
        out_axes: the axes on which results are stacked.

    Returns:
        The stacked results.

    Raises:
        ArgumentError: if `f` is not callable, or `xs` has no array.
        ShapeError: if arrays in `xs` disagree in size, or lack the axis.
        SpecError: if a spec does not fit the tree.

    Examples:
        >>> filter_map(lambda d: d["x"] ** 2 if d["square"] else d["x"],
        ...            {"x": jnp.arange(3), "square": True})
        Array([0, 1, 4], dtype=int32)
    """
    check_callable("filter_map", f, "f")
    elements = _Elements("filter_map", in_axes, xs, None)
    if batch_size is not None:
        check_count("filter_map(batch_size)", batch_size, least=1)
        return _map_batches(f, elements, batch_size, out_axes)
    where = f"filter_map of {function_name(f)}"
    # `jax.lax.map` and `vmap` call the function in each call, so they notice changes of other
    # values that it reads, such as globals. `jax.lax.scan` stores its program, and does not notice
    # them.
    f = supplied(f)
    fns = functions([f])
    fns.key = None
    return _scan("filter_map", f, fns, _call_on_element, Parts(None), elements, out_axes, where)[1]


def _call_on_element(f: Callable[..., Any], carry: Any, x: Any) -> tuple[Any, Any]:
    return carry, f(x)


def _map_batches(
    f: Callable[..., Any], elements: _Elements, batch_size: int, out_axes: AxesSpec
) -> PyTree:
    restore, count = elements.restorer(), len(elements.sliced)
    f = supplied(f)
    check_slices("filter_map", f, elements.length)

    def run(sliced: Any) -> Any:
        element = restore(sliced, elements.whole)
        own = of_values(f, sliced[count:])
        result = result_along("loop", collecting(own)(element))
        return _pack_for_stack("filter_map", out_axes, result)

    # Nothing is cached: `jax.lax.map` makes its step again for each call.
    try:
        mapped = _lax.map(run, [*elements.sliced, *as_values(f)], batch_size=batch_size)
    except Exception as error:
        elements.refuse_split(error)
        raise
    return unpack(mapped)


_Step = Callable[[Callable[..., Any], Any, Any], tuple[Any, Any]]


def _scan(
    name: str,
    f: Callable[..., Any],
    fns: Parts,
    call: _Step,
    carry: Parts,
    elements: _Elements,
    out_axes: AxesSpec,
    where: str,
    **options: Any,
) -> tuple[PyTree, PyTree]:
    # The supplied values of each step come last among those of the functions.
    more = as_values(f)
    check_slices(where, f, elements.length)
    own_count, sliced_count = len(fns.values) - len(more), len(elements.sliced)

    kind: AxisKind = "reversed loop" if options.get("reverse") else "loop"

    def make() -> Callable[[Any, Any], Any]:
        fns_of, structure_of, restore_element = fns.weakly(), carry.weakly(), elements.restorer()
        weak = weak_ids(fns, carry, elements)

        def step(state: Any, sliced: Any) -> Any:
            own, whole, values = state
            structure = structure_of()
            (f,) = fns_of().assemble([*own, *sliced[sliced_count:]])
            arguments = (f, structure.assemble(values), restore_element(sliced, whole))
            with Effects() as effects:
                (after, y), collected = collect(call, arguments, {})
            effects.pass_on()
            if collected is not None and name == "filter_scan":
                collected = collected.in_steps()
            values = returned(where, "carry", structure, values, after)
            noted = stacked_along(kind, collected)
            packed = _pack_for_stack(name, out_axes, with_collected(y, noted), weak())
            ((plan, _),) = packed.items()
            plan.effects = TraceEffects.of(effects)
            return (own, whole, values), packed

        return step

    key = (name, elements.axes, spec_key(out_axes), where, kind)
    step = cached(key, fns, [carry, elements], make)
    # Constants are carried, too: JAX takes them out of the loop again.
    state = (fns.values[:own_count], elements.whole, carry.values)
    try:
        (_, _, values), packed = _lax.scan(
            step, state, [*elements.sliced, *more], length=elements.length, **options
        )
    except Exception as error:
        elements.refuse_split(error)
        raise
    return carry.structure.assemble(values), unpack(packed)


class _Elements(Parts):
    """A tree whose arrays are taken apart along axes, one element for each step.

    Attributes:
        axes: the axes of its arrays, None for arrays that every step gets whole.
        sliced: the arrays that are taken apart, along their first axis.
        whole: the others.
        length: the number of elements.
        where: their name in errors.
    """

    __slots__ = ("axes", "length", "sliced", "where", "whole")

    def __init__(self, where: str, spec: AxesSpec, tree: PyTree, length: Any):
        super().__init__(tree)
        self.where = f"{where}(xs)"
        axes = axes_of(spec, tree, f"{where}(in_axes)", "xs")
        # `filter_map` has no option for the length.
        option = "length=n" if where == "filter_scan" else ""
        length = None if length is None else as_length(where, length)
        self.length = common_size(
            self.where,
            [("xs", tree)],
            jtu.tree_leaves(tree),
            axes,
            size=length,
            option=option,
            whole=_whole,
        )
        self.axes = tuple(axes[i] for i in self.structure.positions or ())
        pairs = list(zip(self.values, self.axes, strict=True))
        # To the front, because JAX takes elements from there alone.
        self.sliced = [_to_front(x, axis) for x, axis in pairs if axis is not None]
        self.whole = [x for x, axis in pairs if axis is None]

    def restorer(self) -> Callable[[Sequence[Any], Sequence[Any]], PyTree]:
        """A function that assembles one element: from its arrays, and those shared by all."""
        axes, structure_of = self.axes, self.weakly()

        def restore(sliced: Sequence[Any], whole: Sequence[Any]) -> PyTree:
            own, rest = iter(sliced), iter(whole)
            return structure_of().assemble([next(rest if a is None else own) for a in axes])

        return restore

    def refuse_split(self, error: Exception) -> None:
        """Raise a better error than JAX's, if arrays are split along the axis that is scanned."""
        refuse_split(self.where, "xs", self.structure.assemble(self.values), self.axes, error)


def _to_front(array: Any, axis: int) -> Any:
    return array if axis == 0 else jnp.moveaxis(array, axis, 0)


def _whole(name: str, path: KeyPath, axis: int) -> str:
    return f"in_axes=pm.by({{{path_text(path)!r}: None, ...: {axis}}})" if path else "in_axes=None"


def _pack_for_stack(where: str, spec: AxesSpec, result: PyTree, weak: Container[int] = ()) -> Any:
    """Pack the result of a step; after stacking, its arrays go to the axes of `spec`."""
    result, axes = stacking_axes(spec, result, f"{where}(out_axes)")
    wanted = [
        axis_in_stack(where, path_text(path, "result"), leaf, axis)
        for (path, leaf), axis in zip(jtu.tree_leaves_with_path(result), axes, strict=True)
        if is_array(leaf)
    ]
    packed = pack(result, weak)
    if any(wanted):
        ((plan, _),) = packed.items()
        # A value with `==`, because plans of two traces of one step are compared.
        plan.regroup(_Moves(tuple(wanted)))
    return packed


class _Moves(NamedTuple):
    """Moves arrays from axis 0, on which JAX stacks them, to their own axes."""

    axes: tuple[int, ...]

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        pairs = zip(arrays, self.axes, strict=True)
        return [x if axis == 0 else jnp.moveaxis(x, 0, axis) for x, axis in pairs]


@raises_checks
def filter_associative_scan(
    fn: Callable[[_Tree, _Tree], _Tree], elems: _Tree, reverse: bool = False, axis: int = 0
) -> _Tree:
    """`jax.lax.associative_scan` for trees in which not everything is an array.

    **Law.** For an associative `fn`, member `i` of the result is `fn` over the members 0 to `i`.

    Args:
        fn: combines two trees like `elems`, any number of members at once, and returns another.
            It must return static values unchanged.
        elems: a tree with the members along `axis` of its arrays.
        reverse: whether to start from the end.
        axis: the axis.

    Returns:
        A tree like `elems`.

    Raises:
        ArgumentError: if `fn` is not callable, or `elems` has no array.
        ShapeError: if arrays disagree in size, or lack the axis.
        StructureError: if `fn` returns another structure, shape or dtype; the error shows before
            and after by path.

    Examples:
        >>> filter_associative_scan(
        ...     lambda a, b: {**a, "x": a["x"] + b["x"]}, {"x": jnp.arange(4), "unit": "cm"}
        ... )
        {'unit': 'cm', 'x': Array([0, 1, 3, 6], dtype=int32)}
    """
    check_callable("filter_associative_scan", fn, "fn")
    refuse_other_than_int("filter_associative_scan(axis)", axis)
    arrays, structure = divide(elems)
    leaves = jtu.tree_leaves(elems)
    axes = [axis if is_array(leaf) else None for leaf in leaves]
    common_size("filter_associative_scan(elems)", [("elems", elems)], leaves, axes)
    where = f"filter_associative_scan of {function_name(fn)}"

    def combine(a: list[Any], b: list[Any]) -> list[Any]:
        after = call_tracked(fn, (structure.assemble(a), structure.assemble(b)), {})
        return returned(where, "elems", structure, a, after)

    try:
        return structure.assemble(_scan_arrays(combine, arrays, reverse, axis))
    except Exception as error:
        where = "filter_associative_scan(elems)"
        refuse_split(where, "elems", elems, [axis] * len(arrays), error)
        raise


def _scan_arrays(
    combine: Callable[[list[Any], list[Any]], list[Any]],
    arrays: list[Any],
    reverse: bool,
    axis: int,
) -> list[Any]:
    # JAX needs one axis for all arrays, counted from the front.
    axes = [axis % array.ndim for array in arrays]
    if len(set(axes)) == 1:
        return _lax.associative_scan(combine, arrays, reverse=reverse, axis=axes[0])

    def combine_moved(a: list[Any], b: list[Any]) -> list[Any]:
        return list(map(_to_front, combine(back(a), back(b)), axes))

    def back(moved: list[Any]) -> list[Any]:
        return [jnp.moveaxis(array, 0, to) for array, to in zip(moved, axes, strict=True)]

    moved = list(map(_to_front, arrays, axes))
    return back(_lax.associative_scan(combine_moved, moved, reverse=reverse))
