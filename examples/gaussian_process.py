"""A Gaussian process that learns its own scales: parameters that must be positive.

    python examples/gaussian_process.py
    python examples/gaussian_process.py --steps 200 --seed 1 --plot diabetes.png

How a disease went on within a year is predicted from ten measurements, with an uncertainty for each
patient. What is learned are a dozen numbers, all of them positive: how far one has to go along each
measurement until patients have nothing more to do with each other, how large the effect is, and how
much of it is noise. They are declared with a constraint, and from there on nobody thinks of it: the
formulas below read them as they are, and an optimizer that knows no bounds cannot leave them.

The data are the 442 patients that ship inside scikit-learn. A quarter of them is held out and
looked at only once, at the very end.
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
    """How much two patients have to do with each other: less, the further apart they are."""

    # One for each measurement: a long one says that it does not matter.
    lengths: Float[Array, " features"] = pm.field(constraint=positive)
    amplitude: Scalar = pm.field(constraint=positive)

    def __call__(
        self, a: Float[Array, "n features"], b: Float[Array, "m features"]
    ) -> Float[Array, "n m"]:
        """The covariance of each of `a` with each of `b`."""
        steps = (a[:, None] - b[None]) / self.lengths
        return self.amplitude**2 * jnp.exp(-0.5 * jnp.sum(steps**2, axis=-1))


class GaussianProcess(pm.Module):
    """A distribution over functions, with noise on what is seen of them."""

    kernel: Kernel
    noise: Scalar = pm.field(constraint=positive)

    def factor(self, inputs: Inputs) -> Float[Array, "points points"]:
        """The Cholesky factor of the covariance of what is seen at `inputs`."""
        return jnp.linalg.cholesky(
            self.kernel(inputs, inputs) + self.noise**2 * jnp.eye(len(inputs))
        )

    def log_likelihood(self, inputs: Inputs, outputs: Outputs) -> Scalar:
        """How likely the outputs are, over all functions."""
        factor = self.factor(inputs)
        white = jsl.solve_triangular(factor, outputs, lower=True)
        log_volume = jnp.sum(jnp.log(jnp.diagonal(factor)))
        return -0.5 * white @ white - log_volume - 0.5 * len(outputs) * jnp.log(2 * jnp.pi)

    def predict(
        self, inputs: Inputs, outputs: Outputs, new: Float[Array, "new features"]
    ) -> tuple[Float[Array, " new"], Float[Array, " new"]]:
        """Means and standard deviations at `new`, noise included, after the outputs were seen."""
        factor = self.factor(inputs)
        cross = jsl.solve_triangular(factor, self.kernel(inputs, new), lower=True)
        mean = cross.T @ jsl.solve_triangular(factor, outputs, lower=True)
        variance = self.kernel.amplitude**2 + self.noise**2 - jnp.sum(cross**2, axis=0)
        return mean, jnp.sqrt(variance)


def make_process(features: int) -> GaussianProcess:
    """Before anything was seen: every measurement matters, half of the spread is noise."""
    kernel = Kernel(lengths=jnp.full(features, 3.0), amplitude=jnp.asarray(1.0))
    return GaussianProcess(kernel, noise=jnp.asarray(0.7))


# --- learning -----------------------------------------------------------------------------------


def fit(
    model: GaussianProcess, inputs: Inputs, outputs: Outputs, *, steps: int, rate: float
) -> tuple[GaussianProcess, list[float]]:
    """The model whose scales make the outputs most likely, and how likely they were at each step.

    Adam takes steps of one size whatever the slope. As what it trains are logarithms, a step is a
    factor: a length of 0.1 and one of 1,000 are learned with the same rate.
    """
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))

    def loss_fn(model: GaussianProcess) -> Scalar:
        # For one point, so that the rate does not depend on how many there are.
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
    # disable=None: no bar where there is no terminal to redraw it on.
    with tqdm(total=steps, unit="step", disable=None) as bar:
        for count in range(1, steps + 1):
            model, opt_state, likelihood = step(model, opt_state)
            # Still an array: to read it here would be to wait for each step in turn.
            likelihoods.append(likelihood)
            bar.update()
            if count % max(steps // 5, 1) == 0:
                shown = f"log likelihood for each patient {float(likelihood):.4f}"
                tqdm.write(f"step {count:4d}   {shown}   noise {float(model.noise):.3f}")
    return model, [float(likelihood) for likelihood in likelihoods]


# --- the data -----------------------------------------------------------------------------------


class Data(NamedTuple):
    """Patients, in units of the spread among those that are learned from."""

    names: list[str]
    inputs: np.ndarray
    outputs: np.ndarray
    new_inputs: np.ndarray
    new_outputs: np.ndarray


def load_data(seed: int, patients: int | None = None) -> Data:
    """Three quarters to learn from; `patients` says how many there are in all."""
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
    """What was learned, and how good it is."""

    model: GaussianProcess
    likelihoods: list[float]
    error: float
    coverage: float


def describe(model: GaussianProcess, names: Sequence[str]) -> None:
    """Print what was learned, what matters most first."""
    lengths = np.asarray(model.kernel.lengths)
    print("length scales, in units of the spread; a long one says that it does not matter")
    for i in np.argsort(lengths):
        print(f"  {names[i]:4s} {lengths[i]:10.2f}")
    print(f"amplitude {float(model.kernel.amplitude):.3f}, noise {float(model.noise):.3f}")


def plot_predictions(
    mean: np.ndarray, deviation: np.ndarray, outputs: np.ndarray, path: Path
) -> None:
    """Save a picture of what was predicted, with two standard deviations, and what came."""
    # Imported here, and drawn without pyplot: a run that draws nothing needs no matplotlib, and
    # one that does needs no display.
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
    """The command line."""
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
    """Learn, predict, and return the model and how good its predictions are."""
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
    print(f"{coverage:.1%} of what came is within two standard deviations")
    if options.plot:
        plot_predictions(mean, deviation, data.new_outputs, options.plot)
        print(f"predictions in {options.plot}")
    return Result(model, likelihoods, error, coverage)


if __name__ == "__main__":
    main()
