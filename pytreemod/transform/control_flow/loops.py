"""Loops over steps of any trees: scan, map, associative scan, while and for.

A carry is taken apart before the loop and put together in each step, so that it may be a Module,
a State, or a container of anything. What is no array in it is part of the program: it must come out
of each step as it went in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import (
    ArgumentError,
    ShapeError,
    SpecError,
    StructureError,
    describe,
    explain,
)
from pytreemod.transform.boundary.agreement import (
    Difference,
    aval_of,
    differences,
    is_number,
    is_value,
    may_be_promoted,
    same_static,
    varying_axes,
)
from pytreemod.transform.boundary.sowing import reap, reaping, release, with_harvest
from pytreemod.transform.boundary.wrapping import check_count, function_name
from pytreemod.transform.compilation.kept_functions import (
    Callee,
    Frame,
    Framed,
    Parts,
    keep,
    lend,
    refuse_other_than_int,
    refuse_uncallable,
    spec_key,
)
from pytreemod.transform.host.runtime_checks import surfacing
from pytreemod.transform.maps.vmap import ON_AXIS_0, axes_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import Structure, divide
from pytreemod.typing import AxesSpec, PyTree, Tracer, class_of, jtu

_Carry = TypeVar("_Carry")
_Out = TypeVar("_Out")
_Tree = TypeVar("_Tree")

_lax: Any = jax.lax


# ---- the carry


def _returned(where: str, root: str, structure: Structure, values: Any, after: PyTree) -> list[Any]:
    """The values of a carry that came out of a step; refused if it is not as it went in."""
    leaves, treedef = jtu.tree_flatten(after)
    if treedef == structure.treedef and _all_fit(structure, values, leaves):
        return [leaves[i] for i in structure.positions or ()]
    found = differences(structure.assemble(values), after, _fits)
    raise StructureError(_explain_change(where, root, found))


def _all_fit(structure: Structure, values: Sequence[Any], leaves: Sequence[Any]) -> bool:
    before = iter(values)
    places = set(structure.positions or ())
    return all(
        is_value(leaf) and _fits(next(before), leaf) if i in places else same_static(static, leaf)
        for i, (leaf, static) in enumerate(zip(leaves, structure.statics, strict=True))
    )


def _fits(before: Any, after: Any) -> bool:
    """Whether JAX takes `after` for what was `before`, possibly by promoting the latter."""
    a, b = aval_of(before), aval_of(after)
    if a.shape != b.shape or varying_axes(a) != varying_axes(b):
        return False
    return a.dtype == b.dtype or may_be_promoted(a, b) not in (None, a.dtype)


def _explain_change(where: str, root: str, found: Sequence[Difference]) -> str:
    places = [f"{path_text(entry.path, root)}: {' -> '.join(entry.texts())}" for entry in found]
    return explain(
        where,
        f"the {root} to come out of each step as it went in",
        f"a change in {len(found)} place{'s' * (len(found) > 1)}",
        places=places,
        cure=_cure_of_change(root, found),
    )


def _cure_of_change(root: str, found: Sequence[Difference]) -> list[str]:
    for entry in found:
        if entry.of_dtypes:
            return _casts(path_text(entry.path, root), entry)
        if entry.of_arrays and aval_of(entry.first).shape == aval_of(entry.second).shape:
            axes = ", ".join(map(repr, sorted(varying_axes(aval_of(entry.second)), key=str)))
            return [
                "start from an array that varies over the same axes of the mesh:",
                f'jax.lax.pcast({path_text(entry.path, root)}, ({axes},), to="varying")',
            ]
    if all(entry.of_arrays for entry in found):
        return ["arrays keep their shapes from step to step"]
    return ["what is no array is part of the program, which is the same for every step"]


def _casts(place: str, entry: Difference) -> list[str]:
    before, after = aval_of(entry.first), aval_of(entry.second)
    return [
        "cast what the step returns, or what the loop starts from:",
        f"{place}.astype(jnp.{before.dtype.name})   # in the step"
        if not is_number(entry.second)
        else f"jnp.asarray({entry.second!r}, jnp.{before.dtype.name})   # in the step",
        f"jnp.asarray({place}, jnp.{after.dtype.name})   # before the loop",
    ]


# ---- what is scanned


class _Elements:
    """A tree whose arrays are taken apart along axes, one element for each step."""

    def __init__(self, where: str, root: str, spec: AxesSpec, tree: PyTree, length: Any):
        self.axes = tuple(axes_of(spec, tree, f"{where}(in_axes)", root))
        leaves, self.treedef = jtu.tree_flatten(tree)
        pairs = list(zip(leaves, self.axes, strict=True))
        self.length = _common_length(where, root, tree, self.axes, length)
        self.sliced = [_to_front(x, axis) for x, axis in pairs if axis is not None]
        self.rest = Parts([x for x, axis in pairs if axis is None])
        self.key = None if self.rest.key is None else (self.treedef, self.axes, self.rest.key)

    def restorer(self) -> Callable[[Sequence[Any], Sequence[Any]], PyTree]:
        """What puts one element together: from its arrays, and those that are in all of them."""
        treedef, axes, rest_of = self.treedef, self.axes, lend(self.rest.structure)

        def restore(sliced: Sequence[Any], whole: Sequence[Any]) -> PyTree:
            own, rest = iter(sliced), iter(rest_of().assemble(whole))
            return treedef.unflatten([next(rest if axis is None else own) for axis in axes])

        return restore


def _to_front(array: Any, axis: int) -> Any:
    return array if axis == 0 else jnp.moveaxis(array, axis, 0)


def _common_length(
    where: str, root: str, tree: PyTree, axes: Sequence[int | None], length: Any
) -> Any:
    """The number of steps, on which all arrays and `length` must agree."""
    sizes = [] if length is None else [_as_length(where, length)]
    for leaf, axis in zip(jtu.tree_leaves(tree), axes, strict=True):
        if axis is not None:
            if not -leaf.ndim <= axis < leaf.ndim:
                _refuse_axis(where, root, tree, axes)
            sizes.append(leaf.shape[axis])
    if not sizes:
        _refuse_nothing(where, root)
    if any(size != sizes[0] for size in sizes):
        _refuse_sizes(where, root, tree, axes, length)
    return sizes[0]


def _taken_apart(
    root: str, tree: PyTree, axes: Sequence[int | None]
) -> list[tuple[tuple[Any, ...], str, Any, int]]:
    leaves = jtu.tree_leaves_with_path(tree)
    return [
        (path, f"{path_text(path, root)}: {describe(leaf)}", leaf, axis)
        for (path, leaf), axis in zip(leaves, axes, strict=True)
        if axis is not None
    ]


def _refuse_axis(where: str, root: str, tree: PyTree, axes: Sequence[int | None]) -> None:
    wrong = [
        (path, place, axis)
        for path, place, leaf, axis in _taken_apart(root, tree, axes)
        if not -leaf.ndim <= axis < leaf.ndim
    ]
    path, _, axis = wrong[0]
    rule = f"pm.by({{{path_text(path)!r}: None, ...: {axis}}})" if path else "None"
    raise ShapeError(
        explain(
            f"{where}({root})",
            f"arrays with the axis {axis} that they are taken apart along",
            "one without" if len(wrong) == 1 else f"{len(wrong)} without",
            places=[place for _, place, _ in wrong],
            cure=["what is the same for all steps has the axis None:", f"in_axes={rule}"]
            if "associative" not in where
            else (),
        )
    )


def _refuse_sizes(
    where: str, root: str, tree: PyTree, axes: Sequence[int | None], length: Any
) -> None:
    sizes: dict[Any, list[str]] = {} if length is None else {length: [f"length={length}"]}
    for _, place, leaf, axis in _taken_apart(root, tree, axes):
        sizes.setdefault(leaf.shape[axis], []).append(f"{place}, axis {axis}")
    more = {size: f" (and {len(of) - 1} more)" if len(of) > 1 else "" for size, of in sizes.items()}
    raise ShapeError(
        explain(
            f"{where}({root})",
            "one number of steps",
            f"{len(sizes)} numbers",
            places=[f"{size} steps of {of[0]}{more[size]}" for size, of in sorted(sizes.items())],
        )
    )


def _refuse_nothing(where: str, root: str) -> None:
    or_length = where == "filter_scan"
    raise ArgumentError(
        explain(
            f"{where}({root})",
            "an array to take apart, or a length" if or_length else "an array to take apart",
            "neither" if or_length else "none",
            cure=["say how many steps there are:", "length=n"] if or_length else (),
        )
    )


def _refuse_unroll(where: str, unroll: Any) -> None:
    if not isinstance(unroll, bool):
        check_count(f"{where}(unroll)", unroll)


def _as_length(where: str, length: Any) -> Any:
    if isinstance(length, (bool, float, str, Tracer)):
        raise ArgumentError(
            explain(f"{where}(length)", "an int that is known while tracing", describe(length))
        )
    if isinstance(length, int) and length < 0:
        raise ArgumentError(explain(f"{where}(length)", "a count", str(length)))
    return length


# ---- what a step returns


def _pair(where: str, result: Any) -> tuple[Any, Any]:
    is_sequence = issubclass(class_of(result), (tuple, list))
    if is_sequence and len(result) == 2:
        return result[0], result[1]
    raise StructureError(
        explain(
            where,
            "a step that returns a pair (carry, y)",
            f"{len(result)} values" if is_sequence else describe(result),
            cure=["return both, with None for what there is none of:", "return carry, None"],
        )
    )


def _framed(
    where: str, spec: AxesSpec, result: PyTree, lenders: Sequence[Structure] = ()
) -> Framed:
    """A step's result, with the axes on which the results of all steps are to be stacked."""
    axes = axes_of(spec, result, f"{where}(out_axes)", "result")
    arrays, structure = divide(result)
    paths = jtu.tree_leaves_with_path(result)
    wanted = [
        _axis_in_stack(where, path_text(path, "result"), leaf, axis)
        for (path, leaf), axis in zip(paths, axes, strict=True)
        if is_array(leaf)
    ]
    return Framed(arrays, Frame(structure, tuple(wanted), lenders))


