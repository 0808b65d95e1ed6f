"""Branches over any trees: `filter_cond` and `filter_switch`.

JAX wants branches to return the same arrays. What else is in their results must be equal, and it
takes the results of all branches to tell. So each branch is traced once, and what it returned is
written down; if the branches agree but for numbers and weak types, they are traced again, and this
time told which of their leaves are to be arrays, and of which dtype.
"""

from __future__ import annotations

import threading
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
from pytreemod.transform.boundary.packing import pack, unpack
from pytreemod.transform.boundary.sowing import collect, is_collecting, labels_of, with_collected
from pytreemod.transform.boundary.wrapping import check_callable, function_name
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
from pytreemod.tree.kinds import are_one
from pytreemod.tree.nodes import is_node
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import Structure, are_one_treedef
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

    What is no array in the operands, numbers included, is passed to the branches as it is. What is
    no array in their results must be equal, and is returned as it is; a number that differs, or
    stands where the other branch has an array, becomes an array. So a branch may change one
    part of a model and pass on the rest, and the other branch another part.

    **Law.** It equals `true_fun(*operands) if pred else false_fun(*operands)`.

    Args:
        pred: a scalar.
        true_fun: called if it is true.
        false_fun: called if it is not.
        *operands: their arguments.

    Returns:
        What the chosen branch returns.

    Raises:
        ArgumentError: a branch is not callable, or `pred` is neither bool nor number.
        ShapeError: `pred` is no scalar.
        StructureError: the branches return different structures, shapes, dtypes, or different
            things that are no arrays; both are shown by path.

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
        index: which branch, an integer scalar; the nearest if there is none of this number.
        branches: functions of the same arguments; Modules, for instance.
        *operands: their arguments.

    Returns:
        What the chosen branch returns.

    Raises:
        ArgumentError: there is no branch, a branch is not callable, or `index` is no integer.
        StructureError: the branches return different structures, shapes, dtypes, or different
            things that are no arrays; both are shown by path.

    Examples:
        >>> filter_switch(1, [jnp.sin, jnp.cos], jnp.asarray(0.0))
        Array(1., dtype=float32, weak_type=True)
    """
    try:
        # Once, for it may be a generator.
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
    callee, split = functions(fns), Parts(operands)
    branches = cached((where,), callee, [split], lambda: _Branches(where, labels, callee, split))

    def run(branches: Sequence[Any]) -> Any:
        return choose(branches, callee.values, split.values)

    return unpack(branches.run(run))


class _Branches:
    """The branches of one transform as functions of arrays, for JAX.

    They remember together, but do not hold each other: JAX's traces of them, and what these have
    captured, are to go as soon as nobody needs them.

    Attributes:
        current: the functions, and their fate.
        memory: what they returned.
    """

    def __init__(self, where: str, labels: Sequence[str], callee: Parts, operands: Parts):
        self.memory = _Memory(where, labels)
        self.parts = callee.weakly(), operands.weakly(), weak_ids(callee, operands)
        # Replaced as one: whoever runs must have the fate of the very functions that it runs.
        self.current = self.make()

    def make(self) -> tuple[list[Callable[..., Any]], _Fate]:
        """New functions, of which JAX has no traces."""
        fate = _Fate()
        count = len(self.memory.labels)
        return [_branch(i, self.memory, fate, *self.parts) for i in range(count)], fate

    def renew(self, undone: _Fate) -> None:
        """Replace functions, unless another thread has done it."""
        with self.memory.lock:
            _, fate = self.current
            # Two threads may fail by the same functions: the second finds them replaced already.
            if fate is undone:
                self.current = self.make()

    def run(self, choose: Callable[[Sequence[Any]], Any]) -> Any:
        """Choose a branch; once more, if it turned out what they return together."""
        while True:
            functions, fate = self.current
            try:
                packed = choose(functions)
            except TypeError:
                # JAX's, of results that differ: expected from branches that were not told of each
                # other.
                if not fate.is_undone:
                    raise
            else:
                # Where jit is disabled, JAX runs one branch alone, and compares nothing.
                if _UNDONE not in packed:
                    return packed
            self.renew(fate)


class _Fate:
    """Of some functions of branches: what becomes of the traces that JAX keeps of them.

    Attributes:
        is_undone: whether some are of no use, because not every branch knew what all of them
            return. Once it is, it stays so, for all threads.
        early: for each key, the dtypes of results that were packed before all results were known.
            They belong to these functions: another thread may have found out meanwhile.
    """

    def __init__(self) -> None:
        self.is_undone = False
        self.early: dict[Any, list[list[Any]]] = {}


def _branch(
    index: int,
    memory: _Memory,
    fate: _Fate,
    fns_of: Callable[[], Structure],
    structure_of: Callable[[], Structure],
    weak: Callable[[], Container[int]],
) -> Callable[..., Any]:
    def branch(own: Any, values: Any) -> Any:
        fns, operands = fns_of().assemble(own), structure_of().assemble(values)
        result, collected = collect(fns[index], operands, {})
        # By name, for JAX compares what branches return, in whatever order they sow.
        result = with_collected(result, collected and collected.sorted())
        return memory.pack_alike(index, _conditions(own, values), result, weak(), fate)

    return branch


def _conditions(*values: Any) -> Any:
    """What a branch is traced for, and what else of JAX decides on the types in its result."""
    types = tuple(map(aval_of, jtu.tree_leaves(values)))
    # They are no part of what JAX's caches let us see, and change what a number becomes.
    settings = _config.jax_enable_x64, _config.jax_numpy_dtype_promotion
    return types, settings, is_collecting()


class _Memory:
    """What the branches of one transform have returned, for operands of one structure.

    Attributes:
        results: of each branch, the result with a `Slot` for each array; None if it is not known.
        dtypes: of each leaf, the dtype that all branches return there; None if it is no array.
    """

    def __init__(self, where: str, labels: Sequence[str]):
        self.where = where
        self.labels = labels
        self.results: dict[Any, list[Callable[[], Structure] | None]] = {}
        self.dtypes: dict[Any, list[Any]] = {}
        self.lock = threading.Lock()

    def pack_alike(
        self, index: int, key: Any, result: PyTree, weak: Container[int], fate: _Fate
    ) -> dict[Any, list[Any]]:
        """The result of a branch as all branches return theirs, as far as that is known: packed."""
        leaves, treedef = jtu.tree_flatten(result)
        # Types alone: what is remembered outlives this trace, and must hold none of its tracers.
        types = tuple(Slot(aval_of(x)) if is_array(x) else x for x in leaves)
        mine = Structure(treedef, (), types)
        with self.lock:
            # Another thread may trace another branch of the same call at this moment.
            results = self.results.setdefault(key, [None] * len(self.labels))
            before = results[index]
            if before is not None and not before().matches(mine):
                # JAX traces for more than is in the key, such as the size of a mapped axis: then
                # what the others have returned is of another trace as well.
                results[:] = [None] * len(self.labels)
                self.dtypes.pop(key, None)
            results[index] = weakly(mine, weak)
            dtypes, known = self.dtypes.get(key), [give() for give in results if give is not None]
            # Until then each branch returns its own, and JAX goes on to trace the next.
            if len(known) == len(results):
                self.dtypes[key] = dtypes = self._join(known)
            early = fate.early.setdefault(key, [])
            if dtypes is None:
                dtypes = _dtypes([mine])
                early.append(dtypes)
            elif not all(_agree(one, dtypes) for one in early):
                fate.is_undone = True
                # JAX refuses what no other branch returns. (To raise here would abort the
                # trace of this branch, and JAX never lets go of an aborted trace's tracers.)
                return {_UNDONE: []}
        pairs = zip(leaves, dtypes, strict=True)
        return pack(treedef.unflatten([_as_dtype(x, dtype) for x, dtype in pairs]), weak)

    def _join(self, results: Sequence[Structure]) -> list[Any]:
        for label, result in zip(self.labels[1:], results[1:], strict=True):
            # First as they are flat: a node of another library's may take nothing but arrays.
            if _may_be_joined(results[0], result):
                continue
            first, other = results[0].assemble(()), result.assemble(())
            labels = (self.labels[0], label)
            _refuse_other_names(self.where, labels, first, other)
            found = compare(first, other, _fits)
            if found:
                raise StructureError(_explain_mismatch(self.where, labels, found))
        return _dtypes(results)


_UNDONE = "a result that no other branch returns"


def _as_dtype(value: Any, dtype: Any) -> Any:
    fits = dtype is None or aval_of(value).dtype == dtype
    if fits and (dtype is None or is_array(value)):
        return value
    # Of a number, JAX remembers that it was one, if it is not told the dtype.
    return jnp.asarray(value, None if fits else dtype)


def _fits(first: Any, second: Any) -> bool:
    """Whether two leaves may stand in the same place of the results of two branches."""
    if is_number(first) and is_number(second) and are_one(first, second):
        return True
    a, b = aval_of(first), aval_of(second)
    return a.shape == b.shape and (a.dtype == b.dtype or agreeing_dtype([a, b]) is not None)


def _may_be_joined(one: Structure, other: Structure) -> bool:
    if not are_one_treedef(one.treedef, other.treedef):
        return False
    return all(
        _fits(a, b) if _is_typed(a) and _is_typed(b) else are_one(a, b)
        for a, b in zip(one.statics, other.statics, strict=True)
    )


def _is_typed(leaf: Any) -> bool:
    return isinstance(leaf, Slot) or is_number(leaf)


def _dtypes(results: Sequence[Structure]) -> list[Any]:
    """The dtypes of what results that fit each other have in common, leaf by leaf."""
    return [_dtype_of(column) for column in zip(*(x.statics for x in results), strict=True)]


def _agree(dtypes: Sequence[Any], others: Sequence[Any]) -> bool:
    # To NumPy, None is equal to float64.
    pairs = zip(dtypes, others, strict=True)
    return all((a is None) == (b is None) and a == b for a, b in pairs)


def _dtype_of(column: Sequence[Any]) -> Any:
    """The dtype of the array that leaves make; None if they are one leaf that is no array."""
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
                "join it, or choose for each element:",
                "jnp.any(pred)",
                "jnp.where(pred, x, y)",
            ],
        )


def _refuse_index(index: Any) -> None:
    aval = aval_of(index) if is_value(index) else None
    if aval is None or aval.shape != () or not jnp.issubdtype(aval.dtype, jnp.integer):
        got = index if aval is None or is_number(index) else aval
        raise ArgumentError("filter_switch(index)", "an integer scalar", describe(got))


def _refuse_other_names(where: str, names: tuple[str, str], first: Any, second: Any) -> None:
    """Refuse branches in which different values are captured."""
    of_first, of_second = labels_of(first), labels_of(second)
    if of_first == of_second:
        return
    only = [
        *(f"{names[0]}: {name!r}" for _, name in of_first if (_, name) not in of_second),
        *(f"{names[1]}: {name!r}" for _, name in of_second if (_, name) not in of_first),
    ]
    raise CaptureError(
        where,
        "branches in which the same values are captured, under the same names",
        "others",
        places=only or [f"{names[0]}: {len(of_first)} values", f"{names[1]}: {len(of_second)}"],
        hint=[
            "sow zeros of its shape in the branch that has no such value:",
            f"pm.sow({(of_first or of_second)[0].name!r}, jnp.zeros_like(x))",
        ],
    )


def _explain_mismatch(where: str, names: tuple[str, str], found: Sequence[Difference]) -> str:
    return explain(
        where,
        "branches that return the same structure, shapes, dtypes and static values",
        f"{len(found)} difference{'s' * (len(found) > 1)}",
        places=[
            entry.line("result", f"{{}} from {names[0]}, {{}} from {names[1]}") for entry in found
        ],
        hint=_hint(found[0]),
    )


def _hint(entry: Difference) -> list[str]:
    sides = (entry.old, entry.new)
    arrays = [aval_of(side) for side in sides if isinstance(side, Slot)]
    if entry.of_dtypes:
        aval = arrays[0] if arrays else aval_of(entry.old)
        return ["cast what one of them returns:", f"jnp.asarray(x, jnp.{aval.dtype.name})"]
    if entry.of_arrays:
        return ["the array that is chosen has one shape, whichever it is"]
    if arrays and (None in sides or MISSING in sides):
        aval = arrays[0]
        return [
            "return zeros where there is nothing:",
            f"jnp.zeros({aval.shape}, jnp.{aval.dtype.name})",
        ]
    if any(is_node(side) or side is MISSING for side in sides):
        return ["return the same structure from each branch"]
    return ["what is no array cannot be chosen while the program runs: choose among arrays"]
