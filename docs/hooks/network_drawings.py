"""Pictures of networks of layers: over time, in sequence, in parallel."""

from __future__ import annotations

from collections.abc import Sequence

from svg import CELL, cell, element, figure, line, picture, tip, words

# --- recurrent ----------------------------------------------------------------------------------

STEPS, STEP, KNOWING = 4, 46.0, 1
"""The number of steps in a sequence, the width of one, and the step whose inputs are filled."""

# The directions in which the cells of a network pass their carry.
DIRECTIONS: dict[tuple[str, str], tuple[int, ...]] = {
    ("RNN(cell)", "forwards"): (1,),
    ("RNN(cell)", "reverse, keep_order"): (-1,),
    ("Bidirectional(rnn, rnn)", "both ways"): (1, -1),
}


def known(result: int, directions: Sequence[int]) -> list[int]:
    """The inputs that a result depends on, by their positions in time."""
    return [i for i in range(STEPS) if any((result - i) * way >= 0 for way in directions)]


def draw_recurrent() -> str:
    """For each network, the path of its carry, and the inputs of the second result."""
    caption = (
        "Time goes to the right: inputs above, results below, and between them one cell that is"
        " used at every step. <b>Arrows are the carry; the filled result knows of the filled"
        " inputs.</b> What runs in both directions has two cells, and joins their results."
    )
    pictures = [_recurrent(*names, ways) for names, ways in DIRECTIONS.items()]
    return figure(caption, *pictures, kind="pm-many")


def _recurrent(name: str, about: str, directions: tuple[int, ...]) -> str:
    inputs, first, row = 58.0, 102.0, 44.0
    width = 28 + STEPS * STEP
    centers = [width / 2 + (i - (STEPS - 1) / 2) * STEP for i in range(STEPS)]
    results = first + row * len(directions) + 4
    # With two rows of cells, each is shifted, so that its lines do not cross the other.
    asides = [0.0] if len(directions) == 1 else [-8.0, 8.0]
    seen = known(KNOWING, directions)

    lines, boxes = [], []
    for level, (way, aside) in enumerate(zip(directions, asides, strict=True)):
        y = first + level * row
        for i, x in enumerate(center + aside for center in centers):
            passes_on = (KNOWING - i) * way >= 0
            down = "pm-data pm-way" if passes_on else "pm-edge"
            lines.append(line(f"M{x} {inputs + CELL}V{y}", down))
            lines.append(
                line(f"M{x} {y + CELL}V{results}", "pm-data pm-way" if i == KNOWING else "pm-edge")
            )
            if 0 <= i + way < STEPS:
                kind = "pm-data pm-way" if (KNOWING - i) * way > 0 else "pm-edge"
                end = x + way * (STEP - CELL / 2)
                lines.append(line(f"M{x + way * CELL / 2} {y + 10}H{end - way * 6}", kind))
                lines.append(tip(end, y + 10, 0 if way > 0 else 180, kind))
            style = {"width": CELL, "height": CELL, "rx": 6, "class_": "pm-box"}
            boxes.append(element("rect", x=x - CELL / 2, y=y, **style))
    return picture(
        width,
        results + CELL + 14,
        f"{name}, {about}: the result of step {KNOWING} depends on the inputs {seen}",
        words(width / 2, 22, name, "pm-code"),
        words(width / 2, 42, about, "pm-small"),
        *lines,
        *boxes,
        *(cell(x - CELL / 2, inputs, i in seen) for i, x in enumerate(centers)),
        *(cell(x - CELL / 2, results, i == KNOWING) for i, x in enumerate(centers)),
    )


# --- containers ---------------------------------------------------------------------------------

