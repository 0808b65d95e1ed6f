"""Inserts drawings into pages: `<!-- drawing: model -->` on a separate line marks the position."""

from __future__ import annotations

import re
from typing import Any

from layer_drawings import draw_convolutions, draw_masks, draw_norms, draw_pools
from mkdocs.exceptions import PluginError
from model_drawing import draw_model
from network_drawings import draw_containers, draw_recurrent
from ratio_plot import draw_ratios

DRAWINGS = {
    "containers": draw_containers,
    "convolutions": draw_convolutions,
    "masks": draw_masks,
    "model": draw_model,
    "norms": draw_norms,
    "pools": draw_pools,
    "ratios": draw_ratios,
    "recurrent": draw_recurrent,
}

_MARK = re.compile(r"<!-- drawing: (\w+) -->")


def on_page_content(html: str, **_: Any) -> str:
    """Called by MkDocs with each page's HTML."""
    return _MARK.sub(_drawn, html)


def _drawn(mark: re.Match[str]) -> str:
    if mark[1] not in DRAWINGS:
        raise PluginError(f"There is no drawing {mark[1]!r}; there are {', '.join(DRAWINGS)}.")
    return DRAWINGS[mark[1]]()
