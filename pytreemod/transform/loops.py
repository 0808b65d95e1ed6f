"""Loops with a condition or a counter: `filter_while_loop` and `filter_fori_loop`.

The carry is taken apart before the loop, and assembled in each step. Its arrays and numbers may
change; everything else is part of the program, so each step must return it unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, StructureError
from pytreemod.transform.arguments import function_name
from pytreemod.transform.reversible_loops import counted_loop
from pytreemod.transform.sowing import tracked
from pytreemod.transform.steps import Functions
from pytreemod.transform.tracebacks import with_short_errors
from pytreemod.transform.wrapping import check_callable
from pytreemod.tree.comparison import aval_of, compare, is_number, is_value, varying_axes
from pytreemod.tree.predicates import same_static
from pytreemod.tree.snapshots import Structure, divide
from pytreemod.tree.split_arrays import split_axes
from pytreemod.typing import PyTree, jtu

_Carry = TypeVar("_Carry")

_lax: Any = jax.lax


Kind: TypeAlias = Literal["lax", "checkpointed", "bounded"]


@overload
def filter_while_loop(
    cond_fun: Callable[[_Carry], Any],
    body_fun: Callable[[_Carry], _Carry],
    init_val: _Carry,
    *,
    max_steps: int | None = None,
    kind: Kind = "lax",
    checkpoints: int | None = None,
    return_steps: Literal[False] = False,
) -> _Carry: ...
@overload
def filter_while_loop(
    cond_fun: Callable[[_Carry], Any],
    body_fun: Callable[[_Carry], _Carry],
    init_val: _Carry,
    *,
    max_steps: int | None = None,
    kind: Kind = "lax",
    checkpoints: int | None = None,
    return_steps: Literal[True],
) -> tuple[_Carry, jax.Array]: ...
@with_short_errors
def filter_while_loop(
    cond_fun: Callable[[_Carry], Any],
    body_fun: Callable[[_Carry], _Carry],
    init_val: _Carry,
    *,
    max_steps: int | None = None,
    kind: Kind = "lax",
    checkpoints: int | None = None,
    return_steps: bool = False,
) -> Any:
    """`jax.lax.while_loop` for any tree, also with a reverse mode.

    **Law.** It equals `while cond_fun(val): val = body_fun(val)`, for at most `max_steps` steps.

    | `kind` | `grad` | `jvp` | memory of `grad`, in values | steps of `grad` |
    |---|---|---|---|---|
    | `"lax"` | no | yes | | |
    | `"checkpointed"` | yes | no | `checkpoints + 2` | at most 3 each, by default |
    | `"bounded"` | yes | yes | 16 per level | one more per level |

    Arrays that the functions capture have gradients, too. A bounded loop has a level for each
    factor 16 of `max_steps`. A checkpointed loop has second derivatives by `jax.hessian`, which is
    `jvp` of `grad`.

    Args:
        cond_fun: returns whether to go on, for a value: a scalar bool.
        body_fun: returns the next value. Static values must be unchanged; Python numbers count as
            arrays, as in `jax.lax.while_loop`.
        init_val: the first value.
        max_steps: the number of steps after which the loop stops, with the value that it has then.
        kind: how it can be differentiated.
        checkpoints: how many values a checkpointed loop stores, beside the first and the last: by
            default `sqrt(2 * max_steps)`, and 100 without `max_steps`. Each step is computed at
            most three times in at most `(checkpoints + 1) * (checkpoints + 2) / 2` steps.
        return_steps: whether to return also the number of steps.

    Returns:
        The last value; with `return_steps`, a pair of it and the number of steps.

    Raises:
        ArgumentError: if a function is not callable, the kind is unknown, `checkpoints` is not
            positive, or a bounded loop has no `max_steps`.
        StructureError: if the value changes in structure, shape, dtype, or static values; the
            error shows before and after by path.

    Examples:
        >>> filter_while_loop(
        ...     lambda val: val["n"] < 10, lambda val: {**val, "n": 2 * val["n"]},
        ...     {"n": 1, "name": "powers of two"},
        ... )
        {'n': Array(16, dtype=int32, weak_type=True), 'name': 'powers of two'}
        >>> def double_until_ten(x):
        ...     return filter_while_loop(lambda x: x < 10, lambda x: 2 * x, x, kind="checkpointed")
        >>> jax.grad(double_until_ten)(3.0)
        Array(4., dtype=float32, weak_type=True)
    """
    check_callable("filter_while_loop", cond_fun, "cond_fun")
    check_callable("filter_while_loop", body_fun, "body_fun")
    values, structure = divide(init_val, is_value)
    where = f"filter_while_loop of {function_name(body_fun)}"
    fns = Functions([cond_fun, body_fun])
    is_counted = kind != "lax" or max_steps is not None or return_steps

    def make() -> Any:
        fns_of = fns.assembler()

        def goes_on(state: Any) -> Any:
            own, values = state
            return tracked(fns_of(own)[0])(structure.assemble(values))

        def step(state: Any) -> Any:
            own, values = state
            after = tracked(fns_of(own)[1])(structure.assemble(values))
            return own, returned(where, "val", structure, values, after)

        def run(own: list[Any], values: list[Any]) -> Any:
            def test(values: list[Any]) -> Any:
                return goes_on((own, values))

            def body(values: list[Any]) -> list[Any]:
                return step((own, values))[1]

            if not is_counted:
                # The arrays of the functions are carried: captured, they would be constants.
                return None, _lax.while_loop(goes_on, step, (own, values))[1]
            return counted_loop(kind, test, body, values, max_steps, checkpoints)

        # So that calls outside of a program find it again, as JAX's own loop does.
        return jax.jit(run, inline=True) if is_counted else run

    run = fns.cached((where, structure, kind, is_counted, max_steps, checkpoints), make)
    steps, values = run(fns.arrays, values)
    last = structure.assemble(values)
    return (last, steps) if return_steps else last


@with_short_errors
def filter_fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, _Carry], _Carry],
    init_val: _Carry,
    *,
    unroll: int | bool | None = None,
    kind: Kind = "lax",
    checkpoints: int | None = None,
) -> _Carry:
    """`jax.lax.fori_loop` for any tree.

    With the kind `"lax"` it has a reverse mode if the bounds are no traced values; it stores the
    values of all steps then.

    **Law.** It equals `for i in range(lower, upper): val = body_fun(i, val)`.

    Args:
        lower: the first `i`.
        upper: the `i` to stop before.
        body_fun: returns the next value, from `i` and the value. Static values must be unchanged;
            Python numbers count as arrays.
        init_val: the first value.
        unroll: as for `jax.lax.fori_loop`; for the kind `"lax"` only.
        kind: how it can be differentiated; see
            [`filter_while_loop`][pytreemod.filter_while_loop]. A bounded one needs bounds that are
            not traced.
        checkpoints: how many values a checkpointed loop stores.

    Returns:
        The last value.

    Raises:
        ArgumentError: if `body_fun` is not callable, or an option is wrong.
        StructureError: as for [`filter_while_loop`][pytreemod.filter_while_loop].

    Examples:
        >>> filter_fori_loop(0, 4, lambda i, val: (val[0] + i, val[1]), (0, "sum"))
        (Array(6, dtype=int32, weak_type=True), 'sum')
    """
    check_callable("filter_fori_loop", body_fun, "body_fun")
    values, structure = divide(init_val, is_value)
    where = f"filter_fori_loop of {function_name(body_fun)}"
    fns = Functions([body_fun])

    def make() -> Any:
        fns_of = fns.assembler()

        def step(i: Any, state: Any) -> Any:
            own, values = state
            after = tracked(fns_of(own)[0])(i, structure.assemble(values))
            return own, returned(where, "val", structure, values, after)

        return step

    if kind == "lax":
        step = fns.cached((where, structure), make)
        # The arrays of the functions are carried: captured, they would be constants of the program.
        _, values = _lax.fori_loop(lower, upper, step, (fns.arrays, values), unroll=unroll)
        return structure.assemble(values)
    if unroll is not None:
        raise ArgumentError(f"{where}: unroll is for the kind 'lax', not {kind!r}")
    most = _step_count(lower, upper)

    def make_run() -> Any:
        step = make()

        def run(own: list[Any], upper: Any, first: list[Any]) -> Any:
            def counted(state: list[Any]) -> list[Any]:
                i, *values = state
                return [i + 1, *step(i, (own, values))[1]]

            return counted_loop(kind, lambda s: s[0] < upper, counted, first, most, checkpoints)

        return jax.jit(run, inline=True)

    run = fns.cached((where, structure, kind, most, checkpoints), make_run)
    _, (_, *values) = run(fns.arrays, upper, [jnp.asarray(lower), *values])
    return structure.assemble(values)


def _step_count(lower: Any, upper: Any) -> int | None:
    """The number of steps between two bounds; None if one is traced."""
    try:
        return max(operator.index(upper - lower), 0)
    except TypeError:
        return None


# ---- the carry


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
        return same_static(before, after)
    return _fits(before, after)


def _fits(before: Any, after: Any) -> bool:
    a, b = aval_of(before), aval_of(after)
    if a.shape != b.shape or varying_axes(a) != varying_axes(b) or split_axes(a) != split_axes(b):
        return False
    # JAX starts a loop from a weak value with the dtype that its step returns.
    return a.dtype == b.dtype or bool(getattr(a, "weak_type", False))
