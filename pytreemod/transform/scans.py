"""Loops over the members of a tree: `filter_scan`, `filter_map`, `filter_associative_scan`.

The arrays of `xs` are taken apart along an axis, and each step gets one element; so a scan applies
a stack of layers. JAX stacks results on axis 0; they are moved afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax

from pytreemod.errors import ArgumentError, SpecError, StructureError, describe
from pytreemod.transform import axes as ax
from pytreemod.transform.arguments import function_name
from pytreemod.transform.axes import ON_AXIS_0
from pytreemod.transform.loops import returned
from pytreemod.transform.packing import moved, pack_groups, unpack
from pytreemod.transform.reversible_loops import checkpointed_scan
from pytreemod.transform.sowing import collecting, split_sown, tracked
from pytreemod.transform.steps import Functions
from pytreemod.transform.tracebacks import with_short_errors
from pytreemod.transform.wrapping import check_callable
from pytreemod.tree.comparison import is_value
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import Structure, divide
from pytreemod.typing import AxesSpec, PyTree, class_of, jtu

_Carry = TypeVar("_Carry")
_Out = TypeVar("_Out")
_Tree = TypeVar("_Tree")

_lax: Any = jax.lax


@with_short_errors
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
    kind: Literal["lax", "checkpointed"] = "lax",
    checkpoints: int | None = None,
) -> tuple[_Carry, _Out]:
    """`jax.lax.scan` for steps of any trees: `carry, y = f(carry, x)` for every `x` in `xs`.

    A Module whose arrays have a leading axis is taken apart along it. So
    `filter_scan(lambda x, layer: (layer(x), None), x, layers)` applies a stack of layers.

    Static values in the carry (functions, strings) must be unchanged by every step; Python numbers
    count as arrays, as in `jax.lax.scan`. In `xs`, and in results beside the carry, all leaves
    except arrays are static, numbers included: the same for all steps, and returned once.

    **Law.** With `members = unstack(xs)`, it equals the Python loop `carry, y = f(carry, member)`
    over them, and the second result is the `stack` of all `y`.

    Args:
        f: the step, which may be a Module or a bound method; it returns a pair.
        init: the first carry.
        xs: the tree to scan over; None if `length` gives the number of steps.
        length: the number of steps.
        reverse: whether to go through `xs`, and stack the results, from the end.
        unroll: as for `jax.lax.scan`; for the kind `"lax"` only.
        in_axes: the axes along which the arrays in `xs` are taken apart, by default 0: an int, a
            function from leaf to axis, [`by`][pytreemod.by], or a prefix tree of these. With None,
            every step gets the whole array.
        out_axes: the same for the axes on which results are stacked; None is not possible.
        kind: with `"checkpointed"`, the reverse mode stores a few carries instead of what all steps
            compute, as in [`filter_while_loop`][pytreemod.filter_while_loop].
        checkpoints: how many, by default `sqrt(2 * length)`.

    Returns:
        The last carry, and the stacked results.

    Raises:
        ArgumentError: if `f` is not callable, there is neither an array to scan over nor
            `length`, or an option is wrong.
        ShapeError: if arrays in `xs` disagree in size or lack the axis; the error names all paths.
        SpecError: if a spec does not fit the tree.
        StructureError: if the carry changes in structure, shape, dtype, or static values (the error
            shows before and after by path), or if `f` does not return a pair.

    Examples:
        >>> import jax.numpy as jnp
        >>> def step(carry, x):
        ...     total = carry["total"] + x
        ...     return {**carry, "total": total}, total
        >>> carry, totals = filter_scan(step, {"total": 0, "name": "sum"}, jnp.arange(4))
        >>> carry, totals
        ({'name': 'sum', 'total': Array(6, dtype=int32)}, Array([0, 1, 3, 6], dtype=int32))
    """
    check_callable("filter_scan", f, "f")
    where = f"filter_scan of {function_name(f)}"
    axes = ax.axes_of(in_axes, xs, "filter_scan(in_axes)", "xs")
    size = ax.common_size(where, [("xs", xs)], axes, length, "length=n")
    sliced, elements = _apart(xs, axes)
    # What is not sliced is carried: captured, it would be a constant of a cached program.
    whole, rest = divide(elements.statics)
    values, structure = divide(init, is_value)
    fns = Functions([f])
    treedef, positions = elements.treedef, elements.positions or ()

    def make() -> Callable[[Any, Any], Any]:
        fns_of = fns.assembler()

        def step(state: Any, sliced: Any) -> Any:
            own, whole, values = state
            leaves = [*rest.assemble(whole)]
            for i, x in zip(positions, sliced, strict=True):
                leaves[i] = x
            carry, x = structure.assemble(values), treedef.unflatten(leaves)
            out, with_sown = split_sown(collecting(fns_of(own)[0])(carry, x))
            if not issubclass(class_of(out), (tuple, list)) or len(out) != 2:
                fact = f"{where}: the step returns no pair (carry, y), but {describe(out)}"
                raise StructureError(fact, hint="return carry, None")
            after, y = out
            values = returned(where, "carry", structure, values, after)
            kind = "reversed" if reverse else "loop"
            packed = _packed_for_stack("filter_scan(out_axes)", out_axes, with_sown(y), kind)
            return (own, whole, values), packed

        return step

    spec, specs = jtu.tree_flatten(out_axes, is_leaf=ax.is_axes_spec)
    key = (where, structure, rest, treedef, positions, tuple(spec), specs, bool(reverse))
    step = fns.cached(key, make)
    if kind not in ("lax", "checkpointed"):
        raise ArgumentError(f"{where}: the kind is 'lax' or 'checkpointed', not {kind!r}")
    if kind == "checkpointed" and (unroll is True or unroll > 1):
        raise ArgumentError(f"{where}: unroll is for the kind 'lax', not 'checkpointed'")
    if kind == "checkpointed" and size:

        def make_run() -> Any:
            step = make()

            def run(own: Any, whole: Any, values: list[Any], sliced: list[Any]) -> Any:
                def of_values(values: list[Any], sliced: list[Any]) -> Any:
                    (_, _, values), packed = step((own, whole, values), sliced)
                    return values, packed

                return checkpointed_scan(of_values, values, sliced, size, reverse, checkpoints)

            return jax.jit(run, inline=True)

        run = fns.cached((*key, size, checkpoints), make_run)
        values, packed = run(fns.arrays, whole, values, sliced)
    else:
        carry = fns.arrays, whole, values
        (_, _, values), packed = _lax.scan(step, carry, sliced, size, reverse, unroll)
    return structure.assemble(values), unpack(packed)


def _apart(xs: PyTree, axes: Sequence[int | None]) -> tuple[list[Any], Structure]:
    """Return the arrays to scan over, from the front, and the structure of one member."""
    arrays, structure = divide(xs, [axis is not None for axis in axes])
    given = [axis for axis in axes if axis is not None]
    return list(map(ax.to_front, arrays, given)), structure


def _packed_for_stack(where: str, spec: AxesSpec, result: PyTree, kind: str) -> Any:
    """Pack the result of a step; after stacking, its arrays are moved to the axes of `spec`."""
    result, axes = ax.stacking_axes(spec, result, where, kind)
    if None in axes:
        raise SpecError(f"{where}: each step returns its own arrays, so each needs an axis")
    return pack_groups(result, [0] * len(axes), 1, axes)


@with_short_errors
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
        >>> import jax.numpy as jnp
        >>> filter_map(lambda d: d["x"] ** 2 if d["square"] else d["x"],
        ...            {"x": jnp.arange(3), "square": True})
        Array([0, 1, 4], dtype=int32)
    """
    check_callable("filter_map", f, "f")
    axes = ax.axes_of(in_axes, xs, "filter_map(in_axes)", "xs")
    ax.common_size(f"filter_map of {function_name(f)}", [("xs", xs)], axes, None)
    sliced, elements = _apart(xs, axes)

    def run(sliced: Any) -> Any:
        result = collecting(f)(elements.assemble(sliced))
        return _packed_for_stack("filter_map(out_axes)", out_axes, result, "loop")

    return unpack(_lax.map(run, sliced, batch_size=batch_size))


@with_short_errors
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
        >>> import jax.numpy as jnp
        >>> filter_associative_scan(
        ...     lambda a, b: {**a, "x": a["x"] + b["x"]}, {"x": jnp.arange(4), "unit": "cm"}
        ... )
        {'unit': 'cm', 'x': Array([0, 1, 3, 6], dtype=int32)}
    """
    check_callable("filter_associative_scan", fn, "fn")
    where = f"filter_associative_scan of {function_name(fn)}"
    arrays, structure = divide(elems)
    axes = [axis if is_array(leaf) else None for leaf in jtu.tree_leaves(elems)]
    ax.common_size(where, [("elems", elems)], axes, None)

    def back(arrays: list[Any]) -> PyTree:
        return structure.assemble([moved(x, axis) for x in arrays])

    def combine(a: list[Any], b: list[Any]) -> list[Any]:
        after = tracked(fn)(back(a), back(b))
        before = structure, [moved(x, axis) for x in a]
        values = returned(where, "elems", *before, after, may_be_numbers=False)
        return [ax.to_front(x, axis) for x in values]

    fronted = [ax.to_front(x, axis) for x in arrays]
    return back(_lax.associative_scan(combine, fronted, reverse=reverse))
