"""Loops with a condition or a counter: `filter_while_loop` and `filter_fori_loop`."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, describe
from pytreemod.transform.boundary.sowing import (
    Collected,
    Label,
    add_collected,
    call_tracked,
    collect_from_step,
    collects_checks,
)
from pytreemod.transform.boundary.wrapping import check_callable, function_name
from pytreemod.transform.compilation.weak_functions import Parts, cached, functions
from pytreemod.transform.control_flow.carries import returned
from pytreemod.transform.control_flow.refusals import refuse_unroll
from pytreemod.transform.host.failures import raises_checks
from pytreemod.tree.differences import aval_of, is_number, is_value
from pytreemod.tree.effects import TracedSteps

_Carry = TypeVar("_Carry")

_lax: Any = jax.lax
_config: Any = jax.config


@raises_checks
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
        ArgumentError: if a function is not callable, or `cond_fun` returns no scalar bool.
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
    fns, carry = functions([cond_fun, body_fun]), Parts(init_val, is_value)
    fns_of, structure_of = fns.weakly(), carry.weakly()
    names = function_name(cond_fun), function_name(body_fun)

    def ask(own: Any, values: Any, call: _Call) -> Any:
        cond_fun, _ = fns_of().assemble(own)
        return _as_condition(names[0], call(cond_fun, structure_of().assemble(values)))

    def move(own: Any, values: Any, call: _Call) -> Any:
        structure = structure_of()
        _, body_fun = fns_of().assemble(own)
        after = call(body_fun, structure.assemble(values))
        where = f"filter_while_loop of {names[1]}"
        return returned(where, "val", structure, values, after)

    def make() -> tuple[Any, Any, TracedSteps]:
        traced = TracedSteps()

        def goes_on(state: Any) -> Any:
            with traced.tracing(*state):
                return ask(state[0], state[1], _call)

        def step(state: Any) -> Any:
            with traced.tracing(*state):
                return state[0], move(state[0], state[1], _call)

        return goes_on, step, traced

    state = (fns.values, carry.values)
    if collects_checks() and not _config.jax_disable_jit:
        return carry.structure.assemble(_loop_with_checks(ask, move, state))
    *made, traced = cached(("filter_while_loop", names), fns, [carry], make)
    # The arrays of the functions are carried: captured ones would be constants of a cached program.
    _, values = _lax.while_loop(*made, state)
    traced.record(*state)
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
        body_fun: returns the next value, from `i` and the value. Static values must be unchanged;
            Python numbers count as arrays, as in `jax.lax.fori_loop`.
        init_val: the first value.
        unroll: as for `jax.lax.fori_loop`.

    Returns:
        The last value.

    Raises:
        ArgumentError: if `body_fun` is not callable, or a bound is not an integer.
        StructureError: if the value changes in structure, shape, dtype, or static values; the
            error shows before and after by path.

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

    def move(i: Any, own: Any, values: Any, call: _Call) -> Any:
        structure = structure_of()
        (body_fun,) = fns_of().assemble(own)
        after = call(body_fun, i, structure.assemble(values))
        return returned(where, "val", structure, values, after)

    def make() -> tuple[Any, TracedSteps]:
        traced = TracedSteps()

        def step(i: Any, state: Any) -> Any:
            with traced.tracing(*state):
                return state[0], move(i, state[0], state[1], _call)

        return step, traced

    state = (fns.values, carry.values)
    if collects_checks() and not _config.jax_disable_jit:
        moved = ft.partial(move, lower)
        codes = _Codes.of(moved, state)

        def step_with_checks(i: Any, state: Any) -> Any:
            own, values, found = state
            after, found = codes.collect(ft.partial(move, i), found, own, values)
            return own, after, found

        made, state = step_with_checks, (*state, codes.zeros)
        _, values, found = _lax.fori_loop(lower, upper, made, state, unroll=unroll)
        codes.note(found)
        return carry.structure.assemble(values)
    step, traced = cached((where,), fns, [carry], make)
    _, values = _lax.fori_loop(lower, upper, step, state, unroll=unroll)
    traced.record(*state)
    return carry.structure.assemble(values)


_Call = Callable[..., Any]


def _call(fn: Callable[..., Any], *args: Any) -> Any:
    return call_tracked(fn, args, {})


def _loop_with_checks(ask: Callable[..., Any], move: Callable[..., Any], state: Any) -> Any:
    """Return a `while` loop that returns its checks: their records are carried.

    Args:
        ask: returns whether to go on, for `state` and a function that calls functions.
        move: returns the next values, for the same.
        state: the first state of the loop.
    """

    # A condition returns no checks, so it is evaluated at the end of each step.
    def step(own: Any, values: Any, call: _Call) -> Any:
        after = move(own, values, call)
        return after, ask(own, after, call)

    codes = _Codes.of(step, state)

    def run(state: Any) -> Any:
        own, values, _, found = state
        (after, goes_on), found = codes.collect(step, found, own, values)
        return own, after, goes_on, found

    def is_on(state: Any) -> Any:
        return state[2]

    begin = (*state, ask(*state, _call), codes.zeros)
    _, values, _, found = _lax.while_loop(is_on, run, begin)
    codes.note(found)
    return values


class _Codes:
    """The records of the checks in a step, to be carried: the first failure of each."""

    def __init__(self, labels: Sequence[Label], zeros: list[Any]):
        self.labels = labels
        self.zeros = zeros

    @classmethod
    def of(cls, step: Callable[..., Any], state: Any) -> _Codes:
        """Return the records of a step, which is traced to find them.

        Args:
            step: a function of `state` and of a function that calls functions.
            state: the state for the step.
        """
        labels: list[Label] = []

        def run(state: Any) -> Any:
            after, collected = _collect(step, state)
            labels[:] = collected.labels
            return after, collected.values

        _, codes = jax.eval_shape(run, state)
        return cls(labels, [jnp.zeros(code.shape, code.dtype) for code in codes])

    def collect(self, step: Callable[..., Any], found: Any, *state: Any) -> Any:
        """Return the result of a step, with the records up to this step."""
        after, collected = _collect(step, state)
        pairs = zip(found, collected.values, strict=True)
        return after, [jnp.where(old == 0, new, old) for old, new in pairs]

    def note(self, found: Any) -> None:
        """Record, outside the loop, the failures of the checks inside."""
        add_collected(Collected(self.labels, found))


def _collect(step: Callable[..., Any], state: Any) -> tuple[Any, Collected]:
    return collect_from_step(lambda: step(*state, _call))


def _as_condition(name: str, value: Any) -> Any:
    if is_value(value):
        aval = aval_of(value)
        if aval.shape == () and aval.dtype == bool:
            return value
    raise ArgumentError(
        f"filter_while_loop(cond_fun) of {name}",
        "a scalar bool",
        describe(aval_of(value)) if is_value(value) else describe(value),
        hint=["compare, and reduce the arrays:", "return jnp.any(error > 1e-3)"],
    )


def _refuse_bound(name: str, bound: Any) -> None:
    aval = aval_of(bound) if is_value(bound) else None
    if aval is None or aval.shape != () or not jnp.issubdtype(aval.dtype, jnp.integer):
        raise ArgumentError(
            f"filter_fori_loop({name})",
            "an integer",
            describe(bound if aval is None or is_number(bound) else aval),
        )
