"""The example of a neural differential equation learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

pytest.importorskip("diffrax", reason="examples/neural_ode.py solves by diffrax")
pytest.importorskip("tqdm", reason="examples/neural_ode.py shows tqdm's progress bar")


def test_it_learns(program):
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
