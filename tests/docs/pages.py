"""Reading the documentation: which pages there are, and the code blocks in them."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BESIDE = ("README.md", "CONTRIBUTING.md", "tests/docs/founding-documents.md")
PAGES = sorted([*(ROOT / name for name in BESIDE), *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    code: str
    line: int
    """How many lines of the page come before the code."""


def name_of(page: Path) -> str:
    """The page as a test's name: `docs/tutorial/2-training.md`."""
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return blocks_in(page.read_text(encoding="utf-8"))


def blocks_in(text: str) -> list[Block]:
    """All fenced blocks of a text, in order."""
    return [
        Block(
            found["language"].strip(),
            textwrap.dedent(found["code"]),
            text.count("\n", 0, found.start("code")),
        )
        for found in _FENCE.finditer(text)
    ]
