"""The pages on adding something name every file that it takes."""

import re

import pytest

from tests.docs.pages import ROOT

WORKED = {
    "add-a-transform.md": ("filter_linear_transpose",),
    "add-a-layer.md": ("GroupNorm", "group_norm"),
}
"""By page, the names that were added by following it."""

FOLDERS = ("pytreemod", "tests", "docs", "benchmarks")
SUFFIXES = (".py", ".md", ".txt")


def listed(page):
    """The files in the table of a page."""
    text = (ROOT / "docs" / "contributing" / page).read_text(encoding="utf-8")
    return set(re.findall(r"^\| `([\w./-]+)` \|", text, re.M))


def naming(names):
    """The files in which one of the names stands, those about adding things aside."""
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    found = (path for path in files if path.suffix in SUFFIXES and path.name not in WORKED)
    return {
        path.relative_to(ROOT).as_posix()
        for path in found
        if path.name != "test_contributing.py" and stands_in(names, path)
    }


def stands_in(names, path):
    """Whether one of the names is a word in the text of a file."""
    return re.search(rf"\b({'|'.join(names)})\b", path.read_text(encoding="utf-8")) is not None


@pytest.mark.parametrize(("page", "names"), WORKED.items())
def test_the_list_of_files_is_complete(page, names):
    """What was added stands in the files of the list, and in no other."""
    files = listed(page)

    assert [path for path in files if not (ROOT / path).is_file()] == []
    assert files - {"CHANGELOG.md"} == naming(names)
