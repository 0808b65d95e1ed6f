"""Draw the picture of the home page: what the page's program reads in digits it has not seen."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1]
ROWS, COLUMNS = 3, 10
# Legible on the light page and on the dark one; the digits are transparent where they are white.
INK, RIGHT, WRONG = "#1b9a77", "#808a8c", "#e5534b"


def main() -> None:
    """Run the program of the page, and draw its last digits with its answers."""
    page = (DOCS / "index.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    os.chdir(tempfile.mkdtemp())  # The program saves a file.
    exec(compile(program, "index.md", "exec"), names)
    ready = names["pm"].inference_mode(names["model"])
    scores, _ = ready(names["x"], names["state"])
    count = ROWS * COLUMNS
    read = np.asarray(scores.argmax(-1))[-count:]

    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    for i, axes in enumerate(figure.subplots(ROWS, COLUMNS).flat):
        ink = np.full((8, 8, 4), to_rgba(INK))
        ink[..., 3] = names["digits"].images[i - count] / 16
        axes.imshow(ink)
        is_right = read[i] == names["y"][i - count]
        axes.set_title(read[i], fontsize=14, pad=4, color=RIGHT if is_right else WRONG)
        axes.set_axis_off()
    figure.savefig(DOCS / "assets/home.png", dpi=150, transparent=True)


if __name__ == "__main__":
    main()
