"""Deep Q-learning: an environment is a Module, and a complete run is one scan.

    python examples/dqn.py
    python examples/dqn.py --steps 10000 --seed 1 --plot cartpole.png

A cart balances a pole, and is pushed to the left or to the right, fifty times a second. The network
gets no rules: it learns the worth of each push, which is how much of the future the pole will be
upright. After ten seconds of training on two cores, 100 new poles stay upright for the complete
test of ten seconds.

The cart is a Module whose methods are its physics; the memory is a Module with a ring of arrays;
both are values, like the network and the optimizer. So acting, remembering and learning are one
function from a `Run` to the next one, and a thousand of its steps are one call of compiled code.

The physics are those of Barto, Sutton & Anderson 1983, with the usual numbers; the learning is that
of Mnih et al. 2015, with the double estimate of van Hasselt et al. 2016.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from tqdm import tqdm

import pytreemod as pm
from pytreemod import nn

Observation = Float[Array, "carts 4"]
DISCOUNT, BATCH, FOLLOW = 0.99, 256, 0.02
CURIOUS_FOR, CURIOUS_AT_LAST, LONGEST = 1500, 0.02, 500


# --- the environment ----------------------------------------------------------------------------


class CartPole(pm.Module):
    """A cart on a rail with a pole on it. The state is not in it: its methods take the state."""

    gravity: float = pm.field(default=9.8, static=True)
    cart_mass: float = pm.field(default=1.0, static=True)
    pole_mass: float = pm.field(default=0.1, static=True)
    half_length: float = pm.field(default=0.5, static=True)
    force: float = pm.field(default=10.0, static=True)
    seconds: float = pm.field(default=0.02, static=True)
    rail: float = pm.field(default=2.4, static=True)
    angle: float = pm.field(default=12 * np.pi / 180, static=True)

    def reset(self, key: PRNGKeyArray) -> Float[Array, "4"]:
        """Return a state that is nearly upright, with little motion."""
        return jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)

    def step(self, now: Float[Array, "4"], push: Int[Array, ""]) -> tuple[Array, Bool[Array, ""]]:
        """Return the state a fiftieth of a second later, and whether the pole has fallen."""
        _, speed, angle, turning = now
        force = jnp.where(push == 1, self.force, -self.force)
        mass = self.cart_mass + self.pole_mass
        pull = force + self.pole_mass * self.half_length * turning**2 * jnp.sin(angle)
        inertia = 4 / 3 - self.pole_mass * jnp.cos(angle) ** 2 / mass
        bend = self.gravity * jnp.sin(angle) - jnp.cos(angle) * pull / mass
        bend = bend / (self.half_length * inertia)
        push_back = self.pole_mass * self.half_length * bend * jnp.cos(angle)
        change = jnp.stack([speed, (pull - push_back) / mass, turning, bend])
        new = now + self.seconds * change
        return new, (jnp.abs(new[0]) > self.rail) | (jnp.abs(new[2]) > self.angle)


# --- the memory ---------------------------------------------------------------------------------


class Moments(NamedTuple):
    """The transitions of several carts at one moment."""

    before: Observation
    push: Int[Array, " carts"]
    after: Observation
    has_fallen: Bool[Array, " carts"]


class Memory(pm.Module):
    """The last moments, as a ring: a new one replaces the oldest."""

    ring: Moments
    count: Int[Array, ""]

    def __init__(self, size: int, carts: int):
        seen, push = jnp.zeros((size, carts, 4)), jnp.zeros((size, carts), jnp.int32)
        self.ring = Moments(seen, push, seen + 0.0, push > 0)
        self.count = jnp.zeros((), jnp.int32)

    def remember(self, moments: Moments) -> "Memory":
        """Return the memory with these moments added."""
        size = len(self.ring.push)
        row = self.count % size
        ring = jax.tree.map(lambda kept, new: kept.at[row].set(new), self.ring, moments)
        return self.replace(ring=ring, count=self.count + 1)

    def recall(self, n: int, key: PRNGKeyArray) -> Moments:
        """Sample some moments."""
        size, carts = self.ring.push.shape
        keys = jax.random.split(key)
        rows = jax.random.randint(keys[0], (n,), 0, jnp.minimum(self.count, size))
        columns = jax.random.randint(keys[1], (n,), 0, carts)
        return jax.tree.map(lambda kept: kept[rows, columns], self.ring)


# --- learning -----------------------------------------------------------------------------------


class Run(pm.Module):
    """The complete state of a run between two steps."""

    net: nn.MLP
    target: nn.MLP
    optimizer: pm.Optimizer
    memory: Memory
    now: Observation
    age: Int[Array, " carts"]
    key: PRNGKeyArray


def surprise(net: nn.MLP, target: nn.MLP, moments: Moments) -> Float[Array, ""]:
    """Return the error of the worth of pushes, given the next moment."""
    # The network chooses, and its slower copy judges: the maximum of one network is too large.
    best = jnp.argmax(net(moments.after), axis=-1)
    worth = jnp.take_along_axis(target(moments.after), best[:, None], axis=-1)[:, 0]
    # A pole that never falls is worth 1.
    told = (1 - DISCOUNT) + DISCOUNT * jnp.where(moments.has_fallen, 0.0, worth)
    guess = jnp.take_along_axis(net(moments.before), moments.push[:, None], axis=-1)[:, 0]
    return jnp.mean(optax.losses.squared_error(guess, jax.lax.stop_gradient(told)))


def advance(run: Run, cart: CartPole) -> tuple[Run, tuple[Float[Array, " carts"], Array]]:
    """Push every cart once, remember, learn once."""
    key, dice, coin, start, recall = jax.random.split(run.key, 5)
    carts = len(run.now)
    rate = jnp.maximum(CURIOUS_AT_LAST, 1 - run.memory.count / CURIOUS_FOR)
    curious = jax.random.bernoulli(dice, rate, (carts,))
    best = jnp.argmax(run.net(run.now), axis=-1)
    push = jnp.where(curious, jax.random.randint(coin, (carts,), 0, 2), best)

    after, has_fallen = jax.vmap(cart.step)(run.now, push)
    memory = run.memory.remember(Moments(run.now, push, after, has_fallen))
    # A pole that was upright for long enough starts again, but has not fallen: its worth continues.
    ends = has_fallen | (run.age + 1 >= LONGEST)
    fresh = jax.vmap(cart.reset)(jax.random.split(start, carts))
    now = jnp.where(ends[:, None], fresh, after)
    lengths = jnp.where(ends, run.age + 1.0, jnp.nan)

    recalled = memory.recall(BATCH, recall)
    loss, grads = pm.filter_value_and_grad(surprise)(run.net, run.target, recalled)
    net, optimizer = run.optimizer.update(run.net, grads=grads)
    # A slower copy, a little nearer to the network.
    target = optax.incremental_update(net, run.target, FOLLOW)
    age = jnp.where(ends, 0, run.age + 1)
    return Run(net, target, optimizer, memory, now, age, key), (lengths, loss)


@pm.filter_jit(donate="run")
def advance_many(run: Run, cart: CartPole, steps: int) -> tuple[Run, tuple[Array, Array]]:
    """Take many steps in one call; the other results of each step are stacked."""
    return pm.filter_scan(lambda run, _: advance(run, cart), run, None, length=steps)


@pm.filter_jit
def watch(net: nn.MLP, cart: CartPole, key: PRNGKeyArray, steps: int) -> tuple[Array, Array]:
    """Return the angles of 100 poles under the best pushes, and how long each one was upright."""

    def move(carry: Any, _: None) -> tuple[Any, Any]:
        now, has_fallen = carry
        after, falls = jax.vmap(cart.step)(now, jnp.argmax(net(now), axis=-1))
        now = jnp.where(has_fallen[:, None], now, after)
        return (now, has_fallen | falls), (now[:, 2], ~has_fallen)

    now = jax.vmap(cart.reset)(jax.random.split(key, 100))
    _, (angles, stands) = pm.filter_scan(move, (now, jnp.zeros(100, bool)), None, length=steps)
    return angles, jnp.sum(stands, axis=0)


def plot(file: Path, means: list[float], chunk: int, angles: np.ndarray) -> None:
    """Draw how long poles were upright during training, and how the new ones move."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(chunk * np.arange(1, len(means) + 1), means)
    left.set(xlabel="steps of the optimizer", ylabel="moments until a pole falls", ylim=(0, None))
    right.plot(CartPole().seconds * np.arange(len(angles)), np.degrees(angles[:, :20]))
    right.set(xlabel="seconds", ylabel="degrees from upright", title="20 new poles")
    figure.savefig(file, dpi=150)


