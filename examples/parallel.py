"""A small transformer trained on eight devices in four ways: each gives the losses of one device.

    python examples/parallel.py                   # all four
    python examples/parallel.py --mode fsdp

- **data**: each device has the whole model and a part of the batch.
- **fsdp**: the batch is split, and so is each matrix. A matrix is gathered where it is used, and
  again in the backward pass.
- **tensor**: each device has some heads, and some of the hidden units between `up` and `down`.
- **pipeline**: each device has some layers. Parts of the batch go from one device to the next.

A mode is a table from names of axes to devices, and a spec for the batch. The model and the
training step are those of one device. In the pipeline, a Module replaces the `Stack`, and says what
each device does.

After 20 steps, with eight devices that JAX makes of one CPU:

    mode         last loss   furthest   bytes on each   collectives
    one device    2.717103    0.0e+00       3,315,712   none
    data          2.717104    2.1e-06       3,315,712   2 all-reduce
    fsdp          2.717104    2.1e-06         448,512   14 all-gather, 2 all-reduce
    tensor        2.717103    9.5e-07         548,864   4 all-reduce
    pipeline      2.717103    7.2e-07         530,944   2 all-reduce, 2 collective-permute

"furthest" is the largest difference of a loss from that of one device. Collectives are counted in
the compiled step, where a loop over layers counts once. There are no more of them than in a program
written by hand with `jax.shard_map`, and they move no more numbers.
"""

import argparse
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

import pytreemod as pm
from pytreemod import nn

Bytes = Int[Array, "batch seq"]
Hidden = Float[Array, "batch seq embed"]
AXIS = "devices"
DEVICES, HEADS, VOCABULARY = 8, 8, 128
BATCH_SIZE, LENGTH = 32, 32


# --- the model ------------------------------------------------------------------------------------


