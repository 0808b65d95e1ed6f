"""Run the benchmarks, each in its own process.

    python -m benchmarks                              # all, about a quarter of an hour
    python -m benchmarks --quick                      # small models, few rounds: a smoke test
    python -m benchmarks --only dispatch flattening   # only these
    python -m benchmarks --json                       # all numbers, as JSON

A separate process keeps the caches and compiled programs of one benchmark out of the next.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.libraries import surroundings
from benchmarks.tables import add_options, as_json, heading

ROOT = Path(__file__).parents[1]
NAMES = (
    "dispatch",
    "eager",
    "training",
    "optimizers",
    "flattening",
    "construction",
    "building",
    "tracing",
    "first_calls",
    "stack",
    "loops",
    "decoding",
    "programs",
    "memory",
    "files",
    "importing",
)
"""The benchmarks in the order of the table in the README."""


def run(name: str, *options: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run one benchmark from the root of the repository, whatever the current folder is."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    return subprocess.run(command, check=False, text=True, cwd=ROOT, **how)


def print_tables(names: Sequence[str], options: Sequence[str]) -> list[str]:
    """Print the table of each benchmark; return the names of those that failed."""
    print(heading(surroundings()), flush=True)
    failed: list[str] = []
    for name in names:
        print(flush=True)
        done = run(name, "--bare", *options)
        failed += [name] * (done.returncode != 0)
    return failed


def print_json(names: Sequence[str], options: Sequence[str]) -> list[str]:
    """Print all measurements as one dict; return the names of those that failed."""
    tables: dict[str, Any] = {}
    failed: list[str] = []
    for name in names:
        done = run(name, "--json", *options, stdout=subprocess.PIPE)
        if done.returncode == 0:
            tables[name] = json.loads(done.stdout)
        else:
            failed.append(name)
    print(as_json(tables))
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen benchmarks; the exit status is 1 if any of them failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the speed of pytreemod."
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    add_options(parser)
    chosen = parser.parse_args(arguments)
    show = print_json if chosen.json else print_tables
    failed = show(chosen.only or NAMES, ["--quick"] if chosen.quick else [])
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
