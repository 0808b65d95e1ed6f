"""Puts measured ratios into pages: `<!-- ratio: dispatch | label | library -->` marks a place.

The label is that of a row in `benchmarks/results/jax-0.10.json`: a page has no number of its own.
"""

from __future__ import annotations

import json
import re
from typing import Any

from mkdocs.exceptions import PluginError
from ratio_plot import RESULTS, row_of, short

# A mark may go over the end of a line, as the words around it do.
_MARK = re.compile(r"<!-- ratio: (.+?) \| (.+?) \| (.+?) -->", re.S)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with each page."""
    return _MARK.sub(_ratio, markdown)


def _ratio(mark: re.Match[str]) -> str:
    benchmark, label, library = (" ".join(part.split()) for part in mark.groups())
    try:
        row = row_of(json.loads(RESULTS.read_text(encoding="utf-8")), benchmark, label)
        return short(row[library]["ratio"]["median"])
    except (KeyError, StopIteration) as error:
        raise PluginError(f"{RESULTS} has no ratio for {mark[0]}") from error