class Block(pm.Module):
    """Attention, then two affine maps, each of a normalized input."""

    norms: tuple[nn.LayerNorm, nn.LayerNorm]
    attention: nn.MultiheadAttention
    up: nn.Linear
    down: nn.Linear

    def __init__(self, size: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.norms = (nn.LayerNorm(size), nn.LayerNorm(size))
        # Without positions: a causal mask is enough to find them out.
        self.attention = nn.MultiheadAttention(HEADS, size, is_causal=True, key=keys[0])
        self.up = nn.Linear(size, 4 * size, key=keys[1])
        self.down = nn.Linear(4 * size, size, key=keys[2])

    def __call__(self, x: Hidden) -> Hidden:
        """One layer."""
        x = x + self.attention(self.norms[0](x))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Transformer(pm.Module):
    """From bytes to the scores of those that may come next."""

    embedding: nn.Embedding
    blocks: Any  # a Stack, or what does as a Stack does
    norm: nn.LayerNorm
    head: nn.Linear

    def __init__(self, size: int, depth: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.embedding = nn.Embedding(VOCABULARY, size, key=keys[0])
        self.blocks = nn.Stack(lambda key: Block(size, key=key), depth, key=keys[1])
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, VOCABULARY, key=keys[2])

    def __call__(self, tokens: Bytes) -> Float[Array, "batch seq vocabulary"]:
        """Scores for each position."""
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


# The library's layers call their axes out_features and in_features: here they get names that say
# what they are for.
NAMES = pm.by(
    {
        "embedding.weight": "vocabulary embed",
        "head.weight": "vocabulary embed",
        "**.query_proj.weight": "heads embed",
        "**.key_proj.weight": "heads embed",
        "**.value_proj.weight": "heads embed",
        "**.output_proj.weight": "embed heads",
        "**.up.weight": "mlp embed",
        "**.up.bias": "mlp",
        "**.down.weight": "embed mlp",
        ...: None,
    }
)


def make_model(size: int, depth: int, *, key: PRNGKeyArray) -> Transformer:
    """An untrained model, with names for its axes."""
    return pm.with_axis_names(Transformer(size, depth, key=key), NAMES)


# --- the modes ------------------------------------------------------------------------------------


class Pipeline(pm.Module):
    """A Stack whose layers are spread over the devices, and which is given a batch in parts.

    At each tick a device applies its layers to what the one before it has passed on, and passes on
    the result. The first device takes a new part each time, the last one has the results.
    """

    stack: nn.Stack[Block]
    parts: int = pm.field(default=8, static=True)

    def __call__(self, x: Hidden) -> Hidden:
        """All layers."""

        @pm.filter_shard_map(in_specs={"layers": P(AXIS)}, out_specs=None)
        def run(layers: Block, parts: Float[Array, "parts batch seq embed"]) -> Array:
            device, count = jax.lax.axis_index(AXIS), jax.lax.axis_size(AXIS)
            # Each device has a copy of its own, so that gradients are summed once, at the end.
            parts = jax.lax.pcast(parts, AXIS, to="varying")

            def tick(passed: Hidden, number: Array) -> tuple[Hidden, Hidden]:
                part = parts[jnp.minimum(number, self.parts - 1)]
                x = jnp.where(device == 0, part, passed)
                x, _ = pm.filter_scan(lambda x, block: (block(x), None), x, layers)
                return jax.lax.ppermute(x, AXIS, [(i, i + 1) for i in range(count - 1)]), x

            ticks = jnp.arange(self.parts + count - 1)
            _, done = pm.filter_scan(tick, jnp.zeros_like(parts[0]), ticks)
            return jax.lax.psum(jnp.where(device == count - 1, done[count - 1 :], 0), AXIS)

        return run(self.stack.layer, x.reshape(self.parts, -1, *x.shape[1:])).reshape(x.shape)


class Mode(NamedTuple):
    """How the work is divided between the devices.

    Attributes:
        rules: which axes of the model are split.
        batch: how a batch is split.
        blocks: what the Stack is replaced by.
    """

    rules: pm.AxisRules
    batch: P
    blocks: Callable[[nn.Stack[Block]], Any] = lambda stack: stack


MODES = {
    "data": Mode(pm.AxisRules({}), P(AXIS)),
    "fsdp": Mode(pm.AxisRules({"embed": AXIS}), P(AXIS)),
    "tensor": Mode(pm.AxisRules({"heads": AXIS, "mlp": AXIS}), P()),
    "pipeline": Mode(pm.AxisRules({"layers": AXIS}), P(), Pipeline),
}


# --- training -------------------------------------------------------------------------------------

# Not Adam, which divides by the size of a gradient: one that is eight times too large would not
# show in the losses.
sgd = optax.sgd(0.1, momentum=0.9)


def loss_fn(model: Transformer, text: Bytes) -> Float[Array, ""]:
    """How badly each next byte is guessed, on average."""
    scores = model(text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, text[:, 1:]).mean()


@pm.filter_jit
def step(model: Transformer, opt: pm.Optimizer, text: Bytes) -> tuple[Any, ...]:
    """A step of training, on any number of devices."""
    loss, grads = pm.filter_value_and_grad(loss_fn)(model, text)
    return *opt.update(model, grads=grads), loss


class Trained(NamedTuple):
    """What training gives."""

    model: Transformer
    losses: np.ndarray
    bytes_on_each: int
    program: Any  # the compiled step


def batches(count: int) -> Iterator[np.ndarray]:
    """Pieces of the texts that Python explains itself with, and the byte after each."""
    text = np.frombuffer("".join(topics.values()).encode("ascii", "replace"), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(text) - LENGTH - 1, (count, BATCH_SIZE, 1))
    yield from text[starts + np.arange(LENGTH + 1)].astype(np.int32)


def collectives(program: str) -> Counter[str]:
    """How often the devices of a compiled program talk to each other; a loop counts once."""
    kinds = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
    return Counter(re.findall(rf" = .*? ({kinds})(?:-start)?\(", program))


def bytes_on(device: jax.Device, tree: Any) -> int:
    """How many bytes of a tree's arrays are on a device."""
    shards = [shard for array in jax.tree.leaves(tree) for shard in array.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def train(model: Transformer, mode: Mode | None, steps: int) -> Trained:
    """Train as a mode says; without one, on one device."""
    mesh = jax.make_mesh((DEVICES,), (AXIS,), axis_types=(AxisType.Explicit,))
    if mode:
        model = model.replace(blocks=mode.blocks(model.blocks))
    opt = pm.Optimizer(sgd).init(model)
    losses: list[float] = []
    compiled: Any = None
    with jax.set_mesh(mesh) if mode else contextlib.nullcontext():
        if mode:
            where = pm.shardings((model, opt), mesh, mode.rules)
            model, opt = pm.filter_shard((model, opt), where)
        for text in batches(steps):
            text = jax.device_put(text, mode and mode.batch)
            compiled = compiled or step.lower(model, opt, text).compile()
            model, opt, loss = compiled(model, opt, text)
            # Waited for: with several programs under way, devices that are threads of few cores
            # may wait for each other without end. Real devices need no wait.
            losses.append(float(loss))
    held = bytes_on(jax.devices()[0], (model, opt))
    return Trained(model, np.array(losses), held, compiled)


# --- the command ----------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=[*MODES, "all"], default="all")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=64, help="a multiple of eight")
    parser.add_argument("--depth", type=int, default=8, help="a multiple of eight")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> dict[str, Trained]:
    """Train on one device, then in each mode that is asked for; print a table."""
    options = parse(arguments)
    if len(jax.devices()) < DEVICES:
        raise SystemExit(f"eight devices are needed, and JAX has {len(jax.devices())}")
    make = pm.filter_jit(make_model)
    model = make(options.size, options.depth, key=jax.random.key(0))
    chosen = MODES if options.mode == "all" else {options.mode: MODES[options.mode]}
    results: dict[str, Trained] = {}
    print("mode         last loss   furthest   bytes on each   collectives")
    for name, mode in {"one device": None, **chosen}.items():
        trained = results[name] = train(model, mode, options.steps)
        furthest = np.abs(trained.losses - results["one device"].losses).max()
        talk = collectives(trained.program.as_text())
        shown = ", ".join(f"{count} {kind}" for kind, count in sorted(talk.items()))
        print(
            f"{name:10s}   {trained.losses[-1]:9.6f}   {furthest:8.1e}"
            f"   {trained.bytes_on_each:13,}   {shown or 'none'}",
            flush=True,
        )
    return results


if __name__ == "__main__":
    # Before JAX starts, which it does when it is first asked for an array or a device.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    main()
