"""A variational autoencoder draws handwritten digits, and estimates the likelihood of real ones.

    python examples/vae.py                        # about half a minute on two cores
    python examples/vae.py --epochs 20 --plot digits.png

The model owns its randomness: it has an `RngStream`, a token, for which the State makes a new key
at each call. So the loss takes no key, and no step splits one. Many draws for the same images bound
their likelihood more closely. For these, the net is split into many members, each with its own
stream.

A pixel of scikit-learn's 1,797 digits counts the black ones of sixteen finer pixels. So the decoder
returns the probability of black for each pixel, and the likelihood is binomial. The program prints
a bound on the log likelihood of a complete image, in nats, not only a loss. After 60 epochs it is
-100 for held-out digits, and -96 with 100 draws for each. Independent pixels, each with its own
probability of black, reach -254.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.special import gammaln
from jax.scipy.stats import norm
from jaxtyping import Array, Float, PRNGKeyArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import pytreemod as pm
from pytreemod import nn

Images = Float[Array, "batch 1 8 8"]
Codes = Float[Array, "batch code"]
LEVELS = 16  # a pixel counts the black ones among this many


# --- the model ----------------------------------------------------------------------------------


class Encoder(pm.Module):
    """Maps images to distributions of codes: a mean and the logarithm of a standard deviation."""

    convs: tuple[nn.Conv2d, nn.Conv2d]
    head: nn.Linear

    def __init__(self, size: int, *, key: PRNGKeyArray):
        keys = pm.init_keys(key)
        halve = {"kernel_size": 3, "stride": 2, "padding": 1}
        self.convs = (
            nn.Conv2d(1, 32, **halve, key=next(keys)),
            nn.Conv2d(32, 64, **halve, key=next(keys)),
        )
        self.head = nn.Linear(64 * 2 * 2, 2 * size, key=next(keys))

    def __call__(self, images: Images) -> tuple[Codes, Codes]:
        """Apply it; all layers accept a batch."""
        x = images / LEVELS
        for conv in self.convs:
            x = jax.nn.silu(conv(x))
        mean, log_deviation = jnp.split(self.head(x.reshape(len(x), -1)), 2, axis=-1)
        return mean, log_deviation


class Decoder(pm.Module):
    """Maps codes to the log odds of black in each pixel."""

    head: nn.Linear
    convs: tuple[nn.ConvTranspose2d, nn.ConvTranspose2d]

    def __init__(self, size: int, *, key: PRNGKeyArray):
        keys = pm.init_keys(key)
        double = {"kernel_size": 4, "stride": 2, "padding": 1}
        self.head = nn.Linear(size, 64 * 2 * 2, key=next(keys))
        self.convs = (
            nn.ConvTranspose2d(64, 32, **double, key=next(keys)),
            nn.ConvTranspose2d(32, 1, **double, key=next(keys)),
        )

    def __call__(self, codes: Codes) -> Images:
        """Return the output of the last layer, which are log odds, without an activation."""
        x = self.head(codes).reshape(len(codes), 64, 2, 2)
        for conv in self.convs:
            x = conv(jax.nn.silu(x))
        return x


def log_binomial(images: Images, log_odds: Images) -> Float[Array, " batch"]:
    """Return the log likelihood of images, whose pixels are counts out of `LEVELS`."""
    ways = gammaln(LEVELS + 1.0) - gammaln(images + 1) - gammaln(LEVELS - images + 1)
    black, white = jax.nn.log_sigmoid(log_odds), jax.nn.log_sigmoid(-log_odds)
    return (ways + images * black + (LEVELS - images) * white).sum(axis=(1, 2, 3))


class Vae(pm.Module):
    """Encoder, decoder, and a stream of random numbers between them."""

    encoder: Encoder
    decoder: Decoder
    noise: pm.RngStream

    def __init__(self, size: int, *, key: PRNGKeyArray):
        keys = pm.init_keys(key)
        self.encoder = Encoder(size, key=next(keys))
        self.decoder = Decoder(size, key=next(keys))
        self.noise = pm.RngStream()

    def __call__(self, images: Images, state: pm.State) -> tuple[Float[Array, " batch"], pm.State]:
        """Draw one code for each image; return log p(image, code) - log q(code).

        Its mean is the evidence lower bound. The mean of its exponential is the likelihood itself.
        """
        mean, log_deviation = self.encoder(images)
        deviation = jnp.exp(log_deviation)
        key, state = state.next_key(self.noise)
        codes = mean + deviation * jax.random.normal(key, mean.shape)
        prior, drawn = norm.logpdf(codes), norm.logpdf(codes, mean, deviation)
        odds = self.decoder(codes)
        return log_binomial(images, odds) + (prior - drawn).sum(axis=-1), state


Net = nn.Stateful[Vae]


# --- training and testing -----------------------------------------------------------------------


def loss_fn(net: Net, images: Images) -> tuple[Float[Array, ""], Net]:
    """Return the negative bound, and the net with its new State."""
    weights, net = net(images)
    return -weights.mean(), net


@pm.filter_jit(donate=("net", "opt"))
def step(net: Net, opt: pm.Optimizer, images: Images) -> tuple[Net, pm.Optimizer, Array]:
    """Take one training step."""
    (loss, net), grads = pm.filter_value_and_grad(loss_fn, has_aux=True)(net, images)
    net, opt = opt.update(net, grads=grads)
    return net, opt, loss


class Bounds(NamedTuple):
    """Lower bounds of the mean log likelihood of images; the second is closer."""

    elbo: float
    many: float


@pm.filter_jit
def bounds(net: Net, images: Images, draws: int) -> tuple[tuple[Array, Array], Net]:
    """Return the bounds with one draw for each image, and with many: a vmap over the streams."""
    each = pm.by({pm.RngStream: 0, ...: None})
    call = pm.filter_vmap(lambda net: net(images), in_axes=(each,), out_axes=(0, each))
    weights, net = call(net.split(draws))
    closer = jax.nn.logsumexp(weights, axis=0) - jnp.log(draws)
    return (weights.mean(), closer.mean()), net.join()


def train(net: Net, images: np.ndarray, options: argparse.Namespace) -> Net:
    """Train, and print a line regularly."""
    size, rng = options.batch_size, np.random.default_rng(options.seed)
    steps = options.epochs * (len(images) // size)
    opt = pm.Optimizer(optax.adam(optax.cosine_decay_schedule(3e-3, steps))).init(net)
    # disable=None: no progress bar without a terminal.
    with tqdm(total=steps, unit="step", disable=None) as bar:
        for epoch in range(1, options.epochs + 1):
            order, losses = rng.permutation(len(images)), []
            for start in range(0, len(images) - size + 1, size):
                net, opt, loss = step(net, opt, images[order[start : start + size]])
                losses.append(loss)
                bar.update()
            if epoch % max(1, options.epochs // 6) == 0:
                elbo = -float(np.mean(jax.device_get(losses)))
                tqdm.write(f"epoch {epoch:3d}   bound {elbo:7.1f} nats per digit")
    return net


def load_data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Load counts of black pixels: four fifths to train on, and one fifth to test with."""
    digits: Any = load_digits()
    images = digits.images[:, None].astype(np.float32)
    parts: Any = train_test_split(images, test_size=0.2, stratify=digits.target, random_state=seed)
    return tuple(parts)


