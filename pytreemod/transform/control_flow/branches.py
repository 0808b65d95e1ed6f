"""Branches over any trees: `filter_cond` and `filter_switch`.

JAX needs branches to return the same arrays. Everything else that they return must be equal, too.
If JAX refuses them, the results of the branches are compared. If they differ only in numbers and
weak types, they are cast to a common dtype; otherwise the error shows the differences by path.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Container, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from pytreemod.errors import (
    ArgumentError,
    CaptureError,
    ShapeError,
    StructureError,
    describe,
    explain,
)
from pytreemod.transform.boundary.agreement import agreeing_dtype
from pytreemod.transform.boundary.sowing import (
    Collected,
    WithCollected,
    collect,
    collects_checks,
    labels_of,
    take_result,
    with_collected,
)
from pytreemod.transform.boundary.supplying import Handed, handing, next_call, with_values
from pytreemod.transform.boundary.wrapping import check_callable, function_name
from pytreemod.transform.compilation.placements import spec_text
from pytreemod.transform.compilation.weak_functions import (
    Parts,
    cached,
    functions,
    weak_ids,
    weakly,
)
from pytreemod.transform.host.failures import raises_checks
from pytreemod.tree.differences import (
    MISSING,
    Difference,
    Slot,
    aval_of,
    compare,
    is_number,
    is_value,
)
from pytreemod.tree.effects import TracedSteps
from pytreemod.tree.kinds import are_one
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import Structure, are_one_treedef, divide
from pytreemod.tree.split_arrays import split_axes
from pytreemod.typing import PyTree, jtu

_Out = TypeVar("_Out")

_lax: Any = jax.lax
_config: Any = jax.config


@raises_checks
def filter_cond(
    pred: Any,
    true_fun: Callable[..., _Out],
    false_fun: Callable[..., _Out],
    *operands: Any,
) -> _Out:
    """`jax.lax.cond` for functions of any trees.

    Static values in the operands, numbers included, are passed to the branches unchanged. Static
    values in their results must be equal, and are returned unchanged. A number that differs, or is
    an array in the other branch, becomes an array. So each branch may change a different part of
    a model, and return the rest unchanged.

    **Law.** It equals `true_fun(*operands) if pred else false_fun(*operands)`.

    Args:
        pred: a scalar.
        true_fun: called if it is true.
        false_fun: called if it is not.
        *operands: their arguments.

    Returns:
        The result of the chosen branch.

    Raises:
        ArgumentError: if a branch is not callable, or `pred` is neither bool nor number.
        ShapeError: if `pred` is not a scalar.
        StructureError: if the branches return different structures, shapes, dtypes or static
            values; the error shows both by path.

    Examples:
        >>> model = {"w": jnp.asarray(1.0), "b": jnp.asarray(2.0), "name": "model"}
        >>> filter_cond(True, lambda m: {**m, "w": -m["w"]}, lambda m: {**m, "b": -m["b"]}, model)
        ... # doctest: +NORMALIZE_WHITESPACE
        {'b': Array(2., dtype=float32, weak_type=True), 'name': 'model',
         'w': Array(-1., dtype=float32, weak_type=True)}
    """
    check_callable("filter_cond", true_fun, "true_fun")
    check_callable("filter_cond", false_fun, "false_fun")
    _refuse_condition(pred)

    def choose(branches: Sequence[Any], *values: Any) -> Any:
        return _lax.cond(pred, *branches, *values)

    where = f"filter_cond of {function_name(true_fun)} and {function_name(false_fun)}"
    return _run(where, ("true_fun", "false_fun"), (true_fun, false_fun), operands, choose)


@raises_checks
def filter_switch(index: Any, branches: Sequence[Callable[..., _Out]], *operands: Any) -> _Out:
    """`jax.lax.switch` for functions of any trees.

    Operands and results are treated as by [`filter_cond`][pytreemod.filter_cond].

    **Law.** It equals `branches[min(max(index, 0), len(branches) - 1)](*operands)`.

    Args:
        index: the number of the branch, an integer scalar; if there is none, the nearest.
        branches: functions of the same arguments, such as Modules.
        *operands: their arguments.

    Returns:
        The result of the chosen branch.

    Raises:
        ArgumentError: if there is no branch, a branch is not callable, or `index` is not an
            integer.
        StructureError: if the branches return different structures, shapes, dtypes or static
            values; the error shows both by path.

    Examples:
        >>> filter_switch(1, [jnp.sin, jnp.cos], jnp.asarray(0.0))
        Array(1., dtype=float32, weak_type=True)
    """
    try:
        # Once, because it may be a generator.
        fns = tuple(branches)
    except TypeError:
        raise ArgumentError(
            "filter_switch(branches)", "several functions", describe(branches)
        ) from None
    if not fns:
        raise ArgumentError("filter_switch(branches)", "one function or more", "none")
    for i, fn in enumerate(fns):
        check_callable("filter_switch", fn, f"branches[{i}]")
    _refuse_index(index)

    def choose(branches: Sequence[Any], *values: Any) -> Any:
        return _lax.switch(index, branches, *values)

    labels = [f"branches[{i}]" for i in range(len(fns))]
    return _run("filter_switch", labels, fns, operands, choose)


def _run(
    where: str,
    labels: Sequence[str],
    fns: Sequence[Callable[..., Any]],
    operands: tuple[Any, ...],
    choose: Callable[..., Any],
) -> PyTree:
    # One call, whose branches get the same supplied values.
    handed = next_call() if handing else Handed()
    fns = [with_values(fn, handed) for fn in fns]
    callee, split = functions(fns), Parts(operands)

    def make() -> tuple[_Branches, TracedSteps]:
        parts = callee.weakly(), split.weakly(), weak_ids(callee, split)
        traced = TracedSteps()
        return _Branches([_branch(i, *parts, traced) for i in range(len(fns))]), traced

    branches, traced = cached((where,), callee, [split], make)
    packed = branches.run(where, labels, choose, (callee.values, split.values))
    traced.record(callee.values, split.values)
    ((returned, arrays),) = packed.items()
    return returned.build(arrays)


class _Branches:
    """The branches of one transform as functions of arrays, for JAX."""

    def __init__(self, own: list[_Branch]):
        self.own = own
        # The branches that return arrays of the same dtypes, by these dtypes.
        self.cast: dict[Any, list[_Branch]] = {}
        # The branches that return the records of all checks, by these records.
        self.joined: dict[Any, _Branches] = {}

    @ft.cached_property
    def traced(self) -> list[Any]:
        """The same branches with traces that JAX caches; inline, so programs are the same."""
        return [jax.jit(branch, inline=True) for branch in self.own]

    def run(self, where: str, labels: Sequence[str], choose: Any, values: Any) -> _Packed:
        """Choose a branch; if JAX refuses them, try again with results made equal in type."""
        # If jit is disabled, JAX runs one branch alone, and compares nothing.
        is_alone = _config.jax_disable_jit
        if collects_checks() and not is_alone:
            return self._with_checks(values)._run(where, labels, choose, values, is_alone)
        return self._run(where, labels, choose, values, is_alone)

    def _with_checks(self, values: Any) -> _Branches:
        """Return the branches, each of which returns the records of all checks."""
        found = tuple(_checks_of(branch.eval_shape(*values)) for branch in self.traced)
        if not any(found):
            return self
        joined = _Branches([_join_checks(i, b, found) for i, b in enumerate(self.traced)])
        return self.joined.setdefault(found, joined)

    def _run(
        self, where: str, labels: Sequence[str], choose: Any, values: Any, is_alone: bool
    ) -> _Packed:
        refused = None
        if is_alone or not self.cast:
            try:
                return choose(self.own, *values)
            except TypeError as error:
                if is_alone:
                    raise
                refused = error
        try:
            results = [_result_of(branch.eval_shape(*values)) for branch in self.traced]
            dtypes = tuple(_join(where, labels, results))
            every = [pair for one in results for pair in zip(one.statics, dtypes, strict=True)]
            if refused is not None and all(_has(leaf, dtype) for leaf, dtype in every):
                raise refused
            cast = [_cast(branch, dtypes) for branch in self.traced]
            return choose(self.cast.setdefault(dtypes, cast), *values)
        finally:
            # Its traceback has this frame, and so keeps all arguments of the call alive.
            del refused


class _Returned:
    """The result of a branch, without its arrays. Equal if JAX need only compare the arrays."""

    def __init__(self, result: Structure, weak: Callable[[], Container[int]]):
        self.weak = weak
        self.structure = weakly(result, weak())
        self.hash = hash(result.treedef)

    def build(self, arrays: Sequence[Any]) -> PyTree:
        """Return the result."""
        return take_result(self.structure().assemble(arrays))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Returned) and self.structure().matches(other.structure())

    def __hash__(self) -> int:
        return self.hash


_Packed = dict[_Returned, list[Any]]
_Branch = Callable[[Any, Any], _Packed]


def _branch(
    index: int,
    fns_of: Callable[[], Structure],
    structure_of: Callable[[], Structure],
    weak: Callable[[], Container[int]],
    traced: TracedSteps,
) -> _Branch:
    """Return a branch as a function of arrays, for JAX."""

    def branch(own: Any, values: Any) -> _Packed:
        fns, operands = fns_of().assemble(own), structure_of().assemble(values)
        with traced.tracing(own, values):
            result, collected = collect(fns[index], operands, {})
        # By name, because JAX compares results of branches that may sow in any order.
        arrays, structure = divide(with_collected(result, collected and collected.sorted()))
        return {_Returned(structure, weak): arrays}

    return branch


_Checks = tuple[tuple[Any, tuple[int, ...]], ...]
"""The records of a branch's checks: labels and shapes."""