# --- the program --------------------------------------------------------------------------------


def make_run(args: argparse.Namespace) -> Run:
    """Return the state before the first step."""
    keys = pm.init_keys(jax.random.key(args.seed))
    net = nn.MLP(4, 2, width_size=args.width, depth=2, key=keys)
    rate = optax.cosine_decay_schedule(args.learning_rate, args.steps)
    rule = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(rate))
    return Run(
        net=net,
        # Its own copy: a donated array may occur only once.
        target=jax.tree.map(jnp.copy, net),
        optimizer=pm.Optimizer(rule).init(net),
        memory=Memory(args.memory // args.carts, args.carts),
        now=jax.vmap(CartPole().reset)(keys.take(args.carts)),
        age=jnp.zeros(args.carts, jnp.int32),
        key=next(keys),
    )


def main(argv: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000, help="steps of the optimizer")
    parser.add_argument("--carts", type=int, default=8, help="carts that run in parallel")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--memory", type=int, default=50_000, help="moments in the memory")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="where to draw how long poles were upright")
    args = parser.parse_args(argv)
    run, cart, chunk = make_run(args), CartPole(), min(500, args.steps)
    began = perf_counter()
    means: list[float] = []
    with tqdm(total=args.steps // chunk * chunk, unit="step", disable=None) as bar:
        for _ in range(args.steps // chunk):
            run, (lengths, losses) = advance_many(run, cart, chunk)
            ended = np.asarray(lengths)[~np.isnan(lengths)]
            means.append(float(ended.mean()) if len(ended) else LONGEST)
            bar.set_postfix(stood=f"{means[-1]:.0f} steps", loss=f"{float(losses.mean()):.3f}")
            bar.update(chunk)
    print(f"{len(means) * chunk * args.carts:,} pushes in {perf_counter() - began:.1f} s")
    angles, stood = watch(run.net, cart, jax.random.key(args.seed + 1), LONGEST)
    whole = int((stood >= LONGEST).sum())
    print(f"100 new poles: {stood.mean():.1f} of {LONGEST} steps on average, {whole} never fell")
    if args.plot:
        plot(args.plot, means, chunk, np.asarray(angles))
    return run, means, np.asarray(stood)


if __name__ == "__main__":
    main()
