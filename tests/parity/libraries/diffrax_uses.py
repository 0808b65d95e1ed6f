"""Differential equations: the documented ways to solve them with diffrax."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import optimistix as optx

ADAPTIVE = diffrax.PIDController(rtol=1e-4, atol=1e-5)
Y0 = jnp.array([1.0, 2.0])


def decay(t, y, args):
    return -args * y


def solve(term=decay, solver=None, *, y0=Y0, **options):
    term = diffrax.ODETerm(term) if callable(term) else term
    options = {"args": 0.5, **options}
    return diffrax.diffeqsolve(term, solver or diffrax.Tsit5(), 0.0, 1.0, 0.25, y0, **options)


def adaptive_steps():
    saveat = diffrax.SaveAt(ts=jnp.linspace(0.0, 1.0, 4))
    solution = solve(saveat=saveat, stepsize_controller=ADAPTIVE)
    return solution.ts, solution.ys, solution.stats, diffrax.RESULTS[solution.result]


def dense_output():
    solution = solve(saveat=diffrax.SaveAt(dense=True))
    return solution.evaluate(0.33), solution.derivative(0.2)


def several_outputs():
    norm = diffrax.SubSaveAt(ts=jnp.array([0.25, 0.5]), fn=lambda t, y, args: jnp.linalg.norm(y))
    return solve(saveat=diffrax.SaveAt(subs={"end": diffrax.SubSaveAt(t1=True), "n": norm})).ys


def stiff():
    def van_der_pol(t, y, args):
        position, velocity = y
        return velocity, 10 * (1 - position**2) * velocity - position

    y0 = (jnp.array(2.0), jnp.array(0.0))
    solution = solve(van_der_pol, diffrax.Kvaerno3(), y0=y0, stepsize_controller=ADAPTIVE)
    return solution.ys, solution.stats


def neural():
    net = eqx.nn.MLP(2, 2, 4, 1, activation=jnp.tanh, key=jr.PRNGKey(0))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(net):
        return jnp.sum(solve(lambda t, y, args: net(y), diffrax.Heun()).ys ** 2)

    value, gradient = loss(net)
    return value, jax.tree.leaves(eqx.filter(gradient, eqx.is_array))


def adjoints():
    def loss(rate, adjoint):
        return jnp.sum(solve(args=rate, adjoint=adjoint).ys ** 2)

    backward = jax.grad(loss)(0.5, diffrax.BacksolveAdjoint())
    return backward, jax.jacfwd(loss)(0.5, diffrax.ForwardMode())


def stochastic():
    noise = diffrax.VirtualBrownianTree(0.0, 1.0, tol=0.1, shape=(2,), key=jr.PRNGKey(0))
    diffusion = lambda t, y, args: lx.DiagonalLinearOperator(0.1 * jnp.ones(2))
    terms = diffrax.MultiTerm(diffrax.ODETerm(decay), diffrax.ControlTerm(diffusion, noise))
    return solve(terms, diffrax.Euler(), saveat=diffrax.SaveAt(steps=True), max_steps=8).ys


def event():
    fall = lambda t, y, args: jnp.stack([y[1], -9.8 + 0 * y[0]])
    hit = diffrax.Event(lambda t, y, args, **kwargs: y[0], optx.Newton(1e-5, 1e-5))
    y0 = jnp.array([1.0, 0.0])
    solution = solve(fall, y0=y0, event=hit, stepsize_controller=ADAPTIVE)
    return solution.ts, solution.ys, diffrax.RESULTS[solution.result]


def failure():
    result = solve(max_steps=2, throw=False).result
    try:
        solve(max_steps=2)
    except eqx.EquinoxRuntimeError as error:
        return diffrax.RESULTS[result], "maximum number of" in str(error)


def batches():
    return jax.vmap(lambda y: solve(y0=y, stepsize_controller=ADAPTIVE).ys)(jnp.ones((3, 2)))


USES = (
    adaptive_steps,
    dense_output,
    several_outputs,
    stiff,
    neural,
    adjoints,
    stochastic,
    event,
    failure,
    batches,
)


def main():
    return {use.__name__: use() for use in USES}
