"""`python -m pytreemod.io show FILE`, `python -m pytreemod.io diff FILE FILE`.

What is in a file, or in a folder of files, as a table to be read; and how two differ.

No array is read to show a file. To tell whether two arrays are the same their checksums do, where
both files have them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from math import prod
from typing import cast

from pytreemod.errors import PytreemodError
from pytreemod.io.access import StrPath, depth_errors, shown_path
from pytreemod.io.configuration import describe_json
from pytreemod.io.containers import Container
from pytreemod.io.folders import open_arrays
from pytreemod.io.loading import description_of, table_of
from pytreemod.io.saving import USERS
from pytreemod.io.tables import Leaf, Source, Table, first_name, form_text, shown_name


def main(arguments: Sequence[str]) -> int:
    """The command line.

    Args:
        arguments: what stands behind the name of the program.

    Returns:
        0; 1 if two files differ; 2 for a file that cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="python -m pytreemod.io", description="Look into files that pytreemod.save wrote."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="the arrays and the configuration of a file")
    show.add_argument("file")
    show.add_argument("--config", action="store_true", help="configuration as well")
    diff = commands.add_parser("diff", help="how two files differ")
    diff.add_argument("file")
    diff.add_argument("other")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "show":
            print(show_file(chosen.file, config=chosen.config))
            return 0
        text = diff_files(chosen.file, chosen.other)
        print(text or "no difference")
        return 1 if text else 0
    except PytreemodError as error:
        print(error, file=sys.stderr)
        return 2


def show_file(path: StrPath, *, config: bool = False) -> str:
    """The table of a file: name, dtype and shape of each leaf, and its size.

    Args:
        path: of the file or folder.
        config: whether to list the classes and the configuration as well.

    Raises:
        FileError: the file is damaged, or there is none.
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


def diff_files(path: StrPath, other: StrPath) -> str:
    """How two files differ: a line for each leaf or configuration; empty if they do not.

    Args:
        path: of one file or folder; what only it has begins with `-`.
        other: of the other; what only it has begins with `+`.

    Raises:
        FileError: a file is damaged, or there is none.
    """
    one, two = _told(path), _told(other)
    lines: list[str] = []
    for name in [*one, *(name for name in two if name not in one)]:
        mine, theirs = one.get(name), two.get(name)
        if mine == theirs:
            continue
        if mine is None or theirs is None:
            sign, text = ("+", theirs) if mine is None else ("-", mine)
            lines.append(f"{sign} {name or '<root>'}: {text and text[0]}")
        elif mine[0] != theirs[0]:
            lines.append(f"! {name or '<root>'}: {mine[0]}, {theirs[0]}")
        else:
            lines.append(f"! {name or '<root>'}: {mine[0]} of other values")
    return "\n".join(lines)


def _told(path: StrPath) -> dict[str, tuple[str, str]]:
    """What a file says under each name: a text to show, and one to compare."""
    where = f"diff({shown_path(path)})"
    with open_arrays(path) as file, depth_errors(where):
        table = table_of(file, description_of(file, where), where)
        leaves = {".".join(name): leaf for name, leaf in table.leaves.items()}
        told = {name: (form_text(leaf), _checksum(file, leaf)) for name, leaf in leaves.items()}
    told |= {f"class of {name}": (cls, "") for name, cls in _classes_in(table)}
    for name, value in table.config.items():
        told[".".join(name)] = (describe_json(value), json.dumps(value, sort_keys=True))
    return told


def _checksum(file: Container, leaf: Leaf) -> str:
    if not leaf.is_array:
        return json.dumps(leaf.form["value"])
    entry = file.entries[first_name(cast("Source", leaf.source))]
    # A file of other tools has no checksums.
    return str(
        entry.checksum if entry.checksum is not None else hash(file.read(entry.name).tobytes())
    )


def _classes_in(table: Table) -> list[tuple[str, str]]:
    # The mark of a name that is not registered is for a load without `like`.
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
