"""The Gaussian process learns, never leaves its bounds, and agrees with scikit-learn's."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

pytest.importorskip("sklearn", reason="examples/gaussian_process.py reads scikit-learn's data")


@pytest.fixture(scope="module")
def short_run(program):
    """One run of the command: its output, and its result."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        # At a rate at which parameters without bounds would turn negative.
        result = program.main(["--steps", "20", "--patients", "80", "--rate", "0.5"])
    return printed.getvalue(), result


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
    printed, result = short_run

    assert result.likelihoods[-1] > result.likelihoods[0] + 0.02
    assert result.error < 0.95
    assert 0.8 < result.coverage <= 1
    assert f"test error {result.error:.3f} of the spread\n" in printed


def test_what_was_learned_is_printed_in_the_clear(short_run):
    """The shortest length first."""
    printed, (model, *_) = short_run
    lengths = np.asarray(model.kernel.lengths)

    lines = [line.split() for line in printed.splitlines() if line.startswith("  ")]
    assert [float(number) for _, number in lines] == pytest.approx(sorted(lengths), abs=0.01)
    assert f"noise {float(model.noise):.3f}\n" in printed
    assert "lengths=positive(f32[10])" in repr(model)


def test_the_likelihood_is_that_of_scikit_learn(program, short_run):
    """And the predictions, with their deviations."""
    model, data = short_run[1].model, program.load_data(0, 80)
    regressor = theirs(model, data)
    seen = jnp.asarray(data.inputs), jnp.asarray(data.outputs)

    likelihood = float(jax.jit(lambda m: m.log_likelihood(*seen))(model))
    mean, deviation = jax.jit(lambda m, x: m.predict(*seen, x))(model, data.new_inputs)

    expected = regressor.predict(data.new_inputs.astype(np.float64), return_std=True)
    assert likelihood == pytest.approx(regressor.log_marginal_likelihood_value_, rel=1e-4)
    np.testing.assert_allclose(mean, expected[0], atol=1e-4)
    np.testing.assert_allclose(deviation, expected[1], rtol=1e-3)


def test_every_scale_is_positive_and_free_below(program, short_run):
    """The optimizer's parameters have no bounds; some of them are negative."""
    leaves = pm.named_leaves(short_run[1].model)

    assert set(leaves) == {
        "kernel.lengths.unconstrained",
        "kernel.amplitude.unconstrained",
        "noise.unconstrained",
    }
    assert min(float(leaf.min()) for leaf in leaves.values()) < 0
    with pytest.raises(ValueError, match=r"GaussianProcess.noise: .* greater than 0"):
        program.make_process(2).replace(noise=0.0)


def test_predictions_are_a_picture(program, tmp_path):
    """`--plot` saves a PNG, on a machine without a display too."""
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib")
    path = tmp_path / "predictions.png"

    program.plot_predictions(np.array([0.2, -0.1]), np.array([0.3, 0.2]), np.zeros(2), path)

    assert path.read_bytes().startswith(b"\x89PNG")
