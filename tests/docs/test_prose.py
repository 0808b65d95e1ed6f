"""Everything that a person reads is in plain English: pages, docstrings, comments, messages."""

from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, name_of
from tests.docs.prose import (
    Passage,
    findings,
    passages_of,
    passages_of_page,
    passages_of_source,
    proselint_findings,
)

FOLDERS = ("pytreemod", "examples", "docs/hooks", "benchmarks", "tests/helpers")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
SOURCES += [ROOT / "tasks.py", ROOT / "tests/conftest.py"]
BESIDE = [
    ROOT / name
    for name in (
        "CHANGELOG.md",
        "examples/README.md",
        "benchmarks/README.md",
        "tests/docs/mistakes.md",
    )
]
MADE = {"docs/reference/mistakes.md"}
"""Pages that are made from another file, which is checked."""

EVERY = [path for path in [*PAGES, *BESIDE, *SOURCES] if name_of(path) not in MADE]


def wrong_in(path: Path) -> list[str]:
    """What is wrong in a file, with lines."""
    passages = passages_of(path)
    own = [(p.line, found) for p in passages for found in findings(p)]
    prose = [p for p in passages if p.is_prose]
    return [f"{line}: {said}" for line, said in sorted([*own, *proselint_findings(prose)])]


@pytest.mark.parametrize("path", EVERY, ids=name_of)
def test_prose_is_plain(path: Path):
    """No banned word, no sentence of more than thirty words, and nothing that proselint finds."""
    assert wrong_in(path) == []


def test_findings():
    """The checks can fail: words, sentences, proselint."""
    assert [*findings(Passage("It is told where it stands.", 1))] == [
        "'told': passed, given, warned, reported",
        "'stands': is, represents, appears",
    ]
    assert [*findings(Passage("What is a pytree?", 1))] == []
    assert [*findings(Passage("Changed in place; it takes place.", 1))] == []
    assert len([*findings(Passage("word " * 31 + ".", 1))]) == 1
    assert [*findings(Passage("word " * 31, 1, is_prose=False))] == []
    assert [
        *proselint_findings([Passage("Good.", 4), Passage("It is first of all a list.", 9)])
    ] == [(9, "Redundancy. Use 'first' instead of 'first of all'.")]


def test_passages_of_a_page():
    """Paragraphs, items, cells; no code."""
    page = "# A `b`\n\nOne [two](c.md)\nthree.\n\n```python\ntold\n```\n\n- x\n- y z\n\n"
    page += "| a | b |\n|---|---|\n"
    assert [(p.line, p.text) for p in passages_of_page(page)] == [
        (1, "A X"),
        (3, "One two three."),
        (10, "x"),
        (11, "y z"),
        (13, "a"),
        (13, "b"),
    ]


def test_passages_of_a_source():
    """Docstrings without examples, comments, strings of several words; f-strings as one."""
    source = '''"""Says.

    a table

Args:
    a: is b.

Examples:
    >>> told
"""
# One
# two.
x = f"it is {y} here", "a b c", "a"
'''
    found = [(p.text, p.is_prose) for p in passages_of_source(source)]
    assert sorted(found) == [
        ("One two.", True),
        ("Says.", True),
        ("a b c", False),
        ("is b.", True),
        ("it is X here", False),
    ]
