"""Makes the table of all layers: what each is, and the shapes of its first example.

The pages of the families say which layers there are, and have the examples; the docstrings say
what they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytreemod import nn

FOLDER = Path(__file__).parents[1] / "reference" / "nn"
MARK = "<!-- the table of layers -->"
FAMILIES = {
    "linear": "Linear maps",
    "convolution": "Convolution",
    "pooling": "Pooling",
    "normalization": "Normalization",
    "attention": "Attention and positions",
    "recurrent": "Recurrent networks",
    "containers": "Containers",
    "state": "State, randomness and modes",
}
"""The pages, in their order, and their titles."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with each page."""
    return markdown.replace(MARK, table()) if MARK in markdown else markdown


def table() -> str:
    """The rows of all families, below their titles."""
    head = ["| layer | | x | result |", "|---|---|---|---|"]
    return "\n".join([*head, *(row for family in FAMILIES for row in _rows(family))])


def _rows(family: str) -> Iterator[str]:
    text = (FOLDER / f"{family}.md").read_text(encoding="utf-8")
    yield f"| **[{FAMILIES[family]}]({family}.md)** | | | |"
    for name in re.findall(r"^::: pytreemod\.nn\.(\w+)", text, re.M):
        shapes = re.search(rf"^\| `nn\.{name}\(.*?` \| (.+?) \| (.+?) \|$", text, re.M)
        if shapes:
            about = (getattr(nn, name).__doc__ or "").partition("\n")[0]
            entry = f"[`{name}`]({family}.md#pytreemod.nn.{name})"
            yield f"| {entry} | {about} | {shapes[1]} | {shapes[2]} |"
