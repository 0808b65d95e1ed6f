"""Roots, fixed points, least squares and minima: the documented ways to find them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import optimistix as optx

TOLERANCE = (1e-5, 1e-5)


def roots():
    fn = lambda y, args: y - jnp.tanh(y * args + 1)
    solvers = (optx.Newton, optx.Chord, optx.Dogleg, optx.LevenbergMarquardt)
    solutions = [
        optx.root_find(fn, solver(*TOLERANCE), jnp.array([0.0, 1.0]), jnp.array(0.5))
        for solver in solvers
    ]
    implicit = jax.grad(
        lambda a: optx.root_find(fn, optx.Newton(*TOLERANCE), jnp.array(0.0), a).value
    )
    square = lambda y, args: y**2 - 2
    between = {"lower": 0.0, "upper": 2.0}
    bisected = optx.root_find(square, optx.Bisection(*TOLERANCE), 1.0, options=between)
    return [(s.value, optx.RESULTS[s.result]) for s in solutions], implicit(0.5), bisected.value


def fixed_point():
    solver = optx.FixedPointIteration(*TOLERANCE)
    return optx.fixed_point(lambda y, _: jnp.cos(y), solver, jnp.array(1.0)).value


class Decay(eqx.Module):
    height: jax.Array
    rate: jax.Array

    def __call__(self, x):
        return self.height * jnp.exp(-self.rate * x)


def least_squares():
    xs = jnp.linspace(0.0, 1.0, 5)
    residual = lambda model, xs: jax.vmap(model)(xs) - 2 * jnp.exp(-xs)
    start = Decay(jnp.array(1.0), jnp.array(0.5))
    solutions = [
        optx.least_squares(residual, solver(*TOLERANCE), start, xs)
        for solver in (optx.LevenbergMarquardt, optx.GaussNewton, optx.Dogleg)
    ]
    return [(s.value.height, s.value.rate, s.stats["num_steps"]) for s in solutions]


def rosenbrock(y, args):
    return (1 - y[0]) ** 2 + 5 * (y[1] - y[0] ** 2) ** 2


def minima():
    solvers = (
        optx.BFGS(*TOLERANCE),
        optx.LBFGS(*TOLERANCE),
        optx.NelderMead(*TOLERANCE),
        optx.GradientDescent(0.02, *TOLERANCE),
        optx.OptaxMinimiser(optax.adam(0.1), *TOLERANCE),
    )
    start, options = jnp.array([0.5, 0.5]), {"max_steps": 100, "throw": False}
    return [
        (solution.value, optx.RESULTS[solution.result])
        for solution in (optx.minimise(rosenbrock, solver, start, **options) for solver in solvers)
    ]


def step_by_step():
    solver, y, tags = optx.BFGS(*TOLERANCE), jnp.array([0.5, 0.5]), frozenset()
    fn = eqx.filter_closure_convert(lambda y, args: (rosenbrock(y, args), None), y, None)
    struct = jax.ShapeDtypeStruct((), jnp.float32)
    state = solver.init(fn, y, None, {}, struct, None, tags)
    step = eqx.filter_jit(eqx.Partial(solver.step, fn=fn, args=None, options={}, tags=tags))
    for _ in range(3):
        y, state, _ = step(y=y, state=state)
    done, result = solver.terminate(fn=fn, y=y, args=None, options={}, state=state, tags=tags)
    return y, done, optx.RESULTS[result]


USES = (roots, fixed_point, least_squares, minima, step_by_step)


def main():
    return {use.__name__: use() for use in USES}