def _checks_of(shapes: _Packed) -> _Checks:
    result = _result_of(shapes)
    if not any(type(leaf) is Slot for leaf in result.statics):
        return ()
    tree = result.assemble(())
    if type(tree) is not WithCollected:
        return ()
    checks, _ = tree.collected.divide()
    return tuple(
        (label, slot.aval.shape) for label, slot in zip(checks.labels, checks.values, strict=True)
    )


def _join_checks(index: int, branch: _Branch, found: Sequence[_Checks]) -> _Branch:
    """The branch, returning the records of all checks: those of other branches do not fail."""

    def run(own: Any, values: Any) -> _Packed:
        ((returned, arrays),) = branch(own, values).items()
        tree = returned.structure().assemble(arrays)
        result, collected = tree, Collected((), ())
        if type(tree) is WithCollected:
            result, collected = tree.result, tree.collected
        checks, rest = collected.divide()
        labels = [label for of_branch in found for label, _ in of_branch]
        codes: list[Any] = []
        for i, of_branch in enumerate(found):
            zeros = (jnp.zeros(shape, jnp.int32) for _, shape in of_branch)
            codes += checks.values if i == index else zeros
        both = Collected([*rest.labels, *labels], [*rest.values, *codes])
        arrays, structure = divide(WithCollected(result, both))
        return {_Returned(structure, returned.weak): arrays}

    return run


