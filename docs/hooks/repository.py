"""Pages that are files of the repository: its changes, and its benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGES = {"changes.md": "CHANGELOG.md", "benchmarks.md": "benchmarks/README.md"}


def on_files(files: Any, *, config: Any) -> Any:
    """Called by MkDocs with all files: add the pages, whose links start at `docs`."""
    for page, name in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files
