"""Linear solves: the documented ways to write them with lineax."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx

A = jnp.array([[2.0, 1.0], [1.0, 3.0]])
B = jnp.array([1.0, 2.0])
POSITIVE = lx.MatrixLinearOperator(A, lx.positive_semidefinite_tag)


def direct():
    solvers = (lx.AutoLinearSolver(well_posed=True), lx.LU(), lx.QR(), lx.SVD(), lx.Cholesky())
    values = [lx.linear_solve(POSITIVE, B, solver).value for solver in solvers]
    banded = lx.TridiagonalLinearOperator(jnp.full(3, 4.0), jnp.ones(2), jnp.ones(2))
    values.append(lx.linear_solve(lx.DiagonalLinearOperator(B), B).value)
    return (values, lx.linear_solve(banded, jnp.arange(3.0)).value)


def iterative():
    solvers = (lx.CG(1e-6, 1e-6), lx.GMRES(1e-6, 1e-6), lx.BiCGStab(1e-6, 1e-6))
    solutions = [lx.linear_solve(POSITIVE, B, solver) for solver in solvers]
    return [(s.value, s.stats["num_steps"], lx.RESULTS[s.result]) for s in solutions]


def jacobian():
    fn = lambda y, args: jnp.stack([y[0] ** 2 + y[1], args * y[1] ** 3])
    operator = lx.JacobianLinearOperator(fn, B, 2.0)
    normal = (operator.T @ operator).as_matrix()
    sums = (2 * operator + operator).mv(B), lx.linearise(operator).mv(B)
    return lx.linear_solve(operator, B).value, normal, sums, lx.is_symmetric(operator)


def tree_valued():
    struct = jax.eval_shape(lambda: {"a": B, "b": B})
    operator = lx.FunctionLinearOperator(lambda x: {"a": x["b"], "b": 2 * x["a"]}, struct)
    return lx.linear_solve(operator, {"a": B, "b": 2 * B}, lx.GMRES(1e-6, 1e-6)).value


def derivatives():
    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(operator):
        return jnp.sum(lx.linear_solve(operator, B, lx.CG(1e-6, 1e-6)).value)

    tall = jnp.arange(6.0).reshape(3, 2)
    least = lx.AutoLinearSolver(well_posed=None)
    squares = lambda m: jnp.sum(
        lx.linear_solve(lx.MatrixLinearOperator(m), jnp.ones(3), least).value
    )
    batch = jax.vmap(lambda b: lx.linear_solve(POSITIVE, b).value)(jnp.eye(2))
    value, gradient = loss(POSITIVE)
    return value, gradient.matrix, jax.grad(squares)(tall), batch


def reused_state():
    state = jax.lax.stop_gradient(lx.LU().init(POSITIVE, {}))
    return lx.linear_solve(POSITIVE, B, lx.LU(), state=state).value


def singular():
    try:
        lx.linear_solve(lx.MatrixLinearOperator(jnp.zeros((2, 2))), B)
    except eqx.EquinoxRuntimeError as error:
        return "non-finite" in str(error)


USES = (direct, iterative, jacobian, tree_valued, derivatives, reused_state, singular)


def main():
    return {use.__name__: use() for use in USES}
