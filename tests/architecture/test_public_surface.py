"""The public names, against a golden list.

After a change on purpose: `UPDATE_GOLDEN=1 python -m pytest tests/architecture`, and read the diff.
"""

import os
from pathlib import Path

import pytreemod
from pytreemod import nn

GOLDEN = Path(__file__).with_name("public_surface.csv")
NAMESPACES = {
    "pytreemod": pytreemod,
    "pytreemod.constraints": pytreemod.constraints,
    "pytreemod.nn": nn,
    "pytreemod.select": pytreemod.select,
    "pytreemod.testing": pytreemod.testing,
}


def public_names(namespace):
    """The names that users may rely on, without those of its own files."""
    names = getattr(namespace, "__all__", vars(namespace))
    own = f"{namespace.__name__}."
    found = {name: getattr(namespace, name) for name in names if not name.startswith("_")}
    return sorted(
        name
        for name, value in found.items()
        if namespace is pytreemod or getattr(value, "__name__", None) != own + name
    )


def test_public_names_are_the_golden_list():
    """No name is added or removed by accident."""
    surface = [
        f"{prefix}.{name}" for prefix, space in NAMESPACES.items() for name in public_names(space)
    ]
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text("\n".join(surface) + "\n")

    assert surface == GOLDEN.read_text().splitlines()
