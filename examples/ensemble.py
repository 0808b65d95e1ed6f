"""Eight readers of handwritten digits, trained at once, then asked to vote.

    python examples/ensemble.py
    python examples/ensemble.py --members 16 --epochs 5 --seed 1 --plot accuracies.png

The networks differ in their initial weights and in the units that Dropout drops. All the code up
to `train_together` is written for one network: only four calls of `filter_vmap` say that there are
eight. The code does not mention State either, though every network has running statistics
(BatchNorm) and random streams (Dropout).

For comparison, the same networks are also trained one after another. The data are the 1,797
digits of 8 by 8 pixels that ship with scikit-learn, with a fifth of them held out.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import pytreemod as pm
from pytreemod import nn

Images = Float[Array, "batch 64"]
Labels = Int[Array, " batch"]
Net = nn.Stateful[nn.Sequential]
Step = Callable[..., tuple[Net, pm.Optimizer, Float[Array, "..."]]]
WIDTH = 64


# --- one network --------------------------------------------------------------------------------


def make_net(key: PRNGKeyArray) -> Net:
    """Make an untrained network, with its running statistics and its random streams."""
    *keys, noise_key = jax.random.split(key, 4)

    def block(n_in: int, key: PRNGKeyArray) -> list[Any]:
        return [
            nn.Linear(n_in, WIDTH, use_bias=False, key=key),
            # An epoch has few steps here: average over about ten steps, not a hundred.
            nn.BatchNorm(WIDTH, momentum=0.9),
            nn.Lambda(jax.nn.relu),
            nn.Dropout(0.3, stream=pm.RngStream()),
        ]

    layers = [*block(64, keys[0]), *block(WIDTH, keys[1]), nn.Linear(WIDTH, 10, key=keys[2])]
    return pm.stateful(nn.Sequential(layers)).seed(noise_key)


def loss_fn(net: Net, images: Images, labels: Labels) -> tuple[Float[Array, ""], Net]:
    """Return the mean cross-entropy of a batch, and the network with its new State."""
    logits, net = net(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), net


def step(
    net: Net, optimizer: pm.Optimizer, images: Images, labels: Labels
) -> tuple[Net, pm.Optimizer, Float[Array, ""]]:
    """Take a training step."""
    value_and_grad = pm.filter_value_and_grad(loss_fn, has_aux=True)
    (loss, net), grads = value_and_grad(net, images, labels)
    return *optimizer.update(net, grads=grads), loss


def predict(net: Net, images: Images) -> Float[Array, "batch 10"]:
    """Return the probability of each digit for each image, from a trained network."""
    logits, _ = pm.inference_mode(net)(images)
    return jax.nn.softmax(logits)


# --- the data -----------------------------------------------------------------------------------


class Split(NamedTuple):
    """Images with their labels."""

    images: np.ndarray
    labels: np.ndarray

    def batches(self, size: int, rng: np.random.Generator) -> Iterator["Split"]:
        """Yield shuffled batches of one size; the remainder waits for the next shuffle."""
        order = rng.permutation(len(self.labels))
        for start in range(0, len(order) - size + 1, size):
            chosen = order[start : start + size]
            yield Split(self.images[chosen], self.labels[chosen])


def load_data(seed: int) -> tuple[Split, Split]:
    """Split into four fifths to train on and one fifth to test with, stratified by digit."""
    digits: Any = load_digits()
    images = digits.data.astype(np.float32) / 16  # values in [0, 1]
    labels = digits.target.astype(np.int32)
    parts: Any = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed)
    train_images, test_images, train_labels, test_labels = parts
    return Split(train_images, train_labels), Split(test_images, test_labels)


# --- training, at once and in turn --------------------------------------------------------------


class Plan(NamedTuple):
    """The settings that all networks share."""

    data: Split
    epochs: int
    batch_size: int
    seed: int

    def optimizer(self) -> pm.Optimizer:
        """Return AdamW with a learning rate that falls to zero."""
        num_steps = self.epochs * (len(self.data.labels) // self.batch_size)
        rate = optax.cosine_decay_schedule(3e-3, num_steps)
        return pm.Optimizer(optax.adamw(rate, weight_decay=1e-2))

    def batches(self) -> Iterator[Split]:
        """Yield every batch of the training, in the same order each time."""
        rng = np.random.default_rng(self.seed)
        for _ in range(self.epochs):
            yield from self.data.batches(self.batch_size, rng)


class Trained(NamedTuple):
    """The result of a training, and its time, separate from the time to compile."""

    nets: Net
    seconds: float
    compiling: float


def train_together(keys: PRNGKeyArray, plan: Plan) -> Trained:
    """Train all networks at once: as one network, whose arrays have a leading axis."""
    nets = pm.filter_vmap(make_net)(keys)
    optimizers = pm.filter_vmap(plan.optimizer().init)(nets)
    # Each network has its own arrays, and all share the batch.
    step_of_all = pm.filter_vmap(step, in_axes=(0, 0, None, None))

    began = perf_counter()
    compiled = compile_step(step_of_all, nets, optimizers, plan)
    ready = perf_counter()
    nets = run(compiled, nets, optimizers, plan)
    return Trained(nets, perf_counter() - ready, ready - began)


def train_in_turn(keys: PRNGKeyArray, plan: Plan) -> Trained:
    """Train the same networks one after another, with a step that is compiled once."""
    optimizer, nets = plan.optimizer(), [make_net(key) for key in keys]
    optimizers = [optimizer.init(net) for net in nets]

    began = perf_counter()
    compiled = compile_step(step, nets[0], optimizers[0], plan)
    ready = perf_counter()
    trained = [run(compiled, *pair, plan) for pair in zip(nets, optimizers, strict=True)]
    return Trained(pm.stack(trained), perf_counter() - ready, ready - began)


def compile_step(step: Step, net: Net, optimizer: pm.Optimizer, plan: Plan) -> Step:
    """Return the compiled step, for one network or for several at once."""
    # Donated: the new values reuse the memory of the old ones, which can't be used again.
    jitted = pm.filter_jit(step, donate=("net", "optimizer"))
    return jitted.lower(net, optimizer, *next(plan.batches())).compile()


def run(step: Step, net: Net, optimizer: pm.Optimizer, plan: Plan) -> Net:
    """Take a step for every batch of the plan."""
    for images, labels in plan.batches():
        net, optimizer, _ = step(net, optimizer, images, labels)
    return jax.block_until_ready(net)


# --- testing ------------------------------------------------------------------------------------


class Accuracy(NamedTuple):
    """The share of correct answers."""

    of_each: np.ndarray
    of_vote: float


def test(nets: Net, data: Split) -> Accuracy:
    """Test each network, and their vote, in which more confident ones weigh more."""
    ask = pm.filter_jit(pm.filter_vmap(predict, in_axes=(0, None)))
    opinions = np.asarray(ask(nets, data.images))  # network, image, digit
    of_each = (opinions.argmax(axis=2) == data.labels).mean(axis=1)
    of_vote = (opinions.mean(axis=0).argmax(axis=1) == data.labels).mean()
    return Accuracy(of_each, float(of_vote))


# --- the command --------------------------------------------------------------------------------


def plot_accuracies(accuracy: Accuracy, path: Path) -> None:
    """Save a picture with a dot for each network, and a line for the vote."""
    from matplotlib.figure import Figure  # Here: a run without a plot needs no matplotlib.

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(accuracy.of_each) + 1), accuracy.of_each, "o", label="each network")
    axes.axhline(accuracy.of_vote, color="black", label="their vote")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="network", ylabel="test accuracy")
    axes.legend()
    figure.savefig(path, dpi=150)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train an ensemble on handwritten digits.")
    parser.add_argument("--members", type=int, default=8, help="how many networks")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0, help="same seed, same accuracies")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture of the accuracies")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> Accuracy:
    """Train in both ways, test, and return the accuracies of the networks trained at once."""
    options = parse(arguments)
    train_data, test_data = load_data(options.seed)
    plan = Plan(train_data, options.epochs, options.batch_size, options.seed)
    keys = jax.random.split(jax.random.key(options.seed), options.members)
    together, in_turn = train_together(keys, plan), train_in_turn(keys, plan)
    for how, trained in [("at once", together), ("in turn", in_turn)]:
        print(
            f"{options.members} networks trained {how} in {trained.seconds:.2f} s, "
            f"after {trained.compiling:.2f} s of compiling"
        )
    ratio, with_compiling = in_turn.seconds / together.seconds, sum(in_turn[1:]) / sum(together[1:])
    print(f"at once is {ratio:.1f} times as fast; with compiling, {with_compiling:.1f} times")

    accuracy = test(together.nets, test_data)
    print("test accuracy of each", *(f"{share:.2%}" for share in accuracy.of_each))
    print(f"test accuracy of their vote {accuracy.of_vote:.2%}")
    if options.plot:
        plot_accuracies(accuracy, options.plot)
        print(f"accuracies in {options.plot}")
    return accuracy


if __name__ == "__main__":
    main()
