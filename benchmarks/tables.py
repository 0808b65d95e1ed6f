"""Tables of results: their rows, how they are printed, and the command of every benchmark.

Each benchmark is one file with one `Benchmark`, which you can run:

    python -m benchmarks.construction [--quick] [--json]
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.libraries import MODULES, OURS, surroundings
from benchmarks.measuring import Burst, Result, compare, race

LABEL, FIRST, COLUMN, TARGET = 48, 10, 24, 15
SAME = 1.05
"""Two runs of the same code differ by this factor, so a target counts as met within it."""


@dataclass(frozen=True)
class Row:
    """One row: the time of the baseline, then the ratio of each library."""

    label: str
    baseline: str
    cells: Mapping[str, str]
    numbers: Mapping[str, Any]
    """All measurements, for JSON."""
    target: str = ""
    """The target of pytreemod, as it is printed; empty if there is none."""
    met: bool | None = None
    note: str = ""
    """Printed below the row."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        promise = {"target": self.target, "met": self.met} if self.target else {}
        note = {"note": self.note} if self.note else {}
        return {"label": self.label, **promise, **self.numbers, **note}

    def as_text(self, columns: Sequence[str]) -> str:
        """The printed line; two lines if there is a note."""
        cells = "".join(f"{self.cells.get(name, '-'):>{COLUMN}}" for name in columns)
        promise = f"{self.target} {'met' if self.met else 'MISSED'}" if self.target else ""
        line = f"{self.label:<{LABEL}}{self.baseline:>{FIRST}}{cells}{promise:>{TARGET}}"
        return line.rstrip() + (f"\n    {self.note}" if self.note else "")


def ratio_row(
    label: str,
    times: Mapping[str, Sequence[float]],
    *,
    share: float = 1,
    limit: float | None = None,
) -> Row:
    """A row with the seconds of the baseline, and the ratio of each other contender to it.

    Args:
        label: the name of the row.
        times: the seconds of each round, by contender; the baseline is first.
        share: the factor to multiply all seconds by.
        limit: the largest median ratio for pytreemod.
    """
    shares = {name: [share * t for t in values] for name, values in times.items()}
    baseline = next(iter(shares))
    results = compare(shares, baseline)
    target, met = "", None
    if limit is not None and OURS in results:
        target, met = f"≤ {limit:g}", results[OURS].ratio.median <= limit * SAME
    return Row(
        label,
        with_unit(results[baseline].seconds.median),
        {name: cell(result) for name, result in results.items() if name != baseline},
        {name: result.as_dict() for name, result in results.items()},
        target,
        met,
    )


def raced(
    label: str,
    bursts: Mapping[str, Burst],
    *,
    rounds: int,
    share: float = 1,
    limit: float | None = None,
) -> Row:
    """Run a race and make a row of it; the baseline is first."""
    return ratio_row(label, race(bursts, rounds=rounds), share=share, limit=limit)


def with_unit(seconds: float) -> str:
    """A time with a suitable unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def short(ratio: float) -> str:
    """A ratio, with two decimals if it is small."""
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}"


def cell(result: Result) -> str:
    """The median ratio, the quartiles, and the ratio of the best times."""
    ratio = result.ratio
    quartiles = f"({short(ratio.lower_quartile)}-{short(ratio.upper_quartile)})"
    return f"{short(ratio.median)} {quartiles} {short(ratio.best):>5}"


def heading(around: Mapping[str, Any]) -> str:
    """A line with the versions and the machine."""
    peers = ", ".join(f"{name} {number}" for name, number in around["versions"].items())
    return "Python {python}, JAX {jax}, {device}, {cores} cores; ".format(**around) + peers


def as_json(content: Any) -> str:
    """JSON with indents."""
    return json.dumps(content, indent=2, ensure_ascii=False)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all commands share."""
    parser.add_argument("--quick", action="store_true", help="small models, few rounds")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")


@dataclass(frozen=True)
class Benchmark:
    """One table, and the command that prints it."""

    title: str
    baseline: str
    """The contender that all others are compared with: the heading of the first column."""
    rows: Callable[[bool], Iterable[Row]] = field(repr=False)
    """Measures; the argument is whether to be quick."""
    heads: Sequence[str] = ()
    """The headings of the columns, if they are not the libraries."""

    @property
    def columns(self) -> list[str]:
        """The headings of all columns but the first."""
        return [*self.heads] or [name for name in MODULES if name != self.baseline]

    @property
    def caption(self) -> str:
        """The lines above the rows."""
        names = "".join(f"{name:>{COLUMN}}" for name in self.columns)
        return f"{self.title}\n\n{'':<{LABEL}}{self.baseline:>{FIRST}}{names}{'target':>{TARGET}}"

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Measure and print."""
        parser = argparse.ArgumentParser(description=self.title)
        add_options(parser)
        parser.add_argument("--bare", action="store_true", help="leave out the line of versions")
        options = parser.parse_args(arguments)
        around, measured = surroundings(), self.rows(options.quick)
        if options.json:
            table = [row.as_dict() for row in measured]
            print(as_json({"title": self.title, "surroundings": around, "rows": table}))
            return
        if not options.bare:
            print(heading(around), end="\n\n")
        print(self.caption, flush=True)
        for row in measured:
            print(row.as_text(self.columns), flush=True)
