"""Print files of results as Markdown: the median ratio of each library, a table for each benchmark.

python -m benchmarks.medians benchmarks/results/*.json
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import heading, short, with_unit


def as_markdown(results: Mapping[str, Any]) -> str:
    """Return the tables of one file of results, below a heading with the versions."""
    first = next(iter(results.values()))
    versions, others = heading(first["surroundings"]).split(", cpu")
    parts = [f"### {versions}", f"CPU{others}."]
    return "\n\n".join([*parts, *("\n".join(_table(each)) for each in results.values())]) + "\n"


def _table(table: Mapping[str, Any]) -> Iterator[str]:
    rows = [(row, _cells(row)) for row in table["rows"]]
    timed = [(row, cells) for row, cells in rows if cells]
    exact = [row["met"] for row, cells in rows if not cells and "met" in row]
    counted = f": {sum(exact)} of {len(exact)} exact rows meet their target" if exact else ""
    yield f"**{table['title']}**{counted}"
    if timed:
        names = [*dict.fromkeys(name for _, cells in timed for name in cells)]
        yield ""
        yield f"| | {' | '.join(names)} | target |"
        yield "|---" * (len(names) + 2) + "|"
    for row, cells in timed:
        target = f"{row['target']} {'met' if row['met'] else 'missed'}" if "met" in row else ""
        parts = [row["label"], *(cells.get(name, "") for name in names), target]
        yield f"| {' | '.join(parts)} |"


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the time of the baseline, and the ratios of the others; times if there are none."""
    times = {n: part for n, part in row.items() if isinstance(part, dict) and "seconds" in part}
    return {
        name: short(part["ratio"]["median"])
        if i and "ratio" in part
        else with_unit(part["seconds"]["median"])
        for i, (name, part) in enumerate(times.items())
    }


def main(paths: Sequence[str]) -> None:
    """Print the tables of these files."""
    print("\n".join(as_markdown(json.loads(Path(path).read_text("utf-8"))) for path in paths))


if __name__ == "__main__":
    main(sys.argv[1:])
