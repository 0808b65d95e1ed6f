"""Loops with a condition or a counter: `filter_while_loop` and `filter_fori_loop`.

The carry is taken apart before the loop, and assembled in each step. Its arrays and numbers may
change; everything else is part of the program, so each step must return it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from pytreemod.errors import StructureError
from pytreemod.transform.arguments import function_name
from pytreemod.transform.sowing import tracked
from pytreemod.transform.steps import Functions
from pytreemod.transform.tracebacks import with_short_errors
from pytreemod.transform.wrapping import check_callable
from pytreemod.tree.comparison import aval_of, compare, is_number, is_value, varying_axes
from pytreemod.tree.kinds import are_one
from pytreemod.tree.snapshots import Structure, divide
from pytreemod.tree.split_arrays import split_axes
from pytreemod.typing import PyTree, jtu

_Carry = TypeVar("_Carry")

_lax: Any = jax.lax


@with_short_errors
def filter_while_loop(
    cond_fun: Callable[[_Carry], Any], body_fun: Callable[[_Carry], _Carry], init_val: _Carry
) -> _Carry:
    """`jax.lax.while_loop` for any tree.

    **Law.** It equals `while cond_fun(val): val = body_fun(val)`.

    Args:
        cond_fun: returns whether to go on, for a value: a scalar bool.
        body_fun: returns the next value. Static values must be unchanged; Python numbers count as
            arrays, as in `jax.lax.while_loop`.
        init_val: the first value.

    Returns:
        The last value.

    Raises:
        ArgumentError: if a function is not callable.
        StructureError: if the value changes in structure, shape, dtype, or static values; the
            error shows before and after by path.

    Examples:
        >>> filter_while_loop(
        ...     lambda val: val["n"] < 10, lambda val: {**val, "n": 2 * val["n"]},
        ...     {"n": 1, "name": "powers of two"},
        ... )
        {'n': Array(16, dtype=int32, weak_type=True), 'name': 'powers of two'}
    """
    check_callable("filter_while_loop", cond_fun, "cond_fun")
    check_callable("filter_while_loop", body_fun, "body_fun")
    fns = Functions([cond_fun, body_fun])
    values, structure = divide(init_val, is_value)
    where = f"filter_while_loop of {function_name(body_fun)}"

    def make() -> tuple[Any, Any]:
        fns_of = fns.assembler()

        def goes_on(state: Any) -> Any:
            return tracked(fns_of(state[0])[0])(structure.assemble(state[1]))

        return goes_on, _stepper(where, fns_of, 1, structure)

    # The arrays of the functions are carried: captured, they would be constants of the program.
    made = fns.cached((where, structure), make)
    return structure.assemble(_lax.while_loop(*made, (fns.arrays, values))[1])


@with_short_errors
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
        body_fun: returns the next value, from `i` and the value. Static values must be unchanged;
            Python numbers count as arrays.
        init_val: the first value.
        unroll: as for `jax.lax.fori_loop`.

    Returns:
        The last value.

    Raises:
        ArgumentError: if `body_fun` is not callable.
        StructureError: as for [`filter_while_loop`][pytreemod.filter_while_loop].

    Examples:
        >>> filter_fori_loop(0, 4, lambda i, val: (val[0] + i, val[1]), (0, "sum"))
        (Array(6, dtype=int32, weak_type=True), 'sum')
    """
    check_callable("filter_fori_loop", body_fun, "body_fun")
    fns = Functions([body_fun])
    values, structure = divide(init_val, is_value)
    where = f"filter_fori_loop of {function_name(body_fun)}"

    def make() -> Any:
        return _stepper(where, fns.assembler(), 0, structure)

    step = fns.cached((where, structure), make)
    _, values = _lax.fori_loop(lower, upper, step, (fns.arrays, values), unroll=unroll)
    return structure.assemble(values)


# ---- the carry


def _stepper(where: str, fns_of: Any, at: int, structure: Structure) -> Callable[..., Any]:
    """A step for JAX of the function at a position: from and to `(arrays of functions, values)`."""

    def step(*given: Any) -> Any:
        *i, (own, values) = given
        after = tracked(fns_of(own)[at])(*i, structure.assemble(values))
        return own, returned(where, "val", structure, values, after)

    return step


def returned(
    where: str,
    root: str,
    structure: Structure,
    values: Any,
    after: PyTree,
    may_be_numbers: bool = True,
) -> list[Any]:
    """Return the values of the carry that a step returned.

    Args:
        where: the name of the loop in errors.
        root: the name of the carry.
        structure: the structure of the carry.
        values: its values before the step.
        after: the carry that the step returned.
        may_be_numbers: whether numbers may change, as arrays may.

    Raises:
        StructureError: if they do not match; the error shows both by path.
    """
    found = compare(structure.assemble(values), after, _fits if may_be_numbers else _are_alike)
    if found:
        at = [each.line(root) for each in found]
        raise StructureError(f"{where}: the {root} changes its type in a step", at=at)
    leaves = jtu.tree_leaves(after)
    return [leaves[i] for i in structure.positions or ()]


def _are_alike(before: Any, after: Any) -> bool:
    if is_number(before) or is_number(after):
        return are_one(before, after)
    return _fits(before, after)


def _fits(before: Any, after: Any) -> bool:
    a, b = aval_of(before), aval_of(after)
    if a.shape != b.shape or varying_axes(a) != varying_axes(b) or split_axes(a) != split_axes(b):
        return False
    # JAX starts a loop from a weak value with the dtype that its step returns.
    return a.dtype == b.dtype or bool(getattr(a, "weak_type", False))
