"""The glossary has the words of the source: those that it introduces, and none that is gone."""

import ast
import re

import pytest

from tests.docs.pages import ROOT

TABLES = [
    re.findall(r"^\| \*\*([^*]+)\*\* \|", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.M)
    for page in ("explanation/glossary.md", "contributing/words.md")
]
WORDS = [word for table in TABLES for word in table]
SOURCE = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "pytreemod").rglob("*.py"))
}
EVERYTHING = "\n".join(SOURCE.values())

EMPHASIS = {"and", "or", "not", "function", "under"}
"""Words that are only stressed, and have their English meaning."""


def introduced(text):
    """The words in italics of a file's own docstring: that is where it introduces them."""
    story = ast.get_docstring(ast.parse(text)) or ""
    found = re.findall(r"(?<![*\w])\*([A-Za-z][\w -]*)\*(?![*\w])", story)
    return {word.lower() for word in found} - EMPHASIS


def is_used(word, text):
    """Whether a word, or one that begins with it, stands in a text, be it in a name."""
    letters = r"[ _-]".join(map(re.escape, re.split(r"[ -]", word)))
    return re.search(rf"(?<![A-Za-z]){letters}", text, re.I) is not None


@pytest.mark.parametrize("word", WORDS)
def test_each_word_is_used(word):
    """In the source; an unused word is removed."""
    assert is_used(word, EVERYTHING)


def test_no_word_stands_twice():
    """It has one meaning."""
    assert len({word.lower() for word in WORDS}) == len(WORDS) > 25
    assert len(TABLES[0]) <= 40


@pytest.mark.parametrize("name", [name for name, text in SOURCE.items() if introduced(text)])
def test_each_word_that_a_file_introduces_is_there(name):
    """In any form: `reaps` belongs to `reap`."""
    missing = [
        word
        for word in introduced(SOURCE[name])
        if not any(word.startswith(known.lower()) for known in WORDS)
    ]
    assert missing == []


def test_the_reader_finds_words():
    """This test can fail: words that are introduced or used are distinguished from others."""
    assert introduced('"""A *twin*, *and* **Law** `*args` *Deposited things*."""') == {
        "twin",
        "deposited things",
    }
    assert is_used("key of a call", "the Key of a call")
    assert is_used("reading class", "reading_classes")
    assert not is_used("twin", "entwined")