def _cast(branch: _Branch, dtypes: Sequence[Any]) -> _Branch:
    """Return the branch, returning arrays of these dtypes; arrays with None are unchanged."""

    def run(own: Any, values: Any) -> _Packed:
        ((returned, arrays),) = branch(own, values).items()
        leaves, treedef = jtu.tree_flatten(returned.structure().assemble(arrays))
        arrays, structure = divide(treedef.unflatten(map(_as_dtype, leaves, dtypes)))
        return {_Returned(structure, returned.weak): arrays}

    return run


def _result_of(shapes: _Packed) -> Structure:
    """Return the result of a branch, with a `Slot` for each array."""
    ((returned, structs),) = shapes.items()
    structure = returned.structure()
    leaves = list(structure.statics)
    for i, struct in zip(structure.positions or (), structs, strict=True):
        leaves[i] = Slot(struct)
    return Structure(structure.treedef, (), tuple(leaves))


def _has(leaf: Any, dtype: Any) -> bool:
    return dtype is None or (isinstance(leaf, Slot) and leaf.aval.dtype == dtype)


def _join(where: str, labels: Sequence[str], results: Sequence[Structure]) -> list[Any]:
    """Return the dtype that all branches return, for each leaf; None if it is not an array.

    Raises:
        StructureError, CaptureError: if the results differ.
    """
    for label, result in zip(labels[1:], results[1:], strict=True):
        # First by their leaves: a node of another library may accept only arrays.
        if _may_be_joined(results[0], result):
            continue
        first, other = results[0].assemble(()), result.assemble(())
        _refuse_other_names(where, (labels[0], label), first, other)
        found = compare(first, other, _fits)
        if found:
            raise StructureError(_explain_mismatch(where, (labels[0], label), found))
    return [_dtype_of(column) for column in zip(*(x.statics for x in results), strict=True)]


