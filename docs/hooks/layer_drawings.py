"""Pictures of layers as cells: which inputs each output depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from svg import CELL, cell, figure, line, picture, words

EDGE = 14.0
"""The margin around a drawing."""


# --- normalization ------------------------------------------------------------------------------

EXAMPLES, CHANNELS, PLACES = 3, 4, 3

# Which cells (example, channel, position) share mean and variance with the first one.
NORMS: dict[str, tuple[str, Callable[[int, int, int], bool]]] = {
    "BatchNorm(4)": ("one channel of all examples", lambda n, c, p: c == 0),
    "InstanceNorm(4)": ("one channel of an example", lambda n, c, p: n == c == 0),
    "GroupNorm(2, 4)": ("a group of channels of an example", lambda n, c, p: n == 0 and c < 2),
    "LayerNorm((4, 3))": ("all of an example", lambda n, c, p: n == 0),
}


def draw_norms() -> str:
    """For each layer, the cells that are normalized together."""
    caption = (
        "A batch of three examples (rows) of four channels with three positions each."
        " <b>The filled cells are normalized together:</b> they have one mean and one variance."
    )
    return figure(caption, *(_norm(name, *rule) for name, rule in NORMS.items()), kind="pm-many")


def _norm(name: str, about: str, is_one: Callable[[int, int, int], bool]) -> str:
    gap = 8.0
    width = 2 * EDGE + CHANNELS * PLACES * CELL + (CHANNELS - 1) * gap
    cells = [
        cell(EDGE + (c * PLACES + p) * CELL + c * gap, 56 + n * CELL, is_one(n, c, p))
        for n in range(EXAMPLES)
        for c in range(CHANNELS)
        for p in range(PLACES)
    ]
    return picture(
        width,
        56 + EXAMPLES * CELL + EDGE,
        f"{name}: {about} is normalized together",
        words(width / 2, 22, name, "pm-code"),
        words(width / 2, 42, about, "pm-small"),
        *cells,
    )


# --- convolution --------------------------------------------------------------------------------

INPUTS = 8

# For each layer: stride, dilation, padding.
CONVOLUTIONS = {
    "Conv1d(…, 3)": (1, 1, 0),
    "Conv1d(…, 3, stride=2)": (2, 1, 0),
    "Conv1d(…, 3, dilation=2)": (1, 2, 0),
    "Conv1d(…, 3, padding=1)": (1, 1, 1),
}


def seen(output: int, stride: int, dilation: int, padding: int) -> list[int]:
    """The inputs that an output of a convolution sees, including padding."""
    return [output * stride + i * dilation - padding for i in range(3)]


def outputs_of(stride: int, dilation: int, padding: int) -> int:
    """The number of outputs of a convolution."""
    return (INPUTS + 2 * padding - 2 * dilation - 1) // stride + 1


def draw_convolutions() -> str:
    """For each choice of arguments, the inputs of an output; and a transposed convolution."""
    caption = (
        "Eight entries (above) and what a kernel of three makes of them (below)."
        " <b>The filled entries above go into the filled one below;</b> dashed ones are padding."
        " <code>ConvTranspose</code> goes the other way: one entry goes into three."
    )
    back = _window("ConvTranspose1d(…, 3, stride=2)", 4, 9, [1], [2, 3, 4])
    pictures = [
        _window(name, INPUTS, outputs_of(*how), seen(1, *how), [1], [-1, INPUTS] * how[2])
        for name, how in CONVOLUTIONS.items()
    ]
    return figure(caption, *pictures, back, kind="pm-many")


def _window(
    name: str, above: int, below: int, used: list[int], made: list[int], padded: Sequence[int] = ()
) -> str:
    width = 2 * EDGE + (INPUTS + 2) * CELL
    left, other = ((width - count * CELL) / 2 for count in (above, below))
    first, second = 58.0, 122.0
    # A call is long: its arguments are below the name.
    title, bracket, options = name.partition("(")
    lines = [
        line(
            f"M{left + (i + 0.5) * CELL} {first + CELL}L{other + (j + 0.5) * CELL} {second}",
            "pm-ours",
        )
        for i in used
        for j in made
    ]
    return picture(
        width,
        second + CELL + EDGE,
        f"{name}: {len(used)} of {above} entries go into {len(made)} of {below}",
        words(width / 2, 24, title, "pm-code"),
        words(width / 2, 44, bracket + options, "pm-small pm-code"),
        *lines,
        *(cell(left + i * CELL, first, i in used) for i in range(above)),
        *(cell(left + i * CELL, first, i in used, "pm-padding") for i in padded),
        *(cell(other + j * CELL, second, j in made) for j in range(below)),
    )


# --- pooling ------------------------------------------------------------------------------------

ENTRIES = 7

# For each layer: the number of results, the filled one, its inputs, and the padding.
POOLS: dict[str, tuple[int, int, list[int], list[int]]] = {
    "MaxPool1d(2)": (6, 1, [1, 2], []),
    "MaxPool1d(2, stride=2)": (3, 1, [2, 3], []),
    "MaxPool1d(2, stride=2, use_ceil=True)": (4, 3, [6, 7], [7]),
    "AvgPool1d(3, padding=1)": (7, 0, [-1, 0, 1], [-1, 7]),
    "AdaptiveAvgPool1d(3)": (3, 0, [0, 1, 2], []),
}


def draw_pools() -> str:
    """For each layer, the inputs of one of the results."""
    caption = (
        "Seven entries of a channel (above) and what a pool makes of them (below)."
        " <b>The filled entries above are a window: one number below.</b> Dashed ones are padding:"
        " a mean counts it as zero, a maximum leaves it out. Of the adaptive pool's three windows"
        " the first is longer."
    )
    pictures = [
        _window(name, ENTRIES, results, used, [result], padded)
        for name, (results, result, used, padded) in POOLS.items()
    ]
    return figure(caption, *pictures, kind="pm-many")


# --- attention ----------------------------------------------------------------------------------

LENGTH = 6

# Whether a query sees a key, by their positions.
MASKS: dict[str, Callable[[int, int], bool]] = {
    "is_causal=False": lambda q, k: True,
    "is_causal=True": lambda q, k: k <= q,
    "is_causal=True, window=3": lambda q, k: q - 3 < k <= q,
    "window=2": lambda q, k: abs(q - k) < 2,
}


def draw_masks() -> str:
    """For each choice of arguments, which query sees which key."""
    caption = (
        "Rows are queries, columns keys. <b>A filled cell: the query looks at the key.</b>"
        " Use <code>mask</code> to hide other keys."
    )
    return figure(caption, *(_mask(name, sees) for name, sees in MASKS.items()), kind="pm-many")


def _mask(name: str, sees: Callable[[int, int], bool]) -> str:
    width = 2 * EDGE + 10 * CELL
    left = (width - LENGTH * CELL) / 2
    places = [(q, k) for q in range(LENGTH) for k in range(LENGTH)]
    return picture(
        width,
        38 + LENGTH * CELL + EDGE,
        f"{name}: {sum(sees(*place) for place in places)} of {len(places)} pairs",
        words(width / 2, 24, name, "pm-code"),
        *(cell(left + k * CELL, 38 + q * CELL, sees(q, k)) for q, k in places),
    )
