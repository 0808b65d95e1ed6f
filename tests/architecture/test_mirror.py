"""The tests are in the rooms of the source: a file for each file."""

from tests.architecture.imports import PACKAGE, ROOT

WITHOUT = {
    # Names for types, which decide nothing; and errors, which are tested wherever one is raised.
    "typing.py",
    "errors.py",
    "version.py",
    # Tested by the files that use them alone.
    "io/__main__.py",
    "module/annotations.py",
}
"""Files of the source that have no tests of their own."""


def test_each_file_has_its_tests():
    """Whoever changes a file finds at once what is known about it."""
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    missing = [
        path.as_posix()
        for path in files
        if path.name != "__init__.py"
        and not (ROOT / "tests" / path.with_name(f"test_{path.name}")).is_file()
    ]

    assert sorted({*missing} - WITHOUT) == []
