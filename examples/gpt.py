"""A small modern language model, trained on the documentation of Python.

    python examples/gpt.py runs/gpt               # ten minutes on two cores
    python examples/gpt.py runs/gpt --minutes 1 --bfloat16
    python examples/gpt.py runs/muon --optimizer muon

It reads bytes, so it needs no tokenizer: it predicts the next byte. Attention has rotary positions
and fewer heads of keys than of queries. The blocks are one `nn.Stack`, traced once and recomputed
in the backward pass. The last matrix is tied to the embedding. Given the same folder again, it
resumes from the last checkpoint. In the end it writes: it reads the prompt at once, then generates
each byte from the caches of the blocks, all of it in one compiled program.

Bits per byte of the held-out text, with the same seed and otherwise the defaults:

    steps    adamw     muon
      200    2.386    2.089
      300    2.104    1.992
"""

import argparse
import functools as ft
import math
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

import pytreemod as pm
from pytreemod import nn

Bytes = Int[Array, "*batch seq"]
BATCH_SIZE = 16


# --- the model ------------------------------------------------------------------------------------


class Block(pm.Module):
    """Attention, then two affine maps with a gate, each with a norm before it."""

    norms: tuple[nn.RMSNorm, nn.RMSNorm]
    attention: nn.MultiheadAttention
    up: nn.Linear
    gate: nn.Linear
    down: nn.Linear

    def __init__(self, size: int, heads: int, cache_size: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        self.norms = (nn.RMSNorm(size, use_bias=False), nn.RMSNorm(size, use_bias=False))
        self.attention = nn.MultiheadAttention(
            heads,
            size,
            num_kv_heads=heads // 2,
            is_causal=True,
            qk_norm="rms",
            rotary=nn.RotaryPositionalEmbedding(size // heads),
            cache_size=cache_size,
            key=keys[0],
        )
        self.up = nn.Linear(size, 2 * size, use_bias=False, key=keys[1])
        self.gate = nn.Linear(size, 2 * size, use_bias=False, key=keys[2])
        self.down = nn.Linear(2 * size, size, use_bias=False, key=keys[3])

    def __call__(self, x: Array, state: nn.State | None = None) -> Any:
        """Apply it; with State it continues its earlier inputs, without, x is complete."""
        seen = self.norms[0](x)
        if state is None:
            found = self.attention(seen)
        else:
            found, state = self.attention(seen, state=state)
        x = x + found
        hidden = self.norms[1](x)
        x = x + self.down(jax.nn.silu(self.gate(hidden)) * self.up(hidden))
        return x if state is None else (x, state)


class Gpt(pm.Module):
    """Maps bytes to the scores of the next one."""

    embed: nn.Embedding
    blocks: nn.Stack[Block]
    norm: nn.RMSNorm
    head: nn.Linear

    def __call__(self, tokens: Bytes, state: nn.State | None = None) -> Any:
        """Return scores for each position; with State, the pair of them and the new State."""
        x = self.embed(tokens)
        if state is None:
            return self.head(self.norm(self.blocks(x)))
        x, state = self.blocks(x, state)
        return self.head(self.norm(x)), state


def make_gpt(size: int, depth: int, heads: int, cache_size: int, *, key: PRNGKeyArray) -> Gpt:
    """Make an untrained model, with its last matrix tied to its first."""
    one, two = jax.random.split(key)
    make_block = ft.partial(Block, size, heads, cache_size)
    narrow = jax.nn.initializers.normal(0.02)
    model = Gpt(
        nn.Embedding(256, size, weight_init=narrow, key=one),
        nn.Stack(make_block, depth, remat=True, key=two),
        nn.RMSNorm(size, use_bias=False),
        nn.Linear(size, 256, use_bias=False, key=one),
    )
    return pm.tie(model, "head.weight", to="embed.weight")


# --- training -------------------------------------------------------------------------------------


# Weights of affine maps decay; the embedding and the scales of the norms do not.
adamw = optax.adamw(
    optax.linear_schedule(0.0, 2e-3, transition_steps=50),
    b2=0.98,
    weight_decay=0.1,
    mask=pm.select.type(nn.Linear),
)
# For the matrix of each layer of the Stack; its first axis is the layer's output.
muon = optax.contrib.muon(
    optax.linear_schedule(0.0, 2e-2, transition_steps=50),
    weight_decay=0.1,
    muon_weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 0),
)
matrices = pm.matrices & pm.select.path("blocks")
RULES = {"adamw": adamw, "muon": pm.by({matrices: pm.per_layer(muon), ...: adamw})}


def make_optimizer(name: str, model: Gpt) -> pm.Optimizer:
    """Make the optimizer of a name; it clips the gradients first."""
    return pm.Optimizer(RULES[name], before=optax.clip_by_global_norm(1.0)).init(model)


def bits(model: Gpt, text: Bytes) -> Float[Array, ""]:
    """Return the mean number of bits to encode each next byte."""
    scores = model(text[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, text[:, 1:])
    return losses.mean() / math.log(2)


@pm.filter_jit(donate=("model", "opt"))
def step(model: Gpt, opt: pm.Optimizer, text: Bytes, dtype: Any) -> tuple[Any, ...]:
    """Take a training step, computed in a dtype, with the weights in float32."""

    def loss_fn(model: Gpt) -> Float[Array, ""]:
        return bits(jax.tree.map(lambda leaf: leaf.astype(dtype), model), text)

    loss, grads = pm.filter_value_and_grad(loss_fn)(model)
    return *opt.update(model, grads=grads), loss


class Run(NamedTuple):
    """Everything that training changes."""

    step: int
    model: Gpt
    opt: pm.Optimizer


def batch_of(text: np.ndarray, length: int, number: int) -> np.ndarray:
    """Return pieces of the text by the number of the step: a resumed run takes the same ones."""
    starts = np.random.default_rng(number).integers(0, len(text) - length - 1, BATCH_SIZE)
    return text[starts[:, None] + np.arange(length + 1)]


def train(run: Run, text: np.ndarray, options: argparse.Namespace, save: Any) -> Run:
    """Train while there is time; regularly report the loss and save a checkpoint."""
    start, dtype = time.monotonic(), jnp.bfloat16 if options.bfloat16 else jnp.float32
    losses: list[Any] = []
    while (spent := (time.monotonic() - start) / 60) < options.minutes:
        batch = batch_of(text, options.length, run.step)
        model, opt, loss = step(run.model, run.opt, batch, dtype)
        run = Run(run.step + 1, model, opt)
        losses.append(loss)
        if run.step % options.every == 0:
            mean = float(np.mean(losses))
            print(f"step {run.step}, {60 * spent:.0f} s: {mean:.3f} bits per byte", flush=True)
            losses = []
            save(run.step, run)
    return run


measure = pm.filter_jit(bits)


def held_out(model: Gpt, text: np.ndarray, length: int) -> float:
    """Return the bits per byte of held-out text, piece by piece."""
    count = (len(text) - 1) // length
    pieces = text[: count * length + 1]
    rows = pieces[np.arange(count)[:, None] * length + np.arange(length + 1)]
    found = [float(measure(model, rows[i : i + 16])) for i in range(0, max(1, count - 15), 16)]
    return sum(found) / len(found)


# --- writing --------------------------------------------------------------------------------------


@pm.filter_jit
def write(
    model: Gpt, state: nn.State, prompt: Bytes, count: int, warmth: float, key: PRNGKeyArray
) -> tuple[Bytes, nn.State]:
    """Generate bytes after a prompt: read it at once, and then each new byte."""

    def draw(scores: Array, key: PRNGKeyArray) -> Array:
        return jax.random.categorical(key, scores[:, -1].astype(jnp.float32) / warmth)

    def next_one(carry: Any, key: PRNGKeyArray) -> Any:
        token, state = carry
        scores, state = model(token[:, None], state)
        return (draw(scores, key), state), token

    first, *keys = jax.random.split(key, count + 1)
    scores, state = model(prompt, nn.reset_cache(model, state, batch=prompt.shape[0]))
    carry = (draw(scores, first), state)
    (_, state), written = pm.filter_scan(next_one, carry, jnp.stack(keys))
    return written.T, state


# --- the command ----------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the checkpoints")
    parser.add_argument("--minutes", type=float, default=10.0, help="of training")
    parser.add_argument("--every", type=int, default=100, help="steps between two saves")
    for name, number in {"size": 128, "depth": 4, "heads": 4, "length": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--optimizer", choices=[*RULES], default="adamw")
    parser.add_argument("--bfloat16", action="store_true", help="compute in half precision")
    parser.add_argument("--prompt", default="The assignment statement ")
    parser.add_argument("--write", type=int, default=200, help="how many bytes to write")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, measure on the held-out text, and write."""
    options = parse(arguments)
    text = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    text, held = text[: 9 * len(text) // 10].astype(np.int32), text[9 * len(text) // 10 :]
    room = len(options.prompt.encode()) + options.write
    sizes = (options.size, options.depth, options.heads, room)
    model, state = pm.make_with_state(make_gpt)(*sizes, key=jax.random.key(0))
    run = Run(0, model, make_optimizer(options.optimizer, model))
    with pm.Checkpoints(options.folder) as checkpoints:
        if checkpoints.steps():
            run = checkpoints.restore(run)
            print(f"goes on from step {run.step}")
        run = train(run, text, options, checkpoints.save)
    found = held_out(run.model, held.astype(np.int32), options.length)
    print(f"{found:.3f} bits per byte of held-out text after {run.step} steps")
    prompt = np.frombuffer(options.prompt.encode(), np.uint8).astype(np.int32)[None]
    written, _ = write(run.model, state, prompt, options.write, 0.7, jax.random.key(1))
    print(options.prompt + bytes(np.asarray(written[0], np.uint8)).decode(errors="replace"))
    return found


if __name__ == "__main__":
    main()
