"""The public names, against a golden list.

After a change on purpose: `UPDATE_GOLDEN=1 python -m pytest tests/architecture`, and read the diff.
"""

import os
import types
from pathlib import Path

import pytreemod
from pytreemod import nn

GOLDEN = Path(__file__).with_name("public_surface.csv")
NAMESPACES = {
    "pytreemod": pytreemod,
    "pytreemod.constraints": pytreemod.constraints,
    "pytreemod.nn": nn,
    "pytreemod.select": pytreemod.select,
}

ROOMS = {"errors", "typing", "version", "tree", "module", "transform", "state", "io", "parallel"}


def public_names(namespace):
    """The names that users may rely on, without those of its own files."""
    names = getattr(namespace, "__all__", vars(namespace))
    return sorted(
        name
        for name in names
        if not name.startswith("_") and not _is_own_file(namespace, name, getattr(namespace, name))
    )


def _is_own_file(namespace, name, value):
    if not isinstance(value, types.ModuleType):
        return False
    if namespace is pytreemod:
        return name in ROOMS or name == "selectors"
    return value.__name__ == f"{namespace.__name__}.{name}"


def test_public_names_are_the_golden_list():
    """No name is added or removed by accident."""
    surface = [
        f"{prefix}.{name}" for prefix, space in NAMESPACES.items() for name in public_names(space)
    ]
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text("\n".join(surface) + "\n")

    assert surface == GOLDEN.read_text().splitlines()
