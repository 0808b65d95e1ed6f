"""Puts the table of layers and ways to split them into its page, from what the tests have found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOUND = Path(__file__).parents[2] / "tests" / "nn" / "test_explicit_meshes.txt"
MARK = "<!-- table: layers on meshes -->"

WAYS = {
    "on one device": "not on the mesh",
    "whole": "whole",
    "out": "out axis over `model`",
    "in": "in axis over `model`",
    "in, and x": "in axis and features of x over `model`",
    "out, by the batch's axis": "out axis over `data`",
    "in, by the batch's axis": "in axis over `data`",
}
"""The ways of the tests, in their order, as the table calls them."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with each page."""
    return markdown.replace(MARK, table()) if MARK in markdown else markdown


def table() -> str:
    """A row for each layer with weights; a paragraph names the others."""
    rows = [line.split(" | ") for line in FOUND.read_text(encoding="utf-8").splitlines()]
    lines = [["layer", *WAYS.values()], ["---"] * (len(WAYS) + 1)]
    lines += [[name, *map(_cell, cells)] for name, *cells in rows if len(cells) > 1]
    others = ", ".join(f"`{name}`" for name, *cells in rows if len(cells) == 1)
    shown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{shown}\n\nLayers without weights keep the split of x: {others}."


def _cell(found: str) -> str:
    """How a result lies, as code; an error links to its class."""
    if found.startswith("("):
        return f"`{found}`"
    return f"[{found}](errors.md#{found.lower()})" if found != "ShardingTypeError" else found
