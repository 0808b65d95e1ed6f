"""The function of the heads and layers of a language model: each table is one compiled program.

    python examples/interpret.py runs/gpt                  # trained by gpt.py
    python examples/interpret.py runs/small --minutes 1    # trains one first
    python examples/interpret.py runs/gpt --plot interpret.png

First it switches off each head of each layer: how many more bits does the held-out text take? Then
the model reads a prompt, while one layer at one position gets its output for another prompt. How
far do the scores of the next byte move to the other prompt's? Each table is one compiled program:
`pm.intervene` under `filter_vmap`, where masks say which head, or which position, of which layer is
changed. The model is that of `gpt.py`, which needs no change for this.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

import pytreemod as pm

SHADES = " .:-=+*#%@"

# --- heads ----------------------------------------------------------------------------------------


def one_each(*sizes: int) -> Bool[Array, "one ..."]:
    """Return tables of a shape, as many as they have entries; in each another entry is true."""
    return jnp.eye(math.prod(sizes), dtype=bool).reshape(-1, *sizes)


def cut_head(given: Any, is_off: Bool[Array, " heads"]) -> Any:
    """Return the input of attention's last matrix, without some heads."""
    (found,), kwargs = given
    heads = found.reshape(*found.shape[:-1], len(is_off), -1)
    return (jnp.where(is_off[:, None], 0, heads).reshape(found.shape),), kwargs


@pm.filter_jit
def head_effects(model: gpt.Gpt, text: gpt.Bytes) -> Float[Array, "layers heads"]:
    """Return how many bits per byte more the text takes without each head."""
    sizes = len(model.blocks), model.blocks.layer.attention.num_heads

    def bits_without(is_off: Bool[Array, "layers heads"]) -> Array:
        last = "blocks.layer.attention.output_proj"
        return gpt.bits(pm.intervene(model, last, cut_head, is_off, inputs=True), text)

    each = pm.filter_vmap(bits_without)(one_each(*sizes))
    return each.reshape(sizes) - gpt.bits(model, text)


# --- layers and positions -------------------------------------------------------------------------


def put(out: Array, theirs: Array, is_here: Bool[Array, " places"]) -> Array:
    """Return a layer's output, with another run's at some positions."""
    return jnp.where(is_here[:, None], theirs, out)


@pm.filter_jit
def patch_effects(
    model: gpt.Gpt, prompt: gpt.Bytes, other: gpt.Bytes
) -> Float[Array, "layers places"]:
    """Return how far the scores of the next byte move from one prompt (0) to the other (1).

    One layer at one position gets its output for the other prompt.
    """
    sizes = len(model.blocks), len(prompt)
    theirs, seen = pm.capture(model, "blocks.layer")(other)
    ours = model(prompt)[-1]
    way = theirs[-1] - ours

    def patched(is_here: Bool[Array, "layers places"]) -> Array:
        changed = pm.intervene(model, "blocks.layer", put, seen["blocks.layer"], is_here)
        return (changed(prompt)[-1] - ours) @ way / (way @ way)

    return pm.filter_vmap(patched)(one_each(*sizes)).reshape(sizes)


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
        # So that a slow machine saves something in a minute.
        words += ["--every", "10"]
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
