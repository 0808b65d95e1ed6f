"""The tests are in the rooms of the source: a file for each file."""

import re

from tests.architecture.imports import PACKAGE, ROOT

WITHOUT = {
    # Names for types, which decide nothing; and errors, which are tested wherever one is raised.
    "typing.py",
    "errors.py",
    "version.py",
    # Tested by the files that use them alone.
    "module/annotations.py",
}
"""Files of the source without separate tests."""
THROUGH_THE_DOOR = "io"
"""A room whose tests use public names alone: they are ordered by features, not by files."""


def test_each_file_has_its_tests():
    """You find the tests of a file by its name."""
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    missing = [
        path.as_posix()
        for path in files
        if path.name != "__init__.py"
        and path.parts[0] != THROUGH_THE_DOOR
        and not (ROOT / "tests" / path.with_name(f"test_{path.name}")).is_file()
    ]

    assert sorted({*missing} - WITHOUT) == []


def test_the_tests_of_files_come_through_the_door():
    """The private part can be rewritten without them."""
    tests = (ROOT / "tests" / THROUGH_THE_DOOR).glob("*.py")
    inner = re.compile(rf"(from|import) {PACKAGE.name}\.{THROUGH_THE_DOOR}\b")

    assert [path.name for path in tests if inner.search(path.read_text(encoding="utf-8"))] == []
