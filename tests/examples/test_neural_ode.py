"""The example of a neural differential equation: its data, its solver, and that it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.integrate import solve_ivp

import pytreemod as pm
from tests.helpers.examples import example

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

pytest.importorskip("diffrax", reason="examples/neural_ode.py solves by diffrax")
pytest.importorskip("tqdm", reason="examples/neural_ode.py shows tqdm's progress bar")


@pytest.fixture(scope="module")
def ode():
    """The example as a module."""
    with example("neural_ode") as module:
        yield module


@pytest.fixture(autouse=True)
def usual_promotion():
    """JAX as a user finds it: diffrax and optax mix dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_the_cell_fires_as_regularly_as_it_says(ode):
    """Every 144 samples in what is to be foretold."""
    voltage = ode.load_data()
    assert voltage.shape == (12_000,)
    apart = np.diff(ode.spikes(voltage[5000:6944]))
    assert abs(apart.mean() - 144) < 1
    assert apart.std() < 10


@pytest.mark.slow
def test_the_equation_is_solved(ode):
    """SciPy's solver, given the same rate, comes to the same path."""
    model = ode.Neuron(2, width=8, key=jax.random.key(0))
    past = jnp.asarray(ode.load_data()[None, 2000 : 2000 + ode.PAST])
    times = ode.times_of(ode.after(40))
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
def test_it_learns(ode, tmp_path):
    """A few steps: what comes next is foretold better than at the beginning."""
    voltage, offsets = ode.load_data(), ode.after(40)
    starts = np.arange(2000, 3000, 50)
    future = jnp.asarray(voltage[starts[:, None] + offsets])
    past, times = jnp.asarray(ode.pasts(voltage, starts)), ode.times_of(offsets)
    model = ode.Neuron(2, width=16, key=jax.random.key(0))
    opt, losses = pm.Optimizer(optax.adam(1e-2)).init(model), []
    for _ in range(40):
        model, opt, loss = ode.step(model, opt, past, future, times)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    ode.plot(voltage, np.zeros((len(ode.after(ode.ALONE)), 2)), tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 10_000
