"""`python -m pytreemod.io show FILE`, `python -m pytreemod.io diff FILE FILE`.

The first prints the contents of a file, or of a folder of files, as a table; the second prints how
two of them differ.

Showing a file reads no array. Two arrays are compared by their checksums if both files have them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import prod

from pytreemod.errors import PytreemodError
from pytreemod.io.access import StrPath, depth_errors, shown_path
from pytreemod.io.configuration import describe_json
from pytreemod.io.differing import diff
from pytreemod.io.folders import open_arrays
from pytreemod.io.loading import description_of, table_of
from pytreemod.io.saving import USERS
from pytreemod.io.tables import Leaf, Table, form_text, shown_name


def main(arguments: Sequence[str]) -> int:
    """Run the command line.

    Args:
    arguments: the arguments after the name of the program.

    Returns:
        0; 1 if two files differ; 2 for a file that cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="python -m pytreemod.io", description="Inspect files that pytreemod.save wrote."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="list the arrays and the configuration of a file")
    show.add_argument("file")
    show.add_argument("--config", action="store_true", help="list the configuration as well")
    two = commands.add_parser("diff", help="show how two files differ")
    two.add_argument("file")
    two.add_argument("other")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "show":
            print(show_file(chosen.file, config=chosen.config))
            return 0
        found = diff(chosen.file, chosen.other)
        print(found)
        return 1 if found else 0
    except PytreemodError as error:
        print(error, file=sys.stderr)
        return 2


def show_file(path: StrPath, *, config: bool = False) -> str:
    """Return the table of a file: name, dtype and shape of each leaf, and its size.

    Args:
    path: the path of the file or folder.
    config: whether to list the classes and the configuration, too.

    Raises:
    FileError: if the file is damaged or missing.
    """
    where = f"show({shown_path(path)})"
    with open_arrays(path) as file, depth_errors(where):
        about = description_of(file, where)
        table = table_of(file, about, where)
        users = file.metadata.get(USERS)
    rows = [(".".join(name), form_text(leaf), _size(leaf)) for name, leaf in table.leaves.items()]
    lines = _aligned(rows)
    total = sum(_bytes(leaf) for leaf in table.leaves.values())
    numbers = sum(prod(leaf.shape) for leaf in table.leaves.values() if leaf.is_array)
    leaves = "leaf" if len(rows) == 1 else "leaves"
    lines.append(f"{len(rows)} {leaves}, {numbers:,} numbers, {_in_words(total)}")
    if about is not None:
        lines.append(f"written by pytreemod {about.get('pytreemod')}, JAX {about.get('jax')}")
    if users is not None:
        lines.append(f"metadata: {users}")
    if config:
        lines += _config_lines(table)
    return "\n".join(lines)


def _classes_in(table: Table) -> list[tuple[str, str]]:
    # The mark of an unregistered name matters only for a load without `like`.
    pairs = table.classes.items()
    return [(shown_name(name), str(cls).removeprefix("?")) for name, cls in pairs]


def _config_lines(table: Table) -> list[str]:
    lines = ["", *(f"{name}: {cls}" for name, cls in _classes_in(table)), ""]
    return [*lines, *(f"{'.'.join(n)} = {describe_json(v)}" for n, v in table.config.items())]


def _bytes(leaf: Leaf) -> int:
    return prod(leaf.shape) * leaf.dtype.itemsize if leaf.dtype is not None else 0


def _size(leaf: Leaf) -> str:
    return _in_words(_bytes(leaf)) if leaf.is_array else ""


def _in_words(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
