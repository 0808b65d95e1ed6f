"""A plot of the measured ratios, from the output of the benchmarks.

python -m benchmarks --json > benchmarks/results/jax-0.10.json
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from svg import element, figure, line, picture, words

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "jax-0.10.json"

ROWS = (
    ("dispatch", "returns the updated model, 42 arrays", "A jitted call that returns the model"),
    ("dispatch", "training step with Adam, 42 arrays", "A training step with Adam"),
    ("flattening", "flatten and unflatten, per module, 22 modules", "Flattening and unflattening"),
    ("construction", "5 fields, generated __init__", "Making a Module of five fields"),
)
"""A benchmark, its row, and the title in the plot."""

LIBRARIES = {"pytreemod": "pm-ours", "Equinox": "pm-first", "NNX": "pm-second"}
BASELINES = {
    "jax.jit": "jax.jit on a flat list of the arrays = 1",
    "dicts": "nested dicts of the same arrays = 1",
    "dataclass": "a frozen dataclass = 1",
}

WIDTH, LEFT, RIGHT, TOP, STEP = 480.0, 22.0, 462.0, 44.0, 88.0
LAST = 320.0
"""The largest ratio that fits."""


def draw_ratios() -> str:
    """A row for each measurement, on a logarithmic scale; less is faster."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = [(title, row_of(results, name, label)) for name, label, title in ROWS]
    height = TOP + STEP * len(rows) + 26
    drawn = [part for n, row in enumerate(rows) for part in _drawn(TOP + STEP * n, *row)]
    about = "; ".join(f"{title}: {_in_words(row)}" for title, row in rows)
    chart = picture(
        WIDTH,
        height,
        f"How many times as long as the plainest way. {about}",
        *_legend(),
        *_scale(height - 26),
        *drawn,
    )
    return figure(_caption(results["dispatch"]["surroundings"]), chart)


def row_of(results: Mapping[str, Any], name: str, label: str) -> Mapping[str, Any]:
    """One row of one benchmark's table."""
    return next(row for row in results[name]["rows"] if row["label"] == label)


def _place(ratio: float) -> float:
    """The horizontal position of a ratio."""
    return LEFT + (RIGHT - LEFT) * math.log(ratio) / math.log(LAST)


def _drawn(y: float, title: str, row: Mapping[str, Any]) -> Iterator[str]:
    """A row: its title, its unit, and a mark for each library over its quartiles."""
    baseline = next(text for name, text in BASELINES.items() if name in row)
    yield words(LEFT, y, title, "pm-strong", "start")
    # Below the title, because beside it the fonts of some systems need more room than there is.
    yield words(LEFT, y + 16, baseline, "pm-small", "start")
    yield line(f"M{LEFT} {y + 34:.1f}H{RIGHT}", "pm-track")
    for name, kind in LIBRARIES.items():
        ratio = row[name]["ratio"]
        x, low, high = (
            _place(ratio[key]) for key in ("median", "lower_quartile", "upper_quartile")
        )
        yield line(f"M{low:.1f} {y + 34:.1f}H{high:.1f}", f"pm-range {kind}")
        yield _mark(x, y + 34, kind)
        yield words(x, y + 54, short(ratio["median"]), f"pm-small {kind}")


def _mark(x: float, y: float, kind: str) -> str:
    """A different shape for each library, because color alone does not distinguish them."""
    shapes = {
        "pm-ours": element("circle", cx=x, cy=y, r=7, class_=kind),
        "pm-first": element("rect", x=x - 5.5, y=y - 5.5, width=11, height=11, class_=kind),
        "pm-second": element(
            "path", d=f"M{x:.1f} {y - 7.5:.1f}l7.5 7.5l-7.5 7.5l-7.5 -7.5z", class_=kind
        ),
    }
    return shapes[kind]


def _legend() -> Iterator[str]:
    """The libraries and their marks, above all rows."""
    for (name, kind), x in zip(LIBRARIES.items(), (LEFT + 7, 142.0, 232.0), strict=True):
        yield _mark(x, 12, kind)
        yield words(x + 13, 17, name, "", "start")


def _scale(bottom: float) -> Iterator[str]:
    """Thin lines through all rows, with their numbers below."""
    for tick in (1, 3, 10, 30, 100, 300):
        x = _place(tick)
        yield line(f"M{x:.1f} {TOP + 8}V{bottom}", "pm-grid")
        yield words(x, bottom + 16, f"{tick}\N{MULTIPLICATION SIGN}", "pm-small")


def short(ratio: float) -> str:
    """Two decimals where they are significant."""
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}"


def _in_words(row: Mapping[str, Any]) -> str:
    """The row in words, for readers who do not see the plot."""
    return ", ".join(f"{name} {short(row[name]['ratio']['median'])}" for name in LIBRARIES)


def _caption(around: Mapping[str, Any]) -> str:
    """The conditions of the measurement."""
    versions = ", ".join(f"{name} {number}" for name, number in around["versions"].items())
    return (
        "<b>How many times as long as the plainest way</b>, on a logarithmic scale: less is faster."
        " Medians and quartiles of time in Python on models of 42 tiny arrays, where nothing but"
        f" the library's share is left: Python {around['python']}, JAX {around['jax']},"
        f" {around['cores']} cores; {versions}. A large model hides all of it."
    )
