"""Ranks pages in the search.

A search for the name of a class should find its entry first, not one of the many pages that use it,
so the reference weighs more. The page of mistakes names everything, so it weighs less. Pages have
the words that people search for as tags, but no names of the library, which tags would outweigh.
"""

from __future__ import annotations

from typing import Any

BOOST = {"reference/mistakes": 0.3, "reference/": 1.5, "contributing/": 0.3}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs with each page: set the weight of a page that does not set it itself."""
    path = page.file.src_uri
    weights = (weight for folder, weight in BOOST.items() if path.startswith(folder))
    page.meta.setdefault("search", {"boost": next(weights, 1.0)})
    return markdown
