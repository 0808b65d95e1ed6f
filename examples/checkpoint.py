"""Train a reader of handwritten digits that can be killed at any moment, and resumes.

    python examples/checkpoint.py runs/digits
    python examples/checkpoint.py runs/digits --epochs 5 --every 10 --seed 1

Kill it at any moment, and give the same command again. It resumes from the last checkpoint, and
ends with the same numbers as an uninterrupted run, to the last bit.

For this, one value, `Run`, has everything that training changes, and all of it is saved: the
network with its running statistics (BatchNorm) and random streams (Dropout), the optimizer state,
the key of the shuffles, the order of the current epoch, and the step.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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

BATCH_SIZE = 64
WIDTH = 64
optimizer = optax.adamw(3e-3, weight_decay=1e-2)


# --- the network --------------------------------------------------------------------------------


def make_net(key: PRNGKeyArray) -> Net:
    """Make an untrained network, with its running statistics and its random streams."""
    *keys, noise_key = jax.random.split(key, 3)
    layers = [
        nn.Linear(64, WIDTH, use_bias=False, key=keys[0]),
        nn.BatchNorm(WIDTH, momentum=0.9),
        nn.Lambda(jax.nn.relu),
        nn.Dropout(0.3, stream=pm.RngStream()),
        nn.Linear(WIDTH, 10, key=keys[1]),
    ]
    return pm.stateful(nn.Sequential(layers)).seed(noise_key)


def loss_fn(net: Net, images: Images, labels: Labels) -> tuple[Float[Array, ""], Net]:
    """Return the mean cross-entropy of a batch, and the network with its new State."""
    logits, net = net(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), net


# The arguments are donated, while the last checkpoint may still be on its way to the disk: a save
# has its own copies.
@pm.filter_jit(donate=("net", "opt_state"))
def step(
    net: Net, opt_state: optax.OptState, images: Images, labels: Labels
) -> tuple[Net, optax.OptState, Float[Array, ""]]:
    """Take a training step."""
    (loss, net), grads = pm.filter_value_and_grad(loss_fn, has_aux=True)(net, images, labels)
    params, _ = pm.trainable(net)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return pm.apply_updates(net, updates), opt_state, loss


# --- the run ------------------------------------------------------------------------------------


class Split(NamedTuple):
    """Images with their labels."""

    images: np.ndarray
    labels: np.ndarray


class Run(NamedTuple):
    """Everything that training changes, and so everything needed to resume."""

    step: int
    net: Net
    opt_state: optax.OptState
    key: PRNGKeyArray
    """The key of the shuffles to come."""
    order: np.ndarray
    """The order of the images in the current epoch."""


def new_run(seed: int, size: int) -> Run:
    """Make a run that has not begun, with a number of images."""
    net_key, key = jax.random.split(jax.random.key(seed))
    net = make_net(net_key)
    params, _ = pm.trainable(net)
    return Run(0, net, optimizer.init(params), key, np.arange(size, dtype=np.int32))


def advance(run: Run, data: Split) -> tuple[Run, Float[Array, ""]]:
    """Take one step; return the run and the loss of the batch."""
    key, order = run.key, run.order
    batch = run.step % (len(order) // BATCH_SIZE)
    if batch == 0:
        key, shuffle_key = jax.random.split(key)
        order = np.asarray(jax.random.permutation(shuffle_key, order))
    chosen = order[batch * BATCH_SIZE : (batch + 1) * BATCH_SIZE]
    net, opt_state, loss = step(run.net, run.opt_state, data.images[chosen], data.labels[chosen])
    return Run(run.step + 1, net, opt_state, key, order), loss


def train(data: Split, checkpoints: pm.Checkpoints, num_steps: int, every: int, seed: int) -> Run:
    """Resume from the last checkpoint, or begin; and save a checkpoint every `every` steps."""
    run = new_run(seed, len(data.labels))
    if checkpoints.steps():
        run = checkpoints.restore(run)
        print(f"goes on from step {run.step}")
    while run.step < num_steps:
        run, loss = advance(run, data)
        if run.step % every == 0 or run.step == num_steps:
            # Returns at once: the loss may still be computed, and a thread writes the file.
            checkpoints.save(run.step, run, {"loss": loss})
    return run


# --- the command --------------------------------------------------------------------------------


def load_data() -> tuple[Split, Split]:
    """Split into four fifths to train on and one fifth to test with, stratified by digit."""
    digits: Any = load_digits()
    images = digits.data.astype(np.float32) / 16  # values in [0, 1]
    labels = digits.target.astype(np.int32)
    parts: Any = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = parts
    return Split(train_images, train_labels), Split(test_images, test_labels)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Learn to read digits, despite interruptions.")
    parser.add_argument("folder", type=Path, help="folder of the checkpoints: one for each run")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--every", type=int, default=20, help="steps between two saves")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same numbers")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, test, and return the test accuracy."""
    options = parse(arguments)
    train_data, test_data = load_data()
    num_steps = options.epochs * (len(train_data.labels) // BATCH_SIZE)
    with pm.Checkpoints(options.folder) as checkpoints:
        run = train(train_data, checkpoints, num_steps, options.every, options.seed)
    logits, _ = nn.inference_mode(run.net)(jnp.asarray(test_data.images))
    accuracy = float(np.mean(np.asarray(logits.argmax(axis=1)) == test_data.labels))
    print(f"test accuracy {accuracy:.2%} after {run.step} steps")
    return accuracy


if __name__ == "__main__":
    main()