def without_codes(images: np.ndarray, held: np.ndarray) -> float:
    """Return the log likelihood of images with independent pixels."""
    # Add half a count each of black and white, so that nothing is impossible.
    share = (images.sum(axis=0) + 0.5) / (LEVELS * len(images) + 1)
    return float(log_binomial(held, jnp.log(share / (1 - share))).mean())


# --- the command --------------------------------------------------------------------------------


def plot(model: Vae, held: np.ndarray, path: Path, key: PRNGKeyArray) -> None:
    """Save a picture: new digits, and paths from one real digit to another."""
    # Imported here, and drawn without pyplot, which needs a display.
    from matplotlib.figure import Figure

    means, _ = model.encoder(jnp.asarray(held[:20]))
    share = jnp.linspace(0, 1, 10)[:, None]
    walks = [(1 - share) * means[2 * i] + share * means[2 * i + 1] for i in range(10)]
    drawn = jax.random.normal(key, (100, means.shape[1]))
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    titles = "drawn from the prior", "each row a walk from one code to another"
    for axes, codes, title in zip(figure.subplots(1, 2), (drawn, jnp.concatenate(walks)), titles):
        black = np.asarray(jax.nn.sigmoid(model.decoder(codes))).reshape(10, 10, 8, 8)
        # A white margin, or digits above each other would join.
        tiles = np.pad(black, ((0, 0), (0, 0), (2, 2), (1, 1))).swapaxes(1, 2)
        axes.imshow(tiles.reshape(120, 100), cmap="gray_r", vmin=0, vmax=1)
        axes.set(title=title, xticks=(), yticks=())
    figure.savefig(path, dpi=150)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=8, help="numbers in a code")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--draws", type=int, default=100, help="for the closer bound")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same numbers")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save a picture of digits")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> Bounds:
    """Train, and bound the likelihood of the held-out images."""
    options = parse(arguments)
    images, held = load_data(options.seed)
    model_key, noise_key, key = jax.random.split(jax.random.key(options.seed), 3)
    net = pm.stateful(Vae(options.size, key=model_key)).seed(noise_key)
    net = train(net, images, options)
    numbers, net = bounds(net, jnp.asarray(held), options.draws)
    found = Bounds(*map(float, numbers))
    print(f"held out: bound {found.elbo:.1f} nats per digit, {found.many:.1f} by many draws")
    print(f"pixels by themselves: {without_codes(images, held):.1f} nats per digit")
    if options.plot:
        plot(net.model, held, options.plot, key)
        print(f"digits in {options.plot}")
    return found


if __name__ == "__main__":
    main()
