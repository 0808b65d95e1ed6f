"""`docs/explanation/founding-documents.md` is complete, and what it cites exists."""

import re

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "explanation" / "founding-documents.md").read_text(encoding="utf-8")
CAPABILITIES = {"F": 14, "G": 21, "L": 19, "X": 12, "S": 14}
ROWS = re.findall(r"^\| ([FGLXS]\d+) \| (.+?) \| (.+?) \|(?: (.+?))? \|$", PAGE, re.M)
CITED = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", PAGE)))


def test_every_capability_has_one_row():
    """F1 to F14, G1 to G21, L1 to L19, X1 to X12 and S1 to S14, in order."""
    every = [f"{letter}{n}" for letter, last in CAPABILITIES.items() for n in range(1, last + 1)]

    assert [row[0] for row in ROWS] == every


def test_what_is_not_shown_says_when_it_comes():
    """A row without a test or a page names the room in which it is planned."""
    silent = [row[0] for row in ROWS if not row[3] and "lanned: " not in row[2]]

    assert silent == []


@pytest.mark.parametrize("cited", CITED)
def test_cited_tests_exist(cited):
    """A test that the page names is there, under that name."""
    path, _, name = cited.partition("::")

    assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
    assert (ROOT / path).exists()
