"""Learn to read handwritten digits: a convolutional network with BatchNorm and Dropout.

    python examples/digits.py
    python examples/digits.py --epochs 5 --seed 1 --plot confusion.png

The data are the 1,797 scanned digits, 8 by 8 pixels each, that ship with scikit-learn. A fifth of
them is held out for a single test at the end.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from sklearn.datasets import load_digits
from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import pytreemod as pm
from pytreemod import nn

Image = Float[Array, "1 8 8"]
Images = Float[Array, "batch 1 8 8"]
Labels = Int[Array, " batch"]
Logits = Float[Array, " 10"]
Scalar = Float[Array, ""]


# --- the model ----------------------------------------------------------------------------------


class Block(pm.Module):
    """Convolution, BatchNorm, ReLU: the channels change, height and width do not."""

    conv: nn.Conv2d
    norm: nn.BatchNorm

    def __init__(self, n_in: int, n_out: int, *, key: PRNGKeyArray):
        # No bias: BatchNorm subtracts the mean, and a constant with it.
        self.conv = nn.Conv2d(n_in, n_out, kernel_size=3, padding=1, use_bias=False, key=key)
        # An epoch has few steps here: average the statistics over about ten steps, not a hundred.
        self.norm = nn.BatchNorm(n_out, "batch", momentum=0.9)

    def __call__(
        self, x: Float[Array, "n_in height width"], state: nn.State
    ) -> tuple[Float[Array, "n_out height width"], nn.State]:
        """Apply it to one image; return the result and the new running statistics."""
        x, state = self.norm(self.conv(x), state)
        return jax.nn.relu(x), state


class DigitReader(pm.Module):
    """Maps one image of a digit to the ten logits of its class."""

    blocks: tuple[Block, Block, Block]
    pool: nn.MaxPool2d
    dropout: nn.Dropout
    head: nn.Linear

    def __init__(self, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        self.blocks = (
            Block(1, 32, key=keys[0]),
            Block(32, 32, key=keys[1]),
            Block(32, 64, key=keys[2]),
        )
        self.pool = nn.MaxPool2d(kernel_size=2, stride=2)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(64 * 2 * 2, 10, key=keys[3])

    def __call__(
        self, x: Image, state: nn.State, key: PRNGKeyArray | None = None
    ) -> tuple[Logits, nn.State]:
        """Return the logits; only training needs the `key`, for Dropout."""
        first, second, third = self.blocks
        x, state = first(x, state)
        x, state = second(x, state)
        x, state = third(self.pool(x), state)
        features = self.pool(x).reshape(-1)
        return self.head(self.dropout(features, key=key)), state


# --- one step -----------------------------------------------------------------------------------


def loss_fn(
    model: DigitReader, state: nn.State, images: Images, labels: Labels, key: PRNGKeyArray
) -> tuple[Scalar, tuple[nn.State, Scalar]]:
    """Return the mean cross-entropy of a batch, the new state and the accuracy."""
    keys = jax.random.split(key, len(images))
    # BatchNorm averages over the axis named "batch", so every image returns the same state.
    batched = jax.vmap(model, in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch")
    logits, state = batched(images, state, keys)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (state, jnp.mean(logits.argmax(axis=1) == labels))


def make_step(optimizer: optax.GradientTransformation) -> Callable[..., tuple[Any, ...]]:
    """Return the compiled training step of model, state and optimizer state."""

    # Donated: the new values reuse the memory of the old ones, which can't be used again.
    @pm.filter_jit(donate=("model", "state", "opt_state"))
    def step(
        model: DigitReader,
        state: nn.State,
        opt_state: optax.OptState,
        images: Images,
        labels: Labels,
        key: PRNGKeyArray,
    ) -> tuple[DigitReader, nn.State, optax.OptState, Scalar, Scalar]:
        value_and_grad = pm.filter_value_and_grad(loss_fn, has_aux=True)
        (loss, (state, accuracy)), grads = value_and_grad(model, state, images, labels, key)
        params = pm.filter(model, pm.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return pm.apply_updates(model, updates), state, opt_state, loss, accuracy

    return step


@pm.filter_jit
def predict(model: DigitReader, state: nn.State, images: Images) -> Labels:
    """Return the most likely digit for each image; `model` must be in inference mode."""
    logits, _ = jax.vmap(model, in_axes=(0, None), out_axes=(0, None))(images, state)
    return logits.argmax(axis=1)


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
    images = digits.images[:, None].astype(np.float32) / 16  # one channel, values in [0, 1]
    labels = digits.target.astype(np.int32)
    parts: Any = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed)
    train_images, test_images, train_labels, test_labels = parts
    return Split(train_images, train_labels), Split(test_images, test_labels)


# --- training -----------------------------------------------------------------------------------


def make_optimizer(num_steps: int) -> optax.GradientTransformation:
    """Return AdamW with a learning rate that warms up for a tenth of the steps, then decays."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=3e-3, warmup_steps=num_steps // 10, decay_steps=num_steps
    )
    return optax.adamw(schedule, weight_decay=1e-2)


