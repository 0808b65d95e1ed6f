"""The public names, against a golden list; and their docstrings.

After a change on purpose: `UPDATE_GOLDEN=1 python -m pytest tests/architecture`, and read the diff.
"""

import inspect
import os
import types
from pathlib import Path

import pytest

import pytreemod
from pytreemod import nn

GOLDEN = Path(__file__).with_name("public_surface.txt")
NAMESPACES = {
    "pytreemod": pytreemod,
    "pytreemod.constraints": pytreemod.constraints,
    "pytreemod.nn": nn,
    "pytreemod.select": pytreemod.select,
}

# Rooms and files, which a package bears as attributes once they were imported.
ROOMS = {"errors", "typing", "version", "tree", "module", "transform", "state", "io", "parallel"}


def public_names(namespace):
    """The names that users may rely on."""
    names = getattr(namespace, "__all__", vars(namespace))
    return sorted(
        name
        for name in names
        if not name.startswith("_") and not _is_own_file(namespace, name, getattr(namespace, name))
    )


def _is_own_file(namespace, name, value):
    """Whether a name is there only because a file or a room bears it."""
    if not isinstance(value, types.ModuleType):
        return False
    if namespace is pytreemod:
        return name in ROOMS or name == "selectors"
    return value.__name__ == f"{namespace.__name__}.{name}" and name != "functional"


def surface():
    """All public names, one a line."""
    return [
        f"{prefix}.{name}" for prefix, space in NAMESPACES.items() for name in public_names(space)
    ]


def own_objects():
    """The public functions and classes that are defined here, by their first name."""
    found = {}
    for line in surface():
        prefix, name = line.rsplit(".", 1)
        value = getattr(NAMESPACES[prefix], name)
        if isinstance(value, types.FunctionType | type) and value.__module__.startswith(
            "pytreemod"
        ):
            found.setdefault(value, line)
    return {line: value for value, line in found.items()}


OWN = own_objects()
# An instance shows its function's docstring, and so the class can have none.
OWN.pop("pytreemod.BoundMethod")
every_name = pytest.mark.parametrize("value", OWN.values(), ids=OWN.keys())


def test_public_names_are_the_golden_list():
    """No name is added or removed by accident."""
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text("\n".join(surface()) + "\n")

    assert surface() == GOLDEN.read_text().splitlines()


def test_all_that_the_front_door_offers_is_public():
    """`from pytreemod import *` and the list agree."""
    assert all(
        hasattr(NAMESPACES[line.rsplit(".", 1)[0]], line.rsplit(".", 1)[1]) for line in surface()
    )
    assert len(OWN) > 30


@every_name
def test_every_public_name_has_a_docstring_with_an_example(value):
    """A first sentence, and an example that the tests of the docs run."""
    if issubclass(type(value), type) and issubclass(value, BaseException):
        assert inspect.getdoc(value)
        return

    doc = inspect.getdoc(value) or ""
    first = doc.split("\n\n")[0]
    assert first.endswith((".", ":", "`"))
    assert "Examples:" in doc
    assert ">>>" in doc


@every_name
def test_every_parameter_is_explained(value):
    """The Args section of a public function names every parameter."""
    if isinstance(value, type):
        return
    parameters = [
        p for p in inspect.signature(value).parameters.values() if not p.name.startswith("_")
    ]
    doc = inspect.getdoc(value) or ""

    missing = [p.name for p in parameters if f"{p.name}:" not in doc]
    assert missing == []
