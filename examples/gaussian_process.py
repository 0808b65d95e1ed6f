"""A Gaussian process that learns its own scales: parameters that must be positive.

    python examples/gaussian_process.py
    python examples/gaussian_process.py --steps 200 --seed 1 --plot diabetes.png

It predicts the progression of a disease within a year from ten measurements, with an uncertainty
for each patient. It learns a dozen positive numbers: for each measurement, the distance at which
two patients become unrelated; the size of the effect; and the part of it that is noise. They are
declared with a constraint, and the rest of the code ignores it. The formulas below read the
positive values, and an optimizer that knows no bounds cannot leave them.

The data are the 442 patients that ship with scikit-learn. A quarter of them is held out for a
single test at the end.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import optax
from jaxtyping import Array, Float
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import pytreemod as pm

positive = pm.constraints.positive

Inputs = Float[Array, "points features"]
Outputs = Float[Array, " points"]
Scalar = Float[Array, ""]


# --- the model ----------------------------------------------------------------------------------


class Kernel(pm.Module):
    """How related two patients are: less, the further apart they are."""

    # One for each measurement: with a long one, the measurement does not matter.
    lengths: Float[Array, " features"] = pm.field(constraint=positive)
    amplitude: Scalar = pm.field(constraint=positive)

    def __call__(
        self, a: Float[Array, "n features"], b: Float[Array, "m features"]
    ) -> Float[Array, "n m"]:
        """Return the covariance of each of `a` with each of `b`."""
        steps = (a[:, None] - b[None]) / self.lengths
        return self.amplitude**2 * jnp.exp(-0.5 * jnp.sum(steps**2, axis=-1))


class GaussianProcess(pm.Module):
    """A distribution over functions, with noise on their observations."""

    kernel: Kernel
    noise: Scalar = pm.field(constraint=positive)

    def factor(self, inputs: Inputs) -> Float[Array, "points points"]:
        """Return the Cholesky factor of the covariance of observations at `inputs`."""
        return jnp.linalg.cholesky(
            self.kernel(inputs, inputs) + self.noise**2 * jnp.eye(len(inputs))
        )

    def log_likelihood(self, inputs: Inputs, outputs: Outputs) -> Scalar:
        """Return the log likelihood of the outputs, over all functions."""
        factor = self.factor(inputs)
        white = jsl.solve_triangular(factor, outputs, lower=True)
        log_volume = jnp.sum(jnp.log(jnp.diagonal(factor)))
        return -0.5 * white @ white - log_volume - 0.5 * len(outputs) * jnp.log(2 * jnp.pi)

    def predict(
        self, inputs: Inputs, outputs: Outputs, new: Float[Array, "new features"]
    ) -> tuple[Float[Array, " new"], Float[Array, " new"]]:
        """Return means and standard deviations at `new`, with noise, given the outputs."""
        factor = self.factor(inputs)
        cross = jsl.solve_triangular(factor, self.kernel(inputs, new), lower=True)
        mean = cross.T @ jsl.solve_triangular(factor, outputs, lower=True)
        variance = self.kernel.amplitude**2 + self.noise**2 - jnp.sum(cross**2, axis=0)
        return mean, jnp.sqrt(variance)


def make_process(features: int) -> GaussianProcess:
    """Make a model without data: every measurement matters, half of the variance is noise."""
    kernel = Kernel(lengths=jnp.full(features, 3.0), amplitude=jnp.asarray(1.0))
    return GaussianProcess(kernel, noise=jnp.asarray(0.7))


# --- learning -----------------------------------------------------------------------------------


def fit(
    model: GaussianProcess, inputs: Inputs, outputs: Outputs, *, steps: int, rate: float
) -> tuple[GaussianProcess, list[float]]:
    """Return the model whose scales make the outputs most likely, and the likelihood of each step.

    Adam takes steps of one size whatever the slope. It trains logarithms here, so a step is a
    factor: a length of 0.1 and one of 1,000 are learned with the same rate.
    """
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))

    def loss_fn(model: GaussianProcess) -> Scalar:
        # Per point, so that the rate does not depend on the number of points.
        return -model.log_likelihood(inputs, outputs) / len(outputs)

    @pm.filter_jit(donate=("model", "opt_state"))
    def step(
        model: GaussianProcess, opt_state: optax.OptState
    ) -> tuple[GaussianProcess, optax.OptState, Scalar]:
        loss, grads = pm.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = optimizer.update(grads, opt_state)
        return pm.apply_updates(model, updates), opt_state, -loss

    opt_state = optimizer.init(pm.filter(model, pm.is_inexact_array))
    likelihoods = []
    # disable=None: no progress bar without a terminal.
    with tqdm(total=steps, unit="step", disable=None) as bar:
        for count in range(1, steps + 1):
            model, opt_state, likelihood = step(model, opt_state)
            # Still an array: reading it here would wait for each step.
            likelihoods.append(likelihood)
            bar.update()
            if count % max(steps // 5, 1) == 0:
                shown = f"log likelihood for each patient {float(likelihood):.4f}"
                tqdm.write(f"step {count:4d}   {shown}   noise {float(model.noise):.3f}")
    return model, [float(likelihood) for likelihood in likelihoods]


# --- the data -----------------------------------------------------------------------------------


class Data(NamedTuple):
    """Patients, in units of the standard deviation in the training data."""

    names: list[str]
    inputs: np.ndarray
    outputs: np.ndarray
    new_inputs: np.ndarray
    new_outputs: np.ndarray


def load_data(seed: int, patients: int | None = None) -> Data:
    """Load the data, three quarters to learn from; `patients` is the total number."""
    diabetes: Any = load_diabetes(scaled=False)
    parts: Any = train_test_split(
        diabetes.data[:patients], diabetes.target[:patients], test_size=0.25, random_state=seed
    )
    inputs, new_inputs, outputs, new_outputs = (part.astype(np.float32) for part in parts)
    centre, spread = inputs.mean(axis=0), inputs.std(axis=0)
    mean, deviation = outputs.mean(), outputs.std()
    return Data(
        diabetes.feature_names,
        (inputs - centre) / spread,
        (outputs - mean) / deviation,
        (new_inputs - centre) / spread,
        (new_outputs - mean) / deviation,
    )


# --- the command --------------------------------------------------------------------------------


class Result(NamedTuple):
    """The learned model, and its quality."""

    model: GaussianProcess
    likelihoods: list[float]
    error: float
    coverage: float


def describe(model: GaussianProcess, names: Sequence[str]) -> None:
    """Print the learned numbers, the most relevant measurement first."""
    lengths = np.asarray(model.kernel.lengths)
    print("length scales, in units of the spread; a long one says that it does not matter")
    for i in np.argsort(lengths):
        print(f"  {names[i]:4s} {lengths[i]:10.2f}")
    print(f"amplitude {float(model.kernel.amplitude):.3f}, noise {float(model.noise):.3f}")


def plot_predictions(
    mean: np.ndarray, deviation: np.ndarray, outputs: np.ndarray, path: Path
) -> None:
    """Save a picture of the predictions, with two standard deviations, and of the outcomes."""
    # Imported here, and drawn without pyplot: a run without a plot needs no matplotlib, and one
    # with a plot needs no display.
    from matplotlib.figure import Figure

    order = np.argsort(mean)
    mean, deviation, outputs = mean[order], deviation[order], outputs[order]
    places = np.arange(len(mean))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    low, high = mean - 2 * deviation, mean + 2 * deviation
    axes.fill_between(places, low, high, alpha=0.25, label="two standard deviations")
    axes.plot(places, mean, label="prediction")
    axes.plot(places, outputs, ".", color="black", label="what came")
    axes.set(xlabel="patients that were held out, by prediction", ylabel="progression")
    axes.legend()
    figure.savefig(path, dpi=150)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Learn the scales of a Gaussian process.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=0.1, help="the learning rate")
    parser.add_argument("--patients", type=int, help="how many to look at (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same numbers")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="save a picture of the predictions"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> Result:
    """Learn, predict, and return the model and the quality of its predictions."""
    options = parse(arguments)
    data = load_data(options.seed, options.patients)
    print(f"{len(data.outputs)} patients to learn from, {len(data.new_outputs)} to test with")

    inputs, outputs = jnp.asarray(data.inputs), jnp.asarray(data.outputs)
    began = perf_counter()
    model, likelihoods = fit(
        make_process(len(data.names)), inputs, outputs, steps=options.steps, rate=options.rate
    )
    print(f"learned in {perf_counter() - began:.1f} s")
    describe(model, data.names)

    found = pm.filter_jit(model.predict)(inputs, outputs, jnp.asarray(data.new_inputs))
    mean, deviation = map(np.asarray, found)
    misses = data.new_outputs - mean
    error = float(np.sqrt(np.mean(misses**2)))
    coverage = float(np.mean(np.abs(misses) < 2 * deviation))
    print(f"test error {error:.3f} of the spread")
    print(f"{coverage:.1%} of the outcomes are within two standard deviations")
    if options.plot:
        plot_predictions(mean, deviation, data.new_outputs, options.plot)
        print(f"predictions in {options.plot}")
    return Result(model, likelihoods, error, coverage)


if __name__ == "__main__":
    main()
