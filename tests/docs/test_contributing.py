"""The pages on adding something name every file that it takes."""

import re

import pytest

from tests.docs.pages import ROOT

WORKED = {
    "add-a-transform.md": r"filter_linear_transpose",
    # `pm.` marks users of a selector; the selectors' own tests are listed anyway.
    "add-a-selector.md": r"RoleSelector|(?<!pm\.)select\.role",
}
"""By page, words that occur in the files where something was added by following it."""

FILES = {
    # Not texts of errors, which list all selectors.
    "add-a-selector.md": (
        "pytreemod/**/*",
        "tests/**/*.py",
        "tests/architecture/*",
        "docs/reference/*",
    ),
}
"""By page, the files in which such a word may occur, if not in all of them."""

OWN_TESTS = {"add-a-selector.md": "tests/**/test_select*.py"}
"""By page, tests that every new thing of its kind has a row in."""

EVERYWHERE = ("pytreemod/**/*", "tests/**/*", "docs/**/*", "benchmarks/**/*")
SUFFIXES = (".py", ".md", ".txt")


def listed(page):
    """The files in the table of a page."""
    text = (ROOT / "docs" / "contributing" / page).read_text(encoding="utf-8")
    return re.findall(r"^\| `([\w./-]+)`(?:,[^|]*)? \|", text, re.M)


def taken(page):
    """The files with one of the words, except those about adding things, and mistakes."""
    about = {*WORKED, "test_contributing.py", "mistakes.md"}
    files = [path for glob in FILES.get(page, EVERYWHERE) for path in ROOT.glob(glob)]
    word = re.compile(rf"\b({WORKED[page]})\b")
    found = [path for path in files if path.suffix in SUFFIXES and path.name not in about]
    found = [path for path in found if word.search(path.read_text(encoding="utf-8"))]
    found += ROOT.glob(OWN_TESTS[page]) if page in OWN_TESTS else ()
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.mark.parametrize("page", WORKED)
def test_the_list_of_files_is_complete(page):
    """The names occur in the files of the list, and in no other."""
    rows = listed(page)
    files = set(rows)

    assert len(rows) == len(files)
    assert [path for path in files if not (ROOT / path).is_file()] == []
    assert files - {"CHANGELOG.md"} == taken(page)


def test_a_layer_takes_three_files_and_a_row():
    """These files exist; a command writes all others that every layer needs."""
    *files, row = listed("add-a-layer.md")

    assert row == "tests/nn/catalogue.py"
    assert len(files) <= 3
    assert [path for path in files if not (ROOT / path).is_file()] == []
