"""The example of a neural differential equation: its data, its solver, and that it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.integrate import solve_ivp

import pytreemod as pm

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

pytest.importorskip("diffrax", reason="examples/neural_ode.py solves by diffrax")
pytest.importorskip("tqdm", reason="examples/neural_ode.py shows tqdm's progress bar")


def test_the_cell_fires_as_regularly_as_it_says(program):
    """Every 144 samples in the predicted part."""
    voltage = program.load_data()
    assert voltage.shape == (12_000,)
    apart = np.diff(program.spikes(voltage[5000:6944]))
    assert abs(apart.mean() - 144) < 1
    assert apart.std() < 10


@pytest.mark.slow
def test_the_equation_is_solved(program):
    """SciPy's solver, given the same rate, comes to the same path."""
    model = program.Neuron(2, width=8, key=jax.random.key(0))
    past = jnp.asarray(program.load_data()[None, 2000 : 2000 + program.PAST])
    times = program.times_of(program.after(40))
    path = np.asarray(model(past, times))[:, 0]
    rate = jax.jit(lambda y: model.rate(0.0, y, None))
    begin = np.concatenate([past[0, -1:], model.encoder(past[0, ::2])])
    exact = solve_ivp(
        lambda _, y: np.asarray(rate(jnp.asarray(y, jnp.float32))),
        (0.0, float(times[-1])),
        begin,
        t_eval=np.asarray(times, float),
        rtol=1e-6,
        atol=1e-6,
    )
    np.testing.assert_allclose(path, exact.y.T, atol=1e-2)


@pytest.mark.slow
def test_it_learns(program, tmp_path):
    """After a few steps, the prediction is better than at the beginning."""
    voltage, offsets = program.load_data(), program.after(40)
    starts = np.arange(2000, 3000, 50)
    future = jnp.asarray(voltage[starts[:, None] + offsets])
    past, times = jnp.asarray(program.pasts(voltage, starts)), program.times_of(offsets)
    model = program.Neuron(2, width=16, key=jax.random.key(0))
    opt, losses = pm.Optimizer(optax.adam(1e-2)).init(model), []
    for _ in range(40):
        model, opt, loss = program.step(model, opt, past, future, times)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    program.plot(voltage, np.zeros((len(program.after(program.ALONE)), 2)), tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 10_000
