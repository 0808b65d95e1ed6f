"""The page on the layout is true: its names exist, and no room is left out."""

import re

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "contributing" / "layout.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "pytreemod"
ROOMS = {
    file.parent.relative_to(PACKAGE).as_posix()
    for file in PACKAGE.rglob("__init__.py")
    if file.parent != PACKAGE
}


def quoted(page):
    """The text in backticks outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.S))


def paths_on(page):
    """Files and folders that a page names: names with a slash, or of a Python file."""
    return {name for name in quoted(page) if "/" in name or name.endswith(".py")}


def rooms_on(page):
    """The rooms that have a row in the table of a page."""
    return {name for row in re.findall(r"^\| (`[^|]+) \|", page, re.M) for name in quoted(row)}


def folders_on(page):
    """Folders in the first drawing of a page, with those that they are in."""
    drawing = re.search(r"```text\n(.*?)```", page, re.S)
    found, parent = set(), ""
    for indent, name in re.findall(r"^( *)(\w+)/ ", drawing.group(1), re.M):
        parent = parent if indent else name
        found.add(f"{parent}/{name}" if indent else name)
    return found


@pytest.mark.parametrize("name", sorted(paths_on(PAGE) | folders_on(PAGE)))
def test_what_the_page_names_is_there(name):
    """From the root of the repository, or from that of the package; `__init__.py` is in all."""
    assert (ROOT / name).exists() or (PACKAGE / name).exists()


def test_the_table_has_every_room_and_nothing_else():
    """Rooms inside of rooms, too."""
    files = {file.name for file in PACKAGE.glob("*.py") if file.name != "__init__.py"}
    assert rooms_on(PAGE) == ROOMS | files


def test_the_reader_finds_what_a_page_names():
    """This test can fail: names of all kinds are found."""
    page = "```text\na/   b\n    c/   d\n```\n| `x`, `y.py` | z `q` |\n`f` `u/v` `w.py`"
    assert paths_on(page) == {"y.py", "u/v", "w.py"}
    assert rooms_on(page) == {"x", "y.py"}
    assert folders_on(page) == {"a", "a/c"}
