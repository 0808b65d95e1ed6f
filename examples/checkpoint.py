"""Train a reader of handwritten digits that can be killed at any moment, and goes on.

    python examples/checkpoint.py runs/digits
    python examples/checkpoint.py runs/digits --epochs 5 --every 10 --seed 1

Kill it, in the middle of whatever it does, and give the same command again: it goes on from the
last checkpoint, and ends with the same numbers as a run that nobody has killed, to the last bit.

For this, all that training changes is in one value, `Run`, and all of it is saved: the network with
its running statistics (BatchNorm) and its random streams (Dropout), the optimizer's state, the key
of the shuffles, the order of the epoch that is under way, and the step.
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
    """An untrained network, in one value with its running statistics and its random streams."""
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
    """Mean cross-entropy of a batch, and the network with its State as it is after the call."""
    logits, net = net(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), net


# The arrays that go in are given away, while the last checkpoint may still be on its way to the
# disk: a save has copies of its own.
@pm.filter_jit(donate=("net", "opt_state"))
def step(
    net: Net, opt_state: optax.OptState, images: Images, labels: Labels
) -> tuple[Net, optax.OptState, Float[Array, ""]]:
    """A step of training."""
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
    """All that training changes, and so all that it needs to go on."""

    step: int
    net: Net
    opt_state: optax.OptState
    key: PRNGKeyArray
    """Of the shuffles to come."""
    order: np.ndarray
    """Of the images in the epoch that is under way."""


def new_run(seed: int, size: int) -> Run:
    """A run that has not begun, with so many images."""
    net_key, key = jax.random.split(jax.random.key(seed))
    net = make_net(net_key)
    params, _ = pm.trainable(net)
    return Run(0, net, optimizer.init(params), key, np.arange(size, dtype=np.int32))


def advance(run: Run, data: Split) -> tuple[Run, Float[Array, ""]]:
    """One step further; beside the run the loss of the batch."""
    key, order = run.key, run.order
    batch = run.step % (len(order) // BATCH_SIZE)
    if batch == 0:
        key, shuffle_key = jax.random.split(key)
        order = np.asarray(jax.random.permutation(shuffle_key, order))
    chosen = order[batch * BATCH_SIZE : (batch + 1) * BATCH_SIZE]
    net, opt_state, loss = step(run.net, run.opt_state, data.images[chosen], data.labels[chosen])
    return Run(run.step + 1, net, opt_state, key, order), loss


def train(data: Split, checkpoints: pm.Checkpoints, num_steps: int, every: int, seed: int) -> Run:
    """Go on from the last checkpoint, or begin; and save a checkpoint every so many steps."""
    run = new_run(seed, len(data.labels))
    if checkpoints.steps():
        run = checkpoints.restore(run)
        print(f"goes on from step {run.step}")
    while run.step < num_steps:
        run, loss = advance(run, data)
        if run.step % every == 0 or run.step == num_steps:
            # Returns at once: the loss may still be computed, and the file is written by a thread.
            checkpoints.save(run.step, run, {"loss": loss})
    return run


# --- the command --------------------------------------------------------------------------------


def load_data() -> tuple[Split, Split]:
    """Four fifths to train on and one fifth to test with, every digit in both in proportion."""
    digits: Any = load_digits()
    images = digits.data.astype(np.float32) / 16  # values in [0, 1]
    labels = digits.target.astype(np.int32)
    parts: Any = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = parts
    return Split(train_images, train_labels), Split(test_images, test_labels)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Learn to read digits, whatever comes between.")
    parser.add_argument("folder", type=Path, help="of the checkpoints: one for each run")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--every", type=int, default=20, help="steps from one save to the next")
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