# The layers of each kind of network: their names, and the shapes of their weights.
CHAINS: dict[str, list[tuple[str, str]]] = {
    "Sequential": [("Linear", "f32[4,3]"), ("Lambda(relu)", ""), ("Linear", "f32[2,4]")],
    "MLP(3, 2, 8, depth=2)": [
        ("Linear", "f32[8,3]"),
        ("relu", ""),
        ("Linear", "f32[8,8]"),
        ("relu", ""),
        ("Linear", "f32[2,8]"),
    ],
}
STACKED, MEMBERS = "f32[6,3,3]", "f32[6,2,3]"
"""The weights of six layers of a Stack, and of six members of an Ensemble."""

BOX, GAP, WIDE = 28.0, 12.0, 190.0


def draw_containers() -> str:
    """In sequence, by a scan, and in parallel."""
    caption = (
        "A call goes down. <b>A Sequential and an MLP have layers with arrays of their own.</b>"
        " A Stack and an Ensemble have one layer, whose arrays have an axis more: a Stack scans"
        " along it, so that one layer works on what the one before made of x; an Ensemble maps over"
        " it, so that all see the same x."
    )
    chains = [_chain(name, layers) for name, layers in CHAINS.items()]
    return figure(caption, *chains, _stack(), _ensemble(), kind="pm-many")


def _chain(name: str, layers: list[tuple[str, str]]) -> str:
    tops = [46 + i * (BOX + GAP) for i in range(len(layers))]
    bottom = tops[-1] + BOX
    return picture(
        WIDE,
        bottom + 30,
        f"{name}: {', '.join(layer for layer, _ in layers)}, one after the other",
        words(WIDE / 2, 22, name, "pm-code"),
        line(f"M{WIDE / 2} 30V{bottom + 12}", "pm-data pm-way"),
        tip(WIDE / 2, bottom + 20, 90, "pm-data"),
        *(
            _box(WIDE / 2, top, 166, " ".join(filter(None, layer)))
            for top, layer in zip(tops, layers, strict=True)
        ),
    )


def _stack() -> str:
    middle, top = WIDE / 2, 66.0
    behind = [_box(middle - 6 + 4 * i, top + 8 - 4 * i, 140, "") for i in (3, 2, 1)]
    bottom = top + 8 + BOX
    right = middle + 84
    back = f"M{middle} {bottom + 16}H{right}V{top - 20}H{middle + 8}"
    return picture(
        WIDE,
        bottom + 62,
        "Stack: one Linear with six times the arrays, scanned",
        words(middle, 22, "Stack, of 6", "pm-code"),
        line(f"M{middle} 30V{bottom + 28}", "pm-data pm-way"),
        tip(middle, bottom + 36, 90, "pm-data"),
        line(back, "pm-edge"),
        tip(middle + 1, top - 20, 180, "pm-edge"),
        *behind,
        _box(middle - 6, top + 8, 140, f"Linear {STACKED}"),
        words(middle, bottom + 54, "jax.lax.scan", "pm-small pm-code"),
    )


def _ensemble() -> str:
    middle, top = WIDE / 2, 66.0
    bottom = top + 8 + BOX
    places = [middle + (i - 2.5) * 24 for i in range(6)]
    ways = [f"M{middle} 30C{middle} 50 {x} 46 {x} {top + 8}" for x in places]
    return picture(
        WIDE,
        bottom + 62,
        "Ensemble: one Linear with six times the arrays, mapped; six results",
        words(middle, 22, "Ensemble, of 6", "pm-code"),
        *(line(f"{way}V{bottom + 12}", "pm-data pm-way") for way in ways),
        *(tip(x, bottom + 20, 90, "pm-data") for x in places),
        _box(middle, top + 8, 166, f"Linear {MEMBERS}"),
        words(middle, bottom + 54, "jax.vmap", "pm-small pm-code"),
    )


def _box(x: float, y: float, width: float, text: str) -> str:
    """A layer; the middle of its upper side is at (x, y)."""
    place = {"x": x - width / 2, "y": y, "width": width, "height": BOX}
    return element("rect", **place, rx=8, class_="pm-box") + words(
        x, y + 19, text, "pm-small pm-code"
    )
