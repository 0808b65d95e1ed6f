"""The function of the heads and layers of a language model: each table is one compiled program.

    python examples/interpret.py runs/gpt                  # trained by gpt.py
    python examples/interpret.py runs/small --minutes 1    # trains one first
    python examples/interpret.py runs/gpt --plot interpret.png

First it switches off each head of each layer: how many more bits does the held-out text take? Then
the model reads a prompt, while one layer at one position gets its output for another prompt. How
far do the scores of the next byte move to the other prompt's? Each table is one compiled program.
In it, the indices of the layer, the head and the position are data: `pm.intervene` under
`filter_vmap`. The model is that of `gpt.py`, which needs no change for this.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import pytreemod as pm

SHADES = " .:-=+*#%@"

# --- heads ----------------------------------------------------------------------------------------


def cut_head(where: Any, num_heads: int, given: Any, at: Any, value: None) -> Any:
    """Return the input of attention's last matrix, without one head of one layer."""
    (layer, head), ((found,), kwargs) = where, given
    heads = found.reshape(*found.shape[:-1], num_heads, -1)
    is_off = (at.layer == layer) & (jnp.arange(num_heads) == head)
    return (jnp.where(is_off[:, None], 0, heads).reshape(found.shape),), kwargs


@pm.filter_jit
def head_effects(model: gpt.Gpt, text: gpt.Bytes) -> Float[Array, "layers heads"]:
    """Return how many bits per byte more the text takes without each head."""
    num_heads = model.blocks.layer.attention.num_heads

    def bits_without(layer: Array, head: Array) -> Array:
        cut = pm.Partial(cut_head, (layer, head), num_heads)
        rule = pm.by({"blocks.layer.attention.output_proj": cut})
        return pm.intervene(gpt.bits, rule, inputs=True)(model, text)

    of_layer = pm.filter_vmap(bits_without, in_axes=(None, 0))
    each = pm.filter_vmap(of_layer, in_axes=(0, None))
    return each(jnp.arange(len(model.blocks)), jnp.arange(num_heads)) - gpt.bits(model, text)


# --- layers and positions -------------------------------------------------------------------------


def put(where: Any, out: Array, at: Any, value: Array) -> Array:
    """Return a layer's output, with another run's at one position of one layer."""
    layer, place = where
    is_here = (at.layer == layer) & (jnp.arange(out.shape[-2]) == place)
    return jnp.where(is_here[:, None], value, out)


@pm.filter_jit
def patch_effects(
    model: gpt.Gpt, prompt: gpt.Bytes, other: gpt.Bytes
) -> Float[Array, "layers places"]:
    """Return how far the scores of the next byte move from one prompt (0) to the other (1).

    One layer at one position gets its output for the other prompt.
    """
    theirs, seen = pm.capture(model, "blocks.layer")(other)
    ours = model(prompt)[-1]
    way = theirs[-1] - ours

    def patched(layer: Array, place: Array) -> Array:
        rule = pm.by({"blocks.layer": pm.Partial(put, (layer, place))})
        scores = pm.intervene(model, rule, values=seen)(prompt)[-1]
        return (scores - ours) @ way / (way @ way)

    of_layer = pm.filter_vmap(patched, in_axes=(None, 0))
    each = pm.filter_vmap(of_layer, in_axes=(0, None))
    return each(jnp.arange(len(model.blocks)), jnp.arange(len(prompt)))


# --- pictures -------------------------------------------------------------------------------------


def shaded(table: Any) -> list[str]:
    """Return a row of characters for each row of numbers, the darkest for the largest."""
    table = np.asarray(table)
    parts = np.clip(table / max(float(table.max()), 1e-9), 0, 1)
    return ["".join(SHADES[int(x * (len(SHADES) - 1))] for x in row) for row in parts]


def show(title: str, table: Any, foot: str = "") -> None:
    """Print a table as a picture, the last layer on top."""
    print(title)
    for layer, row in reversed([*enumerate(shaded(table))]):
        print(f"  layer {layer} |{row}|")
    print(f"{' ' * 11}{foot}")


def plot(heads: Any, places: Any, prompt: str, path: Path) -> None:
    """Save both tables as a picture."""
    # Imported here, and drawn without pyplot, which needs a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    left.set(title="bits without a head", xlabel="head", ylabel="layer")
    right.set(title="patched from another prompt", ylabel="layer")
    right.set_xticks(range(len(prompt)), [*prompt])
    for axes, table in ((left, heads), (right, places)):
        axes.set_yticks(range(len(table)))
        figure.colorbar(axes.imshow(np.asarray(table), origin="lower", aspect="auto"), ax=axes)
    figure.savefig(path, dpi=150)


# --- the command ----------------------------------------------------------------------------------


def load(options: argparse.Namespace) -> gpt.Gpt:
    """Load the model of the folder's last checkpoint; train it first if there is none."""
    sizes = {name: getattr(options, name) for name in ("size", "depth", "heads")}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    with pm.Checkpoints(options.folder) as checkpoints:
        is_new = not checkpoints.steps()
    if is_new:
        words += ["--length", str(options.length), "--minutes", str(options.minutes)]
        gpt.main([str(options.folder), *words])
    # The size of the cache, which is for writing, is not part of the file.
    room = len(gpt.parse(["folder"]).prompt.encode()) + gpt.parse(["folder"]).write
    model, _ = pm.make_with_state(gpt.make_gpt)(*sizes.values(), room, key=jax.random.key(0))
    with pm.Checkpoints(options.folder) as checkpoints:
        run = checkpoints.restore(gpt.Run(0, model, gpt.make_optimizer("adamw", model)))
    return run.model


def held_out(length: int) -> gpt.Bytes:
    """Return eight pieces of the text that `gpt.py` does not train on."""
    text = np.frombuffer("\n".join(gpt.topics[n] for n in sorted(gpt.topics)).encode(), np.uint8)
    text = text[9 * len(text) // 10 :]
    return text[: 8 * (length + 1)].reshape(8, length + 1).astype(np.int32)


def as_bytes(text: str) -> gpt.Bytes:
    """Return a prompt as the model reads it."""
    return jnp.asarray(np.frombuffer(text.encode(), np.uint8).astype(np.int32))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the checkpoints of gpt.py")
    parser.add_argument("--minutes", type=float, default=1.0, help="to train if it is empty")
    for name, number in {"size": 128, "depth": 4, "heads": 4, "length": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--prompt", default="The for statement is used ")
    parser.add_argument("--other", default="The try statement is used ", help="of the same length")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save a picture of both tables")
    options = parser.parse_args(arguments)
    if len(options.prompt.encode()) != len(options.other.encode()):
        parser.error("the prompts must have the same number of bytes")
    return options


def main(arguments: Sequence[str] | None = None) -> tuple[Any, Any]:
    """Return both tables, and print them as pictures."""
    options = parse(arguments)
    model = load(options)
    heads = head_effects(model, held_out(options.length))
    show(f"bits per byte more without a head, at most {float(heads.max()):.3f}", heads)
    prompt, other = as_bytes(options.prompt), as_bytes(options.other)
    places = patch_effects(model, prompt, other)
    show(f"patched from {options.other!r}: how far to its next byte", places, options.prompt)
    if options.plot:
        plot(heads, places, options.prompt, options.plot)
        print(f"both in {options.plot}")
    return heads, places


if __name__ == "__main__":
    main()
