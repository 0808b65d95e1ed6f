"""Inserts drawings into pages: `<!-- drawing: model -->` on a separate line marks the position.

Two are drawn here: the model, and the ratios that were measured. The others are files in
`docs/assets/drawings`. They are part of the page, because its style sheet has their colors.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from model_drawing import draw_model
from ratio_plot import draw_ratios

FOLDER = Path(__file__).parents[1] / "assets" / "drawings"
DRAWN = {"model": draw_model, "ratios": draw_ratios}

_MARK = re.compile(r"<!-- drawing: (\w+) -->")


def on_page_content(html: str, **_: Any) -> str:
    """Called by MkDocs with each page's HTML."""
    return _MARK.sub(_drawing, html)


def _drawing(mark: re.Match[str]) -> str:
    if mark[1] in DRAWN:
        return DRAWN[mark[1]]()
    stored = FOLDER / f"{mark[1]}.html"
    if not stored.is_file():
        raise PluginError(f"There is no drawing {mark[1]!r} in {FOLDER}.")
    return stored.read_text(encoding="utf-8")
