"""Loops that can be differentiated backwards: `kind="checkpointed"` and `kind="bounded"`.

The derivative goes from the last step to the first, and needs the carry before each. *Checkpointed*
loops store some carries and compute the others again, from the last one that is stored before them:

- *Forward*, nobody knows how many steps will come, so every carry is stored, on a stack. Once it is
  full, the new carry replaces the first one of its lowest level, and stands a level higher; what
  follows replaces the rest of that level (after Wang, Moin and Iaccarino, 2009).
- *Backward*, the stack empties. If its last carry is more than one step away, the loop runs again
  from there, and stores carries in the free slots, at the gaps of Griewank (1992).

With `c` stored carries, and at most `(c + 1) (c + 2) / 2` steps, each step is computed at most
three times; the last time, it is differentiated.

*Bounded* loops are scans inside scans, whose untaken steps are skipped. They need no rule, so every
derivative passes through them.

Under `vmap` a loop runs until the last member has finished; a finished member keeps its carry. So
all members agree on the number of the step, and on the stack, of which nothing is ever copied.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable
from math import isqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pytreemod.errors import ArgumentError, StructureError, describe
from pytreemod.tree.predicates import is_inexact_array
from pytreemod.tree.prefixes import combine, partition
from pytreemod.tree.traces import run_again
from pytreemod.typing import PyTree, jtu, untyped_jax

Arrays = list[Any]
_lax: Any = jax.lax

_BASE = 16
_MOST = 2**31 - 1
"""No step, or no level, is higher."""


def counted_loop(
    kind: str,
    goes_on: Callable[[Arrays], Any],
    step: Callable[[Arrays], Arrays],
    init: Arrays,
    max_steps: int | None,
    checkpoints: int | None,
) -> tuple[Any, Arrays]:
    """Run a while loop of a kind; return the number of steps, and the last carry.

    Raises:
        ArgumentError: if an option is wrong.
        StructureError: if `goes_on` does not return a scalar bool.
    """

    def state_of(count: Any, carry: Arrays) -> Any:
        going = jnp.asarray(goes_on(carry))
        if going.shape or going.dtype != bool:
            fact = f"the condition of a loop is a scalar bool, not {describe(going)}"
            raise StructureError(fact)
        return going if max_steps is None else going & (count < max_steps), count, carry

    def once(state: Any) -> Any:
        _, count, carry = state
        return state_of(count + 1, step(carry))

    start = state_of(jnp.int32(0), _settled(step, init))
    if kind == "lax":
        last = _while(_is_going, once, start)
    elif kind == "checkpointed":
        last = _checkpointed(once, start, _checkpoint_count(checkpoints, max_steps))
    elif kind != "bounded":
        fact = f"the kind of a loop is 'lax', 'checkpointed' or 'bounded', not {kind!r}"
        raise ArgumentError(fact)
    elif max_steps is None:
        raise ArgumentError("a bounded loop needs a number of steps, max_steps")
    else:
        last = _bounded(once, start, max_steps)
    return last[1:]


def _checkpointed(once: Callable[[Any], Any], start: Any, size: int) -> Any:
    def no_scan(state: Any, x: Any) -> Any:
        return once(state), x

    step, captured = _hoisted(no_scan, start, ())

    def loop(captured: Arrays, start: Any, xs: Any) -> Any:
        return _while(_is_going, lambda state: step(captured, state, xs)[0], start), xs

    def recorded(captured: Arrays, start: Any, xs: Any, record: _Record) -> Any:
        def body(loop: Any) -> Any:
            i, state, record = loop
            after, _ = step(captured, state, xs)
            return i + 1, _where(_is_going(state), after, state), record.add(i, state)

        first = jnp.int32(0), start, record
        n, last, record = _while(lambda loop: _any_member(_is_going(loop[1])), body, first)
        return (last, xs), n, record

    return _with_derivative(loop, recorded, step, _is_going, size)(captured, start, ())[0]


def _bounded(once: Callable[[Any], Any], start: Any, max_steps: int) -> Any:
    def masked(state: Any) -> Any:
        # A member that has finished computes its first step again: the derivative of another one
        # could be infinite, and would turn its zeros into NaN.
        going = _is_going(state)
        return _where(going, once(_where(going, state, start)), state)

    def taken(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run_if_any(state: Any) -> Any:
            return _lax.cond(_any_member(_is_going(state)), run, _same, state)

        return run_if_any

    def repeated(run: Callable[[Any], Any], times: int) -> Callable[[Any], Any]:
        def body(state: Any, _: Any) -> Any:
            return run(state), None

        def scan(state: Any) -> Any:
            return _lax.scan(body, state, length=times)[0]

        # For the derivative, each level computes the one below again.
        return untyped_jax.checkpoint(scan)

    run, steps = taken(masked), 1
    while steps < max_steps:
        times = min(_BASE, -(-max_steps // steps))
        run, steps = taken(repeated(run, times)), steps * times
    return run(start)


def checkpointed_scan(
    step: Callable[[Arrays, Any], tuple[Arrays, PyTree]],
    init: Arrays,
    xs: Any,
    length: int,
    reverse: bool,
    checkpoints: int | None,
) -> tuple[Arrays, PyTree]:
    """`jax.lax.scan` as a checkpointed loop."""

    def turned(tree: PyTree) -> PyTree:
        return _each(lambda x: jnp.flip(x, 0), tree) if reverse else tree

    xs = turned(xs)
    size, first = _checkpoint_count(checkpoints, length), _at(xs, 0)
    init = _settled(lambda carry: step(carry, first)[0], init)
    one, captured = _hoisted(step, init, first)

    def loop(captured: Arrays, init: Arrays, xs: Any) -> Any:
        return _lax.scan(ft.partial(one, captured), init, xs, length)

    def recorded(captured: Arrays, init: Arrays, xs: Any, record: _Record) -> Any:
        def body(loop: Any, x: Any) -> Any:
            i, carry, record = loop
            after, y = one(captured, carry, x)
            return (i + 1, after, record.add(i, carry)), y

        (n, carry, record), ys = _lax.scan(body, (jnp.int32(0), init, record), xs, length)
        return (carry, ys), n, record

    carry, ys = _with_derivative(loop, recorded, one, lambda _: True, size)(captured, init, xs)
    return carry, turned(ys)


# ---- carries that are stored


class _Record(NamedTuple):
    """The carries that a forward pass stores, in the order of their steps but for the last level.

    Attributes:
        carries: arrays with a slot for each carry, and one more for the carry at work.
        steps: the step that each carry stands before.
        levels: of the carries; among those on the stack, they never rise from one to the next.
        starts: the slot in which a carry's level starts.
        next: the slot, the level and its start for the next carry. Read from the arrays before they
            are changed, they would make the compiler copy these.
    """

    carries: Any
    steps: Any
    levels: Any
    starts: Any
    next: tuple[Any, Any, Any]

    @classmethod
    def of(cls, carry: Any, size: int) -> _Record:
        """A record with slots for carries like this one."""
        carries = _each(lambda x: jnp.broadcast_to(x, (size + 1, *x.shape)), carry)
        steps = jnp.full(size + 1, _MOST, jnp.int32)
        levels = jnp.zeros(size, jnp.int32)
        # The first carry is needed to the end: it has the highest level.
        return cls(carries, steps, levels, levels, (jnp.int32(0), jnp.int32(_MOST), jnp.int32(0)))

    def add(self, step: Any, carry: Any) -> _Record:
        slot, level, start = self.next
        carries, steps = _put(self.carries, slot, carry), _put(self.steps, slot, step)
        levels, starts = _put(self.levels, slot, level), _put(self.starts, slot, start)
        is_full = slot + 1 == levels.size
        slot = jnp.where(is_full, start, slot + 1)
        level = jnp.where(is_full, level + 1, 0)
        start = jnp.where(_at(levels, slot - 1) == level, _at(starts, slot - 1), slot)
        return _Record(carries, steps, levels, starts, (slot, level, start))

    def stack(self) -> _Stack:
        """What is stored, also what would have been replaced next."""
        height = jnp.sum(self.steps < _MOST, dtype=jnp.int32)
        return _Stack(self.carries, self.steps, jnp.argsort(self.steps), height)


class _Stack(NamedTuple):
    """Stored carries, of which a backward pass takes the last one, and stores others.

    Attributes:
        carries: arrays with a slot for each carry, and one more for the carry at work.
        steps: the step that each carry stands before.
        order: the slots, from the bottom of the stack, and then the free ones.
        height: how many carries there are.
    """

    carries: Any
    steps: Any
    order: Any
    height: Any

    def top(self) -> tuple[Any, Any]:
        slot = _at(self.order, self.height - 1)
        return _at(self.steps, slot), _at(self.carries, slot)

    def push(self, step: Any, carry: Any) -> _Stack:
        slot = _at(self.order, self.height)
        carries, steps = _put(self.carries, slot, carry), _put(self.steps, slot, step)
        return _Stack(carries, steps, self.order, self.height + 1)

    def pop(self) -> _Stack:
        return self._replace(height=self.height - 1)


def _gap(length: Any, free: Any) -> Any:
    """How far to run before a carry is stored, if the next `length` steps are to be gone back.

    With `free` slots, `r` runs over each step are enough for `binomial(free + r, r)` of them.
    """
    limit, free = length - 1, free.astype(jnp.float32)
    length = length.astype(jnp.float32)

    def is_short(state: Any) -> Any:
        _, reach = state
        return (reach < length) & (free > 0)

    def more(state: Any) -> Any:
        r, reach = state
        return r + 1, reach * (free + r + 1) / (r + 1)

    r, _ = _while(is_short, more, (jnp.float32(1), free + 1))
    gap = jnp.ceil(length * (r / (free + r))).astype(jnp.int32)
    return jnp.clip(gap, 1, limit)


# ---- the derivative


def _with_derivative(
    loop: Any, recorded: Any, step: Any, is_on: Callable[[Any], Any], size: int
) -> Any:
    """Return a function of `(captured, init, xs)`, which returns `(carry, ys)`.

    Args:
        loop: this function, without a derivative.
        recorded: the same, from these and a record: returns also the number of steps, and the
            record.
        step: from `(captured, carry, x)` to the next carry and `y`.
        is_on: whether a step changes this carry.
        size: the number of carries to store, with the first.
    """

    def forward(*primals: Any) -> Any:
        # JAX may pass numbers of Python.
        captured, init, xs = args = _each(lambda x: jnp.asarray(x.value), primals)
        is_varied = jtu.tree_map(_is_varied, args, primals)
        out, n, record = recorded(*args, _Record.of(init, size))
        return out, (partition((captured, xs), is_varied[::2]), n, record.stack())

    def backward(saved: Any, cotangents: Any) -> Any:
        (varied, (fixed, fixed_xs)), n, stack = saved
        d_carry, d_ys = _each(_cotangent, cotangents)

        def at(i: Any, varied: Any, carry: Any) -> Any:
            """Compute a step from what is varied, and its carry."""
            captured, x = varied
            return step(combine(captured, fixed), carry, combine(x, _at(fixed_xs, i)))

        def varied_at(i: Any) -> Any:
            return varied[0], _at(varied[1], i)

        def advance(i: Any, carry: Any) -> Any:
            after, _ = at(i, varied_at(i), carry)
            return _where(is_on(carry), after, carry)

        def go_back(state: Any) -> Any:
            """Take a step back, from its cotangent to those of its arguments."""
            t, near, stack, (d_captured, d_xs), d_carry = state

            def fill(state: Any) -> Any:
                (i, carry), stack = state
                free = stack.order.size - 1 - stack.height
                to = i + _gap(t - i, free)
                carry = _lax.fori_loop(i, to, advance, carry)
                return (to, carry), stack.push(to, carry)

            (i, carry), stack = _while(lambda s: s[0][0] < t - 1, fill, (near, stack))
            floats, others = partition(carry, is_inexact_array)

            def of_floats(varied: Any, floats: Any) -> Any:
                return partition(at(i, varied, combine(floats, others)), is_inexact_array)[0]

            _, pull = untyped_jax.vjp(of_floats, varied_at(i), floats)
            (d_own, d_x), d_before = pull((d_carry, _at(d_ys, i)))
            d_captured = _where(is_on(carry), jtu.tree_map(jnp.add, d_captured, d_own), d_captured)
            d_carry, stack = _where(is_on(carry), d_before, d_carry), stack.pop()
            return t - 1, stack.top(), stack, (d_captured, _put(d_xs, i, d_x)), d_carry

        start = n, stack.top(), stack, _each(untyped_jax.numpy.zeros_like, varied), d_carry
        *_, (d_captured, d_xs), d_carry = _while(lambda state: state[0] > 0, go_back, start)
        return d_captured, d_carry, d_xs

    made = untyped_jax.custom_vjp(loop)
    made.defvjp(forward, backward, symbolic_zeros=True)
    return made


def _is_varied(x: Any, primal: Any) -> bool:
    return primal.perturbed and is_inexact_array(x)


def _cotangent(x: Any) -> Any:
    if x.dtype == jax.dtypes.float0:
        return None
    is_zero = isinstance(x, jax.custom_derivatives.SymbolicZero)
    return _lax.full(x.shape, 0, x.dtype) if is_zero else x


# ---- functions of arrays


def _checkpoint_count(given: int | None, steps: int | None) -> int:
    """How many carries to store, with the first: by default for three times each of `steps`."""
    if given is None:
        return 1 + isqrt(2 * (5000 if steps is None else steps))
    if given < 1:
        raise ArgumentError(f"checkpoints is at least 1, not {given}")
    return 1 + given


def _settled(step: Callable[[Arrays], Any], init: Arrays) -> Arrays:
    """The first carry as arrays, where a weak one takes the dtype that the step returns."""
    kinds = [x.dtype for x in jax.eval_shape(step, init)]
    arrays: Arrays = [untyped_jax.numpy.asarray(x) for x in init]
    return [x if x.dtype == k else x.astype(k) for x, k in zip(arrays, kinds, strict=True)]


def _hoisted(fn: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Arrays]:
    """A function that takes the arrays it captured as its first argument; and these arrays."""
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    treedef = jtu.tree_structure(shapes)

    def run(captured: Arrays, *args: Any) -> Any:
        return treedef.unflatten(run_again(closed.jaxpr, captured, jtu.tree_leaves(args)))

    return run, list(closed.consts)


def _is_going(state: Any) -> Any:
    return state[0]


def _same(state: Any) -> Any:
    return state


@custom_vmap
def _any_member(going: Any) -> Any:
    """Whether any member of all `vmap`s around goes on."""
    return going


@_any_member.def_vmap  # pyright: ignore
def _of_members(_: int, __: Any, going: Any) -> tuple[Any, bool]:
    return _any_member(jnp.any(going, axis=0)), False


def _where(flag: Any, new: PyTree, old: PyTree) -> PyTree:
    return jtu.tree_map(ft.partial(jnp.where, flag), new, old)


def _at(tree: PyTree, i: Any) -> PyTree:
    return _each(lambda x: _lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _put(tree: PyTree, i: Any, values: PyTree) -> PyTree:
    def put(x: Any, value: Any) -> Any:
        return _lax.dynamic_update_index_in_dim(x, value, i, 0)

    return jtu.tree_map(put, tree, values)


def _each(fn: Callable[[Any], Any], tree: PyTree) -> PyTree:
    return jtu.tree_map(fn, tree)


def _while(test: Callable[[Any], Any], body: Callable[[Any], Any], start: Any) -> Any:
    return _lax.while_loop(test, body, start)
