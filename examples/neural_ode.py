"""A neural differential equation learns how a nerve cell fires, and then fires on its own.

    pip install -e '.[examples,solvers]'
    python examples/neural_ode.py                       # a minute and a half on two cores
    python examples/neural_ode.py --seed 1 --plot neuron.png

It learns a rate of change: of the voltage, and of three hidden variables. A voltage alone could not
fire, because it rises and falls through the same values. diffrax solves the equation. It gets a
bound method of the Module, which is a tree like any other, so the gradient flows through the solver
to the weights. A second network estimates the initial hidden variables from recent measurements.

The data are real: the voltage of a cell with an injected current, 12,000 samples that ship with
matplotlib for its own examples (`membrane.dat`; the file does not give the sampling rate). Training
uses a part of 3,400 samples, in pieces of at most 320. On the samples that follow, the equation
starts eight times and runs on its own for 1,800 samples, in which the cell fires every 144. It
fires as often as the cell, 100 times in all: half of the spikes are at most 4 samples off, and none
more than 12.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import matplotlib.cbook
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray
from tqdm import tqdm

import pytreemod as pm
from pytreemod import nn

PAST = 64  # samples to estimate the hidden variables from
STRIDE = 2  # every second sample is compared
UNIT = 20.0  # samples in a unit of time, so that rates are numbers of ordinary size
LEARNED = (1600, 5000)
STARTS = range(5000, 5144, 18)  # within one period
ALONE = 1800

Past = Float[Array, "*batch past"]
Times = Float[Array, " times"]
Path4d = Float[Array, "times *batch 1+hidden"]


# --- the model ----------------------------------------------------------------------------------


class Neuron(pm.Module):
    """The rates of change of voltage and hidden variables, and their initial values."""

    flow: nn.MLP
    encoder: nn.MLP

    def __init__(self, hidden: int, *, width: int = 64, key: PRNGKeyArray):
        keys = pm.init_keys(key)
        size = 1 + hidden
        self.flow = nn.MLP(size, size, width, 2, activation=jnp.tanh, key=next(keys))
        # Bounded: hidden variables start where the flow was learned.
        self.encoder = nn.MLP(
            PAST // 2, hidden, width, 1, jnp.tanh, final_activation=jnp.tanh, key=next(keys)
        )

    def rate(self, time: Array, y: Array, args: None) -> Array:
        """Return the rates in the form that diffrax requires; time does not matter."""
        return self.flow(y)

    def __call__(self, past: Past, times: Times) -> Path4d:
        """Return voltage and hidden variables at times after the last of the past, for a batch."""
        begin = jnp.concatenate([past[..., -1:], self.encoder(past[..., ::2])], axis=-1)
        return diffrax.diffeqsolve(
            diffrax.ODETerm(self.rate),
            diffrax.Tsit5(),
            t0=0.0,
            t1=times[-1],
            dt0=0.2,
            y0=begin,
            saveat=diffrax.SaveAt(ts=times),
            # A spike is steep but the rest is smooth: take steps as long as possible.
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-3),
        ).ys


# --- training -----------------------------------------------------------------------------------


def loss_fn(model: Neuron, past: Past, future: Array, times: Times) -> Float[Array, ""]:
    """Return the error of the voltage; the hidden variables are not compared."""
    return jnp.mean((model(past, times)[..., 0].T - future) ** 2)


@pm.filter_jit(donate=("model", "opt"))
def step(
    model: Neuron, opt: pm.Optimizer, past: Past, future: Array, times: Times
) -> tuple[Neuron, pm.Optimizer, Array]:
    """Take one training step."""
    loss, grads = pm.filter_value_and_grad(loss_fn)(model, past, future, times)
    model, opt = opt.update(model, grads=grads)
    return model, opt, loss


def after(samples: int) -> np.ndarray:
    """Return which samples after a start are compared."""
    return np.arange(STRIDE, samples + 1, STRIDE)


def times_of(offsets: np.ndarray) -> Times:
    """Convert sample numbers to units of time."""
    return jnp.asarray(offsets / UNIT, jnp.float32)


def pasts(voltage: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the measurements up to each start."""
    return voltage[starts[:, None] + np.arange(1 - PAST, 1)]


