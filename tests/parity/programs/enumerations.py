"""Enumerations: subclasses, promotion, where, traced results, messages by index, in carries."""

import equinox as eqx
import jax
import jax.numpy as jnp


class Result(eqx.Enumeration):
    success = ""
    diverged = "The iteration diverged."


class SolverResult(Result):
    stalled = "No progress was made."


class Solver(eqx.Module):
    rate: jax.Array
    result: SolverResult = eqx.field(default_factory=lambda: SolverResult.success)

    def step(self, x):
        new = x - self.rate * jnp.sin(x)
        result = SolverResult.where(
            jnp.abs(new) > 5,
            SolverResult.promote(Result.diverged),
            SolverResult.where(jnp.abs(new - x) < 1e-3, SolverResult.stalled, self.result),
        )
        return new, eqx.tree_at(lambda s: s.result, self, result)


@eqx.filter_jit
def run(rate, x):
    def body(carry, _):
        x, solver = carry
        return solver.step(x), None

    (x, solver), _ = jax.lax.scan(body, (x, Solver(rate)), None, length=3)
    return x, solver.result


def main():
    out = []
    for rate, start in [(0.5, 1.0), (-9.0, 1.5), (0.5, 0.0)]:
        x, result = run(jnp.array(rate), jnp.array(start))
        flags = [
            bool(result == item)
            for item in (SolverResult.success, SolverResult.diverged, SolverResult.stalled)
        ]
        out.append((x, flags, SolverResult[result]))
    xs, results = jax.vmap(run, in_axes=(None, 0))(jnp.array(0.5), jnp.array([1.0, 0.0]))
    batched = results == SolverResult.stalled, results != SolverResult.success
    try:
        bool(Result.success == 0)
    except ValueError:
        mixed = "refused"
    else:
        mixed = "allowed"
    try:
        Result.where(True, Result.success, SolverResult.stalled)
    except ValueError:
        foreign = True
    return (
        out,
        xs,
        batched,
        mixed,
        foreign,
        len(SolverResult),
        Result[Result.success],
        issubclass(SolverResult, Result),
    )
