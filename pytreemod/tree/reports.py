"""Printing a report of findings: by kind, with a line for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def report_text(
    name: str,
    rows: Mapping[str, Sequence[str]],
    rest: Sequence[str] = (),
    always: str = "",
    most: int | None = 10,
) -> str:
    """Return a report as a string: how many findings of each kind, and the first few of them.

    Args:
        name: of the report.
        rows: a list for each kind.
        rest: other counts.
        always: the kind that is counted even if it is empty.
        most: how many of each kind are printed; None for all.

    Examples:
        >>> print(report_text("Report", {"added": ["a", "b"], "removed": []}, ["3 equal"]))
        Report: 2 added, 3 equal
          added
            a
            b
    """
    counts = [f"{len(items)} {kind}" for kind, items in rows.items() if items or kind == always]
    lines = [f"{name}: {', '.join([*counts, *rest])}"]
    for kind, items in rows.items():
        lines += [f"  {kind}"] if items else []
        lines += [f"    {item}" for item in items[:most]]
        lines += [f"    and {len(items) - most} more"] if most and len(items) > most else []
    return "\n".join(lines)


def aligned(lines: Sequence[Sequence[str]], sides: str) -> list[str]:
    r"""Lines of cells as strings, with aligned columns.

    Args:
        lines: with equally many cells.
        sides: for each column `<` for flush left, `>` for flush right.

    Examples:
        >>> print("\n".join(aligned([["path", "size"], ["a.b", "3"]], "<>")))
        path  size
        a.b      3
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [form.format(*line).rstrip() for line in lines]