def _as_dtype(value: Any, dtype: Any) -> Any:
    fits = dtype is None or aval_of(value).dtype == dtype
    if fits and (dtype is None or is_array(value)):
        return value
    # JAX remembers that a value was a number, unless it gets the dtype.
    return jnp.asarray(value, None if fits else dtype)


def _fits(first: Any, second: Any) -> bool:
    """Whether two leaves may be at one path of the results of two branches."""
    if is_number(first) and is_number(second) and are_one(first, second):
        return True
    a, b = aval_of(first), aval_of(second)
    if a.shape != b.shape or split_axes(a) != split_axes(b):
        return False
    return a.dtype == b.dtype or agreeing_dtype([a, b]) is not None


def _may_be_joined(one: Structure, other: Structure) -> bool:
    if not are_one_treedef(one.treedef, other.treedef):
        return False
    return all(
        _fits(a, b) if _is_typed(a) and _is_typed(b) else are_one(a, b)
        for a, b in zip(one.statics, other.statics, strict=True)
    )


def _is_typed(leaf: Any) -> bool:
    return isinstance(leaf, Slot) or is_number(leaf)


def _dtype_of(column: Sequence[Any]) -> Any:
    """Return the dtype of the array for some leaves; None if they are one static value."""
    first = column[0]
    if not isinstance(first, Slot) and all(are_one(first, leaf) for leaf in column):
        return None
    return agreeing_dtype([aval_of(leaf) for leaf in column])


def _refuse_condition(pred: Any) -> None:
    if not is_value(pred):
        raise ArgumentError("filter_cond(pred)", "a scalar bool", describe(pred))
    aval = aval_of(pred)
    if aval.shape != ():
        raise ShapeError(
            "filter_cond(pred)",
            "a scalar bool",
            describe(aval),
            hint=[
                "reduce it, or choose for each element:",
                "jnp.any(pred)",
                "jnp.where(pred, x, y)",
            ],
        )


def _refuse_index(index: Any) -> None:
    aval = aval_of(index) if is_value(index) else None
    if aval is None or aval.shape != () or not jnp.issubdtype(aval.dtype, jnp.integer):
        got = index if aval is None or is_number(index) else aval
        hint = ("write", "index.astype(int)") if aval is not None and aval.shape == () else ()
        raise ArgumentError("filter_switch(index)", "an integer scalar", describe(got), hint=hint)


def _refuse_other_names(where: str, names: tuple[str, str], first: Any, second: Any) -> None:
    """Refuse branches that capture different values."""
    of_first, of_second = labels_of(first), labels_of(second)
    if of_first == of_second:
        return
    only = [
        *(f"{names[0]}: {label.name!r}" for label in of_first if label not in of_second),
        *(f"{names[1]}: {label.name!r}" for label in of_second if label not in of_first),
    ]
    raise CaptureError(
        where,
        "branches that capture the same values under the same names",
        "other values",
        at=only or [f"{names[0]}: {len(of_first)} values", f"{names[1]}: {len(of_second)}"],
        hint=[
            "sow zeros of the same shape in the other branch:",
            f"pm.sow({(of_first or of_second)[0].name!r}, jnp.zeros_like(x))",
        ],
    )


def _explain_mismatch(where: str, names: tuple[str, str], found: Sequence[Difference]) -> str:
    return explain(
        f"{where}: the branches return different results",
        at=[entry.line("result", f"{{}} from {names[0]}, {{}} from {names[1]}") for entry in found],
        hint=_hint(found[0]),
    )


def _hint(entry: Difference) -> str:
    sides = (entry.old, entry.new)
    arrays = [aval_of(side) for side in sides if isinstance(side, Slot)]
    if entry.of_dtypes:
        aval = arrays[0] if arrays else aval_of(entry.old)
        return f"jnp.asarray(x, jnp.{aval.dtype.name})"
    if entry.of_arrays and aval_of(entry.old).shape == aval_of(entry.new).shape:
        return f"pm.filter_shard(x, NamedSharding(mesh, {spec_text(arrays[0].sharding.spec)}))"
    if arrays and (None in sides or MISSING in sides):
        return f"jnp.zeros({arrays[0].shape}, jnp.{arrays[0].dtype.name})"
    return ""