def train(data: Split, *, epochs: int, batch_size: int, seed: int) -> tuple[DigitReader, nn.State]:
    """Train a new model from `seed`, and print one line for each epoch."""
    num_steps = epochs * (len(data.labels) // batch_size)
    model_key, key = jax.random.split(jax.random.key(seed))
    rng = np.random.default_rng(seed)

    model, state = nn.make_with_state(DigitReader)(key=model_key)
    optimizer = make_optimizer(num_steps)
    opt_state = optimizer.init(pm.filter(model, pm.is_inexact_array))
    step = make_step(optimizer)

    # disable=None: no progress bar without a terminal.
    with tqdm(total=num_steps, unit="step", disable=None) as bar:
        for epoch in range(1, epochs + 1):
            scores = []
            for images, labels in data.batches(batch_size, rng):
                key, step_key = jax.random.split(key)
                model, state, opt_state, *score = step(
                    model, state, opt_state, images, labels, step_key
                )
                # Still arrays: reading them here would wait for each step.
                scores.append(score)
                bar.update()
            loss, accuracy = np.mean(jax.device_get(scores), axis=0)
            tqdm.write(f"epoch {epoch:2d}   train loss {loss:.4f}   train accuracy {accuracy:7.2%}")
    return model, state


# --- the command --------------------------------------------------------------------------------


def plot_confusion(labels: np.ndarray, predictions: np.ndarray, path: Path) -> None:
    """Save a picture of the confusion matrix."""
    # Imported here, and drawn without pyplot: a run without a plot needs no matplotlib, and one
    # with a plot needs no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6), layout="constrained")
    display = ConfusionMatrixDisplay(confusion_matrix(labels, predictions))
    display.plot(ax=figure.subplots(), colorbar=False, cmap="Blues")
    display.ax_.set_title(f"Test accuracy {np.mean(predictions == labels):.2%}")
    figure.savefig(path, dpi=150)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Learn to read handwritten digits.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="same seed, same numbers")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save a confusion matrix")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, test, and return the test accuracy."""
    options = parse(arguments)
    train_data, test_data = load_data(options.seed)
    print(f"{len(train_data.labels)} digits to train on, {len(test_data.labels)} to test with")

    began = perf_counter()
    model, state = train(
        train_data, epochs=options.epochs, batch_size=options.batch_size, seed=options.seed
    )
    print(f"trained in {perf_counter() - began:.1f} s")

    images = jnp.asarray(test_data.images)
    predictions = np.asarray(predict(nn.inference_mode(model), state, images))
    accuracy = float(np.mean(predictions == test_data.labels))
    print(f"test accuracy {accuracy:.2%}")
    if options.plot:
        plot_confusion(test_data.labels, predictions, options.plot)
        print(f"confusion matrix in {options.plot}")
    return accuracy


if __name__ == "__main__":
    main()
    print("next: read docs/tutorial/1-first-module.md, or examples/README.md for other programs")