def _axis_in_stack(where: str, place: str, leaf: Any, axis: int | None) -> int:
    if axis is None:
        raise SpecError(
            explain(
                f"{where}(out_axes)",
                "an axis for each array that a step returns",
                "None",
                places=[f"{place}: {describe(leaf)}"],
                cure="each step has one of its own; what is to be returned once is carried",
            )
        )
    rank = leaf.ndim + 1
    if not -rank <= axis < rank:
        raise SpecError(
            explain(
                f"{where}(out_axes)",
                f"an axis from {-rank} to {rank - 1}",
                str(axis),
                places=[f"{place}: {describe(leaf)} in each step"],
            )
        )
    return axis % rank


Call = Callable[[Callable[..., Any], Any, Any], tuple[Any, Any]]


def _scan(
    name: str,
    callee: Callee,
    call: Call,
    carry: Parts,
    elements: _Elements,
    out_axes: AxesSpec,
    where: str,
    **options: Any,
) -> tuple[PyTree, PyTree]:
    nodes = Parts(callee.nodes)
    parts = [nodes, carry, elements.rest]

    def make() -> Callable[[Any, Any], Any]:
        restore_functions, restore_element = callee.restorer(), elements.restorer()
        lent = [lend(part.structure) for part in parts]

        def step(state: Any, sliced: Any) -> Any:
            own, whole, values = state
            lenders = [give_back() for give_back in lent]
            functions, structure, _ = lenders
            (f,) = restore_functions(functions.assemble(own))
            arguments = (f, structure.assemble(values), restore_element(sliced, whole))
            (after, y), harvest = reap(call, arguments, {})
            values = _returned(where, "carry", structure, values, after)
            result = _framed(name, out_axes, with_harvest(y, harvest), lenders)
            return (own, whole, values), result

        return step

    key = (name, nodes.key, carry.key, elements.key, spec_key(out_axes), where)
    # What does not change is carried, too: JAX takes it out of the loop again.
    state = (nodes.values, elements.rest.values, carry.values)
    inputs = (*nodes.values, *carry.values, *elements.sliced)
    kept = keep(callee, key, parts, inputs, make)
    (_, _, values), framed = _lax.scan(
        kept, state, elements.sliced, length=elements.length, **options
    )
    return carry.structure.assemble(values), release(framed.build())


