"""Ranks pages in the search.

A search for the name of a class should find its entry first, not one of the many pages that use it,
so the reference weighs more. The page of mistakes names everything, so it weighs less. The page on
the founding documents and the source code in the reference are left out.
"""

from __future__ import annotations

from typing import Any

BOOST = {"reference/mistakes": 0.3, "reference/": 4.0, "contributing/": 0.3}
LEFT_OUT = ("explanation/founding-documents.md",)

_SOURCE = '<details class="mkdocstrings-source"'


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs with each page: set the weight of a page that does not set it itself."""
    path = page.file.src_uri
    weights = (weight for folder, weight in BOOST.items() if path.startswith(folder))
    rule = {"exclude": True} if path in LEFT_OUT else {"boost": next(weights, 1.0)}
    page.meta.setdefault("search", rule)
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Called with each page's HTML, before it is indexed."""
    return html.replace(_SOURCE, f"{_SOURCE} data-search-exclude")