def train(model: Neuron, voltage: np.ndarray, options: argparse.Namespace) -> Neuron:
    """Train, on short pieces first: over a long one, an untrained model has no useful gradient."""
    rng, losses = np.random.default_rng(options.seed), []
    rule = optax.adam(optax.cosine_decay_schedule(3e-3, options.steps))
    opt = pm.Optimizer(rule, before=optax.clip_by_global_norm(1.0)).init(model)
    # disable=None: no progress bar without a terminal.
    for count in tqdm(range(options.steps), unit="step", disable=None):
        length = (40, 80, 160, 160, 320, 320, 320, 320)[8 * count // options.steps]
        offsets = after(length)
        starts = rng.integers(LEARNED[0], LEARNED[1] - length, 32)
        past, future = pasts(voltage, starts), voltage[starts[:, None] + offsets]
        model, opt, loss = step(model, opt, past, future, times_of(offsets))
        losses.append(loss)
        if (count + 1) % max(1, options.steps // 8) == 0:
            error = float(np.sqrt(np.mean(jax.device_get(losses))))
            tqdm.write(f"step {count + 1:5d}   pieces of {length:3d}   error {error:.3f}")
            losses = []
    return model


def load_data() -> np.ndarray:
    """Load the voltage, in standard deviations over the time in which the cell fires."""
    with matplotlib.cbook.get_sample_data("membrane.dat") as file:
        raw = np.frombuffer(file.read(), "<f4")
    firing = raw[LEARNED[0] : LEARNED[1]]
    return (raw - firing.mean()) / firing.std()


# --- running on its own -------------------------------------------------------------------------


def spikes(voltage: np.ndarray) -> np.ndarray:
    """Return where the voltage rises through two standard deviations."""
    return np.flatnonzero((voltage[1:] > 2) & (voltage[:-1] <= 2))


class Found(NamedTuple):
    """The spikes of all runs; the errors are in samples, of spikes that both have."""

    real: int
    own: int
    errors: np.ndarray


@pm.filter_jit
def run(model: Neuron, past: Past, times: Times) -> Path4d:
    """Solve the equation, from the measurements just before."""
    return model(past, times)


def compare(model: Neuron, voltage: np.ndarray) -> tuple[Found, np.ndarray]:
    """Compare the spikes of runs from all starts with the cell's; return the first run, too."""
    offsets, starts = after(ALONE), np.array(STARTS)
    paths = np.asarray(run(model, jnp.asarray(pasts(voltage, starts)), times_of(offsets)))
    real = [STRIDE * spikes(voltage[start + offsets]) for start in starts]
    own = [STRIDE * spikes(path) for path in paths[..., 0].T]
    pairs = [(a[: len(b)], b[: len(a)]) for a, b in zip(real, own, strict=True)]
    errors = np.concatenate([np.abs(a - b) for a, b in pairs])
    return Found(sum(map(len, real)), sum(map(len, own)), errors), paths[:, 0]


def plot(voltage: np.ndarray, path: np.ndarray, file: Path) -> None:
    """Save a picture of the measurements and a run, and of the run's orbit."""
    # Imported here, and drawn without pyplot, which needs a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    places = STARTS[0] + after(ALONE)
    left.plot(places, voltage[places], color="black", linewidth=0.8, label="the cell")
    left.plot(places, path[:, 0], color="tab:red", label="the equation, on its own")
    left.axvline(STARTS[0], color="gray", linewidth=0.8)
    seen = np.arange(STARTS[0] - 200, STARTS[0] + 1)
    left.plot(seen, voltage[seen], color="black", linewidth=0.8)
    left.set(xlabel="sample", ylabel="voltage")
    left.legend(loc="upper right")
    right.plot(path[:, 0], path[:, 1], color="tab:red")
    right.set(xlabel="voltage", ylabel="first hidden variable")
    figure.savefig(file, dpi=150)


# --- the command --------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--hidden", type=int, default=3, help="number of hidden variables")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same numbers")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save a picture of a run")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> Found:
    """Train, and let the equation run on its own."""
    options = parse(arguments)
    voltage = load_data()
    model = train(Neuron(options.hidden, key=jax.random.key(options.seed)), voltage, options)
    found, path = compare(model, voltage)
    print(f"{len(STARTS)} runs of {ALONE} samples: {found.own} spikes, the cell has {found.real}")
    if len(found.errors):
        middle, most = np.median(found.errors), found.errors.max()
        print(f"a spike is {middle:.0f} samples off (median), at most {most:.0f}")
    if options.plot:
        plot(voltage, path, options.plot)
        print(f"the run in {options.plot}")
    return found


if __name__ == "__main__":
    main()
