"""The reference has an entry for everything public, and for every kind of error."""

import re
import types
from pkgutil import resolve_name

import pytest

import pytreemod
from pytreemod import errors
from tests.docs.pages import ROOT

ENTRIES = {
    entry
    for page in (ROOT / "docs" / "reference").rglob("*.md")
    for entry in re.findall(r"^::: pytreemod\.([\w.]+)", page.read_text(encoding="utf-8"), re.M)
}
# By import, where it must be: a room may not be there before it is asked for.
DOCUMENTED = [resolve_name(f"pytreemod.{entry}") for entry in ENTRIES]


ERRORS = [
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, (errors.PytreemodError, Warning))
]


def public(module):
    """The public names of a module, without the modules in it."""
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    return [name for name in names if not isinstance(getattr(module, name), types.ModuleType)]


@pytest.mark.parametrize(
    "module",
    [pytreemod, pytreemod.select, pytreemod.constraints, pytreemod.debug, pytreemod.nn],
    ids=lambda module: module.__name__,
)
def test_every_public_name_has_an_entry(module):
    """Everything public is in the reference, under this name or another of the same object."""
    things = {name: getattr(module, name) for name in public(module)}

    assert [n for n, thing in things.items() if not any(thing is x for x in DOCUMENTED)] == []


def test_every_error_has_an_entry():
    """Each class of error has an entry on the page of errors; they are few."""
    assert {f"errors.{error}" for error in ERRORS} <= ENTRIES
    assert len(ERRORS) <= 14
