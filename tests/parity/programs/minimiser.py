"""A minimiser in the style of a solver library: Generic state, results as an enumeration, aux."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

Y = TypeVar("Y")
SolverState = TypeVar("SolverState")


class RESULTS(eqx.Enumeration):
    successful = "The solver was successful."
    max_steps = "The maximum number of steps was reached."


class Solution(eqx.Module):
    value: Any
    aux: Any
    stats: dict[str, Any]
    result: RESULTS
    state: Any


class AbstractMinimiser(eqx.Module, Generic[Y, SolverState]):
    rtol: eqx.AbstractVar[float]

    def init(self, fn, y, aux_struct) -> SolverState:
        raise NotImplementedError

    def step(self, fn, y, state): ...


class MomentumState(eqx.Module, Generic[Y]):
    velocity: Y
    size: jax.Array
    aux: Any


class Momentum(AbstractMinimiser[Y, MomentumState[Y]]):
    rtol: float
    learning_rate: float = 0.1
    decay: Callable[[jax.Array], jax.Array] = eqx.field(static=True, default=lambda n: 0.9)

    def init(self, fn, y, aux_struct):
        aux = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), aux_struct)
        return MomentumState(jax.tree.map(jnp.zeros_like, y), jnp.array(jnp.inf), aux)

    def step(self, fn, y, state):
        (_, aux), grad = eqx.filter_value_and_grad(fn, has_aux=True)(y)
        velocity = jax.tree.map(
            lambda v, g: self.decay(0) * v - self.learning_rate * g, state.velocity, grad
        )
        size = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grad)))
        return eqx.apply_updates(y, velocity), MomentumState(velocity, size, aux)


@eqx.filter_jit
def minimise(fn, solver, y0, max_steps=20):
    fn = eqx.filter_closure_convert(fn, y0)
    _, aux_struct = eqx.filter_eval_shape(fn, y0)
    state = solver.init(fn, y0, aux_struct)

    def cond(carry):
        n, _, state = carry
        return (n < max_steps) & (state.size > solver.rtol)

    def body(carry):
        n, y, state = carry
        return n + 1, *solver.step(fn, y, state)

    n, y, state = jax.lax.while_loop(cond, body, (jnp.array(0), y0, state))
    result = RESULTS.where(n == max_steps, RESULTS.max_steps, RESULTS.successful)
    return Solution(y, state.aux, {"num_steps": n}, result, state)


def main():
    shift = jnp.array([1.0, 2.0])

    def fn(y):
        return jnp.sum((y["a"] - shift) ** 2) + y["b"] ** 2, {"b": y["b"]}

    y0 = {"a": jnp.zeros(2), "b": jnp.array(1.0)}
    solution = minimise(fn, Momentum(1e-3), y0)
    early = minimise(fn, Momentum[dict](rtol=10.0, learning_rate=0.01), y0)
    told = [RESULTS[s.result] for s in (solution, early)]
    return solution.value, solution.aux, solution.stats, solution.state, early.stats, told
