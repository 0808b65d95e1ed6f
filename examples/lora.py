"""Teach a trained network something new with few numbers: low-rank updates (LoRA).

    python examples/lora.py
    python examples/lora.py --rank 2 --epochs 5 --plot accuracy.png

A network learns to read the digits 0 to 4. Then it is frozen, each of its matrices W gets an update
B A of low rank, and only these updates are trained, to read 5 to 9. The model's code does not
change: the matrices are *computed leaves*, which read as W + B A, and a role selects the updates.

It shows `pm.lora` and `pm.resolve`, and how much smaller the optimizer state is. The frozen part
stays the same to the bit, so the first skill returns if you leave out the updates.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import pytreemod as pm
from pytreemod import nn

Model = TypeVar("Model")
Images = Float[Array, "batch 64"]
Labels = Int[Array, " batch"]
EVERYTHING = pm.select.type(nn.MLP)
UPDATES = pm.select.role("lora")


class Split(NamedTuple):
    """Images with their labels, to train on and to test with."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_data(seed: int) -> tuple[Split, Split]:
    """Load the digits 0 to 4, and those from 5 to 9."""
    digits: Any = load_digits()
    images, labels = digits.data.astype(np.float32) / 16, digits.target.astype(np.int32)

    def part(chosen: np.ndarray) -> Split:
        parts: Any = train_test_split(
            images[chosen], labels[chosen], test_size=0.2, random_state=seed
        )
        return Split(parts[0], parts[2], parts[1], parts[3])

    return part(labels < 5), part(labels >= 5)


def loss_fn(model: nn.MLP, images: Images, labels: Labels) -> Float[Array, ""]:
    """Return the mean cross-entropy of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


@pm.filter_jit
def accuracy(model: nn.MLP, images: Images, labels: Labels) -> Float[Array, ""]:
    """Return the share of images whose digit the model reads correctly."""
    return jnp.mean(model(images).argmax(axis=-1) == labels)


def make_step(optimizer: optax.GradientTransformation, wrt: Any) -> Callable[..., Any]:
    """Return the compiled training step for the leaves that `wrt` selects."""

    @pm.filter_jit(donate=("model", "opt_state"))
    def step(model: Any, opt_state: Any, images: Images, labels: Labels) -> tuple[Any, Any]:
        grads = pm.filter_grad(loss_fn, wrt=wrt)(model, images, labels)
        params, _ = pm.trainable(model, wrt)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return pm.apply_updates(model, updates), opt_state

    return step


def size_in_bytes(tree: Any) -> int:
    """Return the bytes of all arrays in a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if pm.is_array(leaf))


class Trained(NamedTuple):
    """The result of a training."""

    model: Any
    accuracies: list[float]
    optimizer_bytes: int


def train(model: Model, data: Split, wrt: Any, options: argparse.Namespace, title: str) -> Trained:
    """Train the leaves that `wrt` selects; measure the accuracy on held-out images per epoch."""
    optimizer = optax.adam(options.learning_rate)
    opt_state = optimizer.init(pm.trainable(model, wrt)[0])
    optimizer_bytes = size_in_bytes(opt_state)
    step, rng, accuracies = make_step(optimizer, wrt), np.random.default_rng(options.seed), []
    # A copy, because the step donates it; the caller's model stays valid.
    model = jax.tree.map(jnp.copy, model)
    # disable=None: no progress bar without a terminal.
    for _ in tqdm(range(options.epochs), desc=title, unit="epoch", disable=None):
        order = rng.permutation(len(data.labels))
        for start in range(0, len(order) - options.batch_size + 1, options.batch_size):
            chosen = order[start : start + options.batch_size]
            model, opt_state = step(model, opt_state, data.images[chosen], data.labels[chosen])
        accuracies.append(float(accuracy(model, data.test_images, data.test_labels)))
    return Trained(model, accuracies, optimizer_bytes)


def base_of(adapted: nn.MLP) -> list[np.ndarray]:
    """Return all numbers that are not part of an update, in the order of the original model."""
    _, frozen = pm.partition(adapted, UPDATES)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(frozen)]


def plot(first: Trained, second: Trained, path: Path) -> None:
    """Save a picture of both accuracies over the epochs."""
    # Imported here, and drawn without pyplot, which needs a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for trained, name in ((first, "0 to 4, all numbers"), (second, "5 to 9, updates alone")):
        epochs = range(1, len(trained.accuracies) + 1)
        axes.plot(epochs, trained.accuracies, label=f"{name}: {trained.optimizer_bytes:,} bytes")
    axes.set(xlabel="epoch", ylabel="accuracy", title="Size of the optimizer state")
    axes.legend()
    figure.savefig(path, dpi=150)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=4, help="the rank of each update")
    parser.add_argument("--alpha", type=float, default=32, help="scale of updates, times the rank")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0, help="same seed, same numbers")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save a picture of the accuracy")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> tuple[Trained, Trained]:
    """Train, adapt, compare; return both trainings."""
    options = parse(arguments)
    low, high = load_data(options.seed)
    key, lora_key = jax.random.split(jax.random.key(options.seed))

    model = nn.MLP(64, 10, options.width, 2, key=key)
    first = train(model, low, EVERYTHING, options, "0 to 4")
    print(f"0 to 4, all numbers trained: accuracy {first.accuracies[-1]:.2%}")

    rank, alpha = options.rank, options.alpha
    adapted = pm.lora(first.model, "layers.*.weight", rank, key=lora_key, alpha=alpha)
    second = train(adapted, high, UPDATES, options, "5 to 9")
    print(f"5 to 9, updates alone: accuracy {second.accuracies[-1]:.2%}")

    pairs = zip(base_of(second.model), jax.tree.leaves(first.model), strict=True)
    is_same = all(np.array_equal(one, other) for one, other in pairs)
    print(f"the base is the same to the bit: {is_same}")
    part = second.optimizer_bytes / first.optimizer_bytes
    print(
        f"optimizer state: {first.optimizer_bytes:,} bytes for all numbers, "
        f"{second.optimizer_bytes:,} for the updates ({part:.1%})"
    )

    merged = pm.resolve(second.model)
    print(f"merged: {len(jax.tree.leaves(merged))} arrays, as before", end=", ")
    print(f"accuracy {float(accuracy(merged, high.test_images, high.test_labels)):.2%}")
    if options.plot:
        plot(first, second, options.plot)
        print(f"accuracy in {options.plot}")
    return first, second


if __name__ == "__main__":
    main()
