"""Loops that go on as long as they must: `filter_while_loop` and `filter_fori_loop`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, describe
from pytreemod.transform.boundary.sowing import call_tracked
from pytreemod.transform.boundary.wrapping import check_callable, function_name
from pytreemod.transform.compilation.weak_functions import Parts, cached, functions
from pytreemod.transform.control_flow.carries import returned
from pytreemod.transform.control_flow.refusals import refuse_unroll
from pytreemod.transform.host.failures import raises_checks
from pytreemod.tree.differences import aval_of, is_number, is_value

_Carry = TypeVar("_Carry")

_lax: Any = jax.lax


@raises_checks
def filter_while_loop(
    cond_fun: Callable[[_Carry], Any], body_fun: Callable[[_Carry], _Carry], init_val: _Carry
) -> _Carry:
    """`jax.lax.while_loop` for any tree.

    **Law.** It equals `while cond_fun(val): val = body_fun(val)`.

    Args:
        cond_fun: says of a value whether to go on: a scalar bool.
        body_fun: gives the next value. Static values come out as they went in; Python numbers
            count as arrays, as in `jax.lax.while_loop`.
        init_val: the first value.

    Returns:
        The last value.

    Raises:
        ArgumentError: a function is not callable, or `cond_fun` gives no scalar bool.
        StructureError: the value changes, in structure, shape, dtype, or static values:
            before and after are shown by path.

    Examples:
        >>> filter_while_loop(
        ...     lambda val: val["n"] < 10, lambda val: {**val, "n": 2 * val["n"]},
        ...     {"n": 1, "name": "powers of two"},
        ... )
        {'n': Array(16, dtype=int32, weak_type=True), 'name': 'powers of two'}
    """
    check_callable("filter_while_loop", cond_fun, "cond_fun")
    check_callable("filter_while_loop", body_fun, "body_fun")
    fns, carry = functions([cond_fun, body_fun]), Parts(init_val, is_value)
    fns_of, structure_of = fns.weakly(), carry.weakly()
    names = function_name(cond_fun), function_name(body_fun)

    def goes_on(state: Any) -> Any:
        own, values = state
        cond_fun, _ = fns_of().assemble(own)
        args = (structure_of().assemble(values),)
        return _as_condition(names[0], call_tracked(cond_fun, args, {}))

    def step(state: Any) -> Any:
        own, values = state
        structure = structure_of()
        _, body_fun = fns_of().assemble(own)
        after = call_tracked(body_fun, (structure.assemble(values),), {})
        where = f"filter_while_loop of {names[1]}"
        return own, returned(where, "val", structure, values, after)

    made = cached(("filter_while_loop", names), fns, [carry], lambda: (goes_on, step))
    # The functions' own arrays are carried: captured, they would be constants of a cached program.
    _, values = _lax.while_loop(*made, (fns.values, carry.values))
    return carry.structure.assemble(values)


@raises_checks
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
        StructureError: the value changes, in structure, shape, dtype, or static values:
            before and after are shown by path.

    Examples:
        >>> filter_fori_loop(0, 4, lambda i, val: (val[0] + i, val[1]), (0, "sum"))
        (Array(6, dtype=int32, weak_type=True), 'sum')
    """
    check_callable("filter_fori_loop", body_fun, "body_fun")
    for name, bound in (("lower", lower), ("upper", upper)):
        _refuse_bound(name, bound)
    if unroll is not None:
        refuse_unroll("filter_fori_loop", unroll)
    fns, carry = functions([body_fun]), Parts(init_val, is_value)
    fns_of, structure_of = fns.weakly(), carry.weakly()
    where = f"filter_fori_loop of {function_name(body_fun)}"

    def step(i: Any, state: Any) -> Any:
        own, values = state
        structure = structure_of()
        (body_fun,) = fns_of().assemble(own)
        after = call_tracked(body_fun, (i, structure.assemble(values)), {})
        return own, returned(where, "val", structure, values, after)

    made = cached((where,), fns, [carry], lambda: step)
    _, values = _lax.fori_loop(lower, upper, made, (fns.values, carry.values), unroll=unroll)
    return carry.structure.assemble(values)


def _as_condition(name: str, value: Any) -> Any:
    if is_value(value):
        aval = aval_of(value)
        if aval.shape == () and aval.dtype == bool:
            return value
    raise ArgumentError(
        f"filter_while_loop(cond_fun) of {name}",
        "a scalar bool",
        describe(aval_of(value)) if is_value(value) else describe(value),
        hint=["compare, and join what is an array:", "return jnp.any(error > 1e-3)"],
    )


def _refuse_bound(name: str, bound: Any) -> None:
    aval = aval_of(bound) if is_value(bound) else None
    if aval is None or aval.shape != () or not jnp.issubdtype(aval.dtype, jnp.integer):
        raise ArgumentError(
            f"filter_fori_loop({name})",
            "an integer",
            describe(bound if aval is None or is_number(bound) else aval),
        )
