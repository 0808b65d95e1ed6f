"""The Gaussian process learns, never leaves its bounds, and agrees with scikit-learn's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

pytest.importorskip("sklearn", reason="examples/gaussian_process.py reads scikit-learn's data")


@pytest.fixture(scope="module")
def short_run(program):
    """One run of the command, at a rate at which parameters without bounds would turn negative."""
    return program.main(["--steps", "20", "--patients", "80", "--rate", "0.5"])


def theirs(model, data):
    """scikit-learn's process with our scales, which it does not fit."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    amplitude, noise = float(model.kernel.amplitude), float(model.noise)
    lengths = np.asarray(model.kernel.lengths, np.float64)
    kernel = ConstantKernel(amplitude**2) * RBF(lengths) + WhiteKernel(noise**2)
    regressor = GaussianProcessRegressor(kernel, alpha=0.0, optimizer=None)
    return regressor.fit(data.inputs.astype(np.float64), data.outputs.astype(np.float64))


def test_it_learns(short_run):
    """The data get more likely, and others are predicted better than by their mean."""
    result = short_run

    assert result.likelihoods[-1] > result.likelihoods[0] + 0.02
    assert result.error < 0.95
    assert 0.8 < result.coverage <= 1


def test_the_likelihood_is_that_of_scikit_learn(program, short_run):
    """And the predictions, with their deviations."""
    model, data = short_run.model, program.load_data(0, 80)
    regressor = theirs(model, data)
    seen = jnp.asarray(data.inputs), jnp.asarray(data.outputs)

    likelihood = float(jax.jit(lambda m: m.log_likelihood(*seen))(model))
    mean, deviation = jax.jit(lambda m, x: m.predict(*seen, x))(model, data.new_inputs)

    expected = regressor.predict(data.new_inputs.astype(np.float64), return_std=True)
    assert likelihood == pytest.approx(regressor.log_marginal_likelihood_value_, rel=1e-4)
    np.testing.assert_allclose(mean, expected[0], atol=1e-4)
    np.testing.assert_allclose(deviation, expected[1], rtol=1e-3)