@surfacing
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

    A Module whose arrays have a leading axis is taken apart along it: a stack of layers is applied
    by `filter_scan(lambda x, layer: (layer(x), None), x, layers)`.

    In the carry, what is no array (functions, strings) comes out of every step as it went in;
    Python numbers count as arrays, as in `jax.lax.scan`. In `xs` and in what `f` returns beside the
    carry, what is no array, numbers included, is the same for all steps: it is passed to each of
    them as it is, and returned once.

    **Law.** With `members = unstack(xs)`, it equals the Python loop `carry, y = f(carry, member)`
    over them, and the second result is the `stack` of all `y`.

    Args:
        f: the step, which may be a Module or a bound method; it returns a pair.
        init: the first carry.
        xs: what is scanned over; None if `length` says how many steps there are.
        length: how many steps.
        reverse: whether to go through `xs`, and stack the results, from the end.
        unroll: as for `jax.lax.scan`.
        in_axes: along which axis the arrays in `xs` are taken apart, by default 0: an int, a
            function from leaf to axis, [`by`][pytreemod.by], or a prefix tree of these. None
            gives every step the whole.
        out_axes: the same for the axes on which results are stacked; None is not possible.

    Returns:
        The last carry, and the stacked results.

    Raises:
        ArgumentError: `f` is not callable; there is neither an array to scan over nor `length`.
        ShapeError: arrays in `xs` disagree in size, or lack the axis; all paths are named.
        SpecError: a spec does not fit the tree.
        StructureError: the carry changes, in structure, shape, dtype, or in what is no array:
            before and after are shown by path; `f` does not return a pair.

    Examples:
        >>> def step(carry, x):
        ...     total = carry["total"] + x
        ...     return {**carry, "total": total}, total
        >>> carry, totals = filter_scan(step, {"total": 0, "name": "sum"}, jnp.arange(4))
        >>> carry, totals
        ({'name': 'sum', 'total': Array(6, dtype=int32)}, Array([0, 1, 3, 6], dtype=int32))
    """
    refuse_uncallable("filter_scan(f)", f)
    _refuse_unroll("filter_scan", unroll)
    if not isinstance(reverse, (bool, np.bool_)):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
        raise ArgumentError(explain("filter_scan(reverse)", "a bool", describe(reverse)))
    where = f"filter_scan of {function_name(f)}"
    elements = _Elements("filter_scan", "xs", in_axes, xs, length)

    def call(f: Callable[..., Any], carry: Any, x: Any) -> tuple[Any, Any]:
        return _pair(where, f(carry, x))

    return _scan(
        "filter_scan",
        Callee([f]),
        call,
        Parts(init, is_value),
        elements,
        out_axes,
        where,
        reverse=reverse,
        unroll=unroll,
    )


@surfacing
def filter_map(
    f: Callable[[Any], _Out],
    xs: PyTree,
    *,
    batch_size: int | None = None,
    in_axes: AxesSpec = ON_AXIS_0,
    out_axes: AxesSpec = ON_AXIS_0,
) -> _Out:
    """`jax.lax.map` for functions of any trees: one member of `xs` after the other.

    Like [`filter_vmap`][pytreemod.filter_vmap] in what it gives, unlike it in how: less memory,
    more time.

    **Law.** `filter_map(f, xs)` equals `filter_vmap(f)(xs)`.

    Args:
        f: a function of one argument.
        xs: what is mapped over.
        batch_size: how many members are computed at once, by `vmap`.
        in_axes: along which axis the arrays in `xs` are taken apart; see
            [`filter_scan`][pytreemod.filter_scan].
        out_axes: the axes on which results are stacked.

    Returns:
        The stacked results.

    Raises:
        ArgumentError: `f` is not callable; there is no array in `xs`.
        ShapeError: arrays in `xs` disagree in size, or lack the axis.
        SpecError: a spec does not fit the tree.

    Examples:
        >>> filter_map(lambda d: d["x"] ** 2 if d["square"] else d["x"],
        ...            {"x": jnp.arange(3), "square": True})
        Array([0, 1, 4], dtype=int32)
    """
    refuse_uncallable("filter_map(f)", f)
    elements = _Elements("filter_map", "xs", in_axes, xs, None)
    if batch_size is not None:
        check_count("filter_map(batch_size)", batch_size, least=1)
        return _map_batches(f, elements, batch_size, out_axes)
    where = f"filter_map of {function_name(f)}"
    callee, carry = Callee([f]), Parts(None)
    return _scan("filter_map", callee, _call_on_element, carry, elements, out_axes, where)[1]


def _call_on_element(f: Callable[..., Any], carry: Any, x: Any) -> tuple[Any, Any]:
    return carry, f(x)


def _map_batches(
    f: Callable[..., Any], elements: _Elements, batch_size: int, out_axes: AxesSpec
) -> PyTree:
    restore, whole = elements.restorer(), elements.rest.values

    def run(sliced: Any) -> Framed:
        return _framed("filter_map", out_axes, reaping(f)(restore(sliced, whole)))

    return release(_lax.map(run, elements.sliced, batch_size=batch_size).build())


@surfacing
def filter_associative_scan(
    fn: Callable[[_Tree, _Tree], _Tree], elems: _Tree, reverse: bool = False, axis: int = 0
) -> _Tree:
    """`jax.lax.associative_scan` for trees in which not everything is an array.

    **Law.** For an associative `fn`, member `i` of the result is `fn` over the members 0 to `i`.

    Args:
        fn: combines two trees like `elems`, any number of members at once, and returns another;
            what is no array in them comes out as it went in.
        elems: a tree with the members along `axis` of its arrays.
        reverse: whether to start from the end.
        axis: the axis.

    Returns:
        A tree like `elems`.

    Raises:
        ArgumentError: `fn` is not callable, or `elems` has no array.
        ShapeError: arrays disagree in size, or lack the axis.
        StructureError: `fn` returns another structure, shape or dtype; before and after are shown
            by path.

    Examples:
        >>> filter_associative_scan(
        ...     lambda a, b: {**a, "x": a["x"] + b["x"]}, {"x": jnp.arange(4), "unit": "cm"}
        ... )
        {'unit': 'cm', 'x': Array([0, 1, 3, 6], dtype=int32)}
    """
    refuse_uncallable("filter_associative_scan(fn)", fn)
    refuse_other_than_int("filter_associative_scan(axis)", axis)
    _common_length(
        "filter_associative_scan",
        "elems",
        elems,
        [axis if is_array(leaf) else None for leaf in jtu.tree_leaves(elems)],
        None,
    )
    parts = Parts(elems)
    structure = parts.structure
    where = f"filter_associative_scan of {function_name(fn)}"

    def combine(a: list[Any], b: list[Any]) -> list[Any]:
        after = fn(structure.assemble(a), structure.assemble(b))
        return _returned(where, "elems", structure, a, after)

    return structure.assemble(_scan_arrays(combine, parts.values, reverse, axis))


def _scan_arrays(
    combine: Callable[[list[Any], list[Any]], list[Any]],
    arrays: list[Any],
    reverse: bool,
    axis: int,
) -> list[Any]:
    # JAX wants one axis for all arrays, counted from the front.
    axes = [axis % array.ndim for array in arrays]
    if len(set(axes)) == 1:
        return _lax.associative_scan(combine, arrays, reverse=reverse, axis=axes[0])

    def combine_moved(a: list[Any], b: list[Any]) -> list[Any]:
        return list(map(_to_front, combine(back(a), back(b)), axes))

    def back(moved: list[Any]) -> list[Any]:
        return [jnp.moveaxis(array, 0, to) for array, to in zip(moved, axes, strict=True)]

    moved = list(map(_to_front, arrays, axes))
    return back(_lax.associative_scan(combine_moved, moved, reverse=reverse))


@surfacing
def filter_while_loop(
    cond_fun: Callable[[_Carry], Any], body_fun: Callable[[_Carry], _Carry], init_val: _Carry
) -> _Carry:
    """`jax.lax.while_loop` for any tree.

    **Law.** It equals `while cond_fun(val): val = body_fun(val)`.

    Args:
        cond_fun: says of a value whether to go on: a scalar bool.
        body_fun: gives the next value. What is no array comes out as it went in; Python numbers
            count as arrays, as in `jax.lax.while_loop`.
        init_val: the first value.

    Returns:
        The last value.

    Raises:
        ArgumentError: a function is not callable, or `cond_fun` gives no scalar bool.
        StructureError: the value changes, in structure, shape, dtype, or in what is no array:
            before and after are shown by path.

    Examples:
        >>> filter_while_loop(
        ...     lambda val: val["n"] < 10, lambda val: {**val, "n": 2 * val["n"]},
        ...     {"n": 1, "name": "powers of two"},
        ... )
        {'n': Array(16, dtype=int32, weak_type=True), 'name': 'powers of two'}
    """
    refuse_uncallable("filter_while_loop(cond_fun)", cond_fun)
    refuse_uncallable("filter_while_loop(body_fun)", body_fun)
    callee, carry = Callee([cond_fun, body_fun]), Parts(init_val, is_value)
    nodes = Parts(callee.nodes)
    names = function_name(cond_fun), function_name(body_fun)

    def make() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        restore = callee.restorer()
        functions_of, structure_of = lend(nodes.structure), lend(carry.structure)

        def goes_on(state: Any) -> Any:
            own, values = state
            cond_fun, _ = restore(functions_of().assemble(own))
            return _as_condition(names[0], cond_fun(structure_of().assemble(values)))

        def step(state: Any) -> Any:
            own, values = state
            structure = structure_of()
            _, body_fun = restore(functions_of().assemble(own))
            after = body_fun(structure.assemble(values))
            where = f"filter_while_loop of {names[1]}"
            return own, _returned(where, "val", structure, values, after)

        return goes_on, step

    key = ("filter_while_loop", nodes.key, carry.key, names)
    state = (nodes.values, carry.values)
    kept = keep(callee, key, [nodes, carry], (*nodes.values, *carry.values), make)
    _, values = _lax.while_loop(*kept, state)
    return carry.structure.assemble(values)


def _as_condition(name: str, value: Any) -> Any:
    if is_value(value):
        aval = aval_of(value)
        if aval.shape == () and aval.dtype == bool:
            return value
    raise ArgumentError(
        explain(
            f"filter_while_loop(cond_fun) of {name}",
            "a scalar bool",
            describe(aval_of(value)) if is_value(value) else describe(value),
            cure=["compare, and join what is an array:", "return jnp.any(error > 1e-3)"],
        )
    )


@surfacing
def filter_fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, _Carry], _Carry],
    init_val: _Carry,
    *,
    unroll: int | bool | None = None,
) -> _Carry:
    """`jax.lax.fori_loop` for any tree.

    **Law.** It equals `for i in range(lower, upper): val = body_fun(i, val)`.

    Args:
        lower: the first `i`.
        upper: the `i` to stop before.
        body_fun: gives the next value, from `i` and the value. What is no array comes out as it
            went in; Python numbers count as arrays, as in `jax.lax.fori_loop`.
        init_val: the first value.
        unroll: as for `jax.lax.fori_loop`.

    Returns:
        The last value.

    Raises:
        ArgumentError: `body_fun` is not callable, or a bound is no integer.
        StructureError: the value changes, in structure, shape, dtype, or in what is no array:
            before and after are shown by path.

    Examples:
        >>> filter_fori_loop(0, 4, lambda i, val: (val[0] + i, val[1]), (0, "sum"))
        (Array(6, dtype=int32, weak_type=True), 'sum')
    """
    refuse_uncallable("filter_fori_loop(body_fun)", body_fun)
    for name, bound in (("lower", lower), ("upper", upper)):
        _refuse_bound(name, bound)
    if unroll is not None:
        _refuse_unroll("filter_fori_loop", unroll)
    callee, carry = Callee([body_fun]), Parts(init_val, is_value)
    nodes = Parts(callee.nodes)
    where = f"filter_fori_loop of {function_name(body_fun)}"

    def make() -> Callable[[Any, Any], Any]:
        restore = callee.restorer()
        functions_of, structure_of = lend(nodes.structure), lend(carry.structure)

        def step(i: Any, state: Any) -> Any:
            own, values = state
            structure = structure_of()
            (body_fun,) = restore(functions_of().assemble(own))
            after = body_fun(i, structure.assemble(values))
            return own, _returned(where, "val", structure, values, after)

        return step

    key = ("filter_fori_loop", nodes.key, carry.key, where)
    state = (nodes.values, carry.values)
    kept = keep(callee, key, [nodes, carry], (*nodes.values, *carry.values), make)
    _, values = _lax.fori_loop(lower, upper, kept, state, unroll=unroll)
    return carry.structure.assemble(values)


def _refuse_bound(name: str, bound: Any) -> None:
    aval = aval_of(bound) if is_value(bound) else None
    if aval is None or aval.shape != () or not jnp.issubdtype(aval.dtype, jnp.integer):
        raise ArgumentError(
            explain(
                f"filter_fori_loop({name})",
                "an integer",
                describe(bound if aval is None or is_number(bound) else aval),
            )
        )
