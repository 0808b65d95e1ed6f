"""`docs/how-to/come-from-equinox.md` stays true: what differs, and which names are missing."""

import re
import types

import equinox
import pytest

import pytreemod
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "how-to" / "come-from-equinox.md").read_text(encoding="utf-8")
TESTED = (ROOT / "tests" / "parity" / "test_deviations.py").read_text(encoding="utf-8")


def public_names(module):
    """What a module offers, without the modules in it."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }


def test_every_tested_deviation_is_on_the_page():
    """Each test of tests/parity/test_deviations.py is named in a comment, beside what it shows."""
    named = {word for text in re.findall(r"<!--(.*?)-->", PAGE, re.S) for word in text.split()}
    tested = set(re.findall(r"^def test_(\w+)", TESTED, re.M))

    assert named - tested == set(), "on the page, but not tested"
    assert tested - named == set(), "tested, but not on the page"


@pytest.mark.parametrize(
    ("start", "theirs", "ours"),
    [("In the package:", equinox, pytreemod), ("In `nn`:", equinox.nn, pytreemod.nn)],
)
def test_missing_names_are_listed(start, theirs, ours):
    """The names that Equinox has and pytreemod lacks are those on the page, no more, no fewer."""
    paragraph = PAGE[PAGE.index(start) + len(start) :].split("\n\n")[0]

    assert set(re.findall(r"`(\w+)`", paragraph)) == public_names(theirs) - public_names(ours)
