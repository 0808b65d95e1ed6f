"""Puts the mistakes of `tests/messages.md`, which the tests run, into their page, folded."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "tests" / "messages.md"
MARK = "<!-- the mistakes of tests/messages.md -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with each page."""
    return (
        markdown.replace(MARK, folded(SOURCE.read_text("utf-8"))) if MARK in markdown else markdown
    )


def folded(text: str) -> str:
    """The file, in which each heading of a mistake opens what stands below it."""
    group, *entries = re.split(r"^### |^(?=## )", text, flags=re.M)
    parts = [group]
    for entry in entries:
        title, _, body = entry.partition("\n")
        is_group = title.startswith("## ")
        parts.append(
            entry if is_group else f'??? failure "{title}"\n{textwrap.indent(body, "    ")}'
        )
    return "\n".join(parts)
