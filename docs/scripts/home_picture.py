"""Draw the picture of the home page: what the page's program reads in digits it has not seen."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1]
ROWS, COLUMNS = 3, 14


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

    figure = Figure(figsize=(7.4, 2.2), layout="constrained")
    for i, axes in enumerate(figure.subplots(ROWS, COLUMNS).flat):
        axes.imshow(names["digits"].images[i - count], cmap="gray_r")
        is_right = read[i] == names["y"][i - count]
        axes.set_title(read[i], fontsize=11, pad=3, color="#3f8f5f" if is_right else "#e0453a")
        axes.set_axis_off()
    figure.savefig(DOCS / "assets/home.png", dpi=150, transparent=True)


if __name__ == "__main__":
    main()
