"""Errors and warnings in text files."""

import pytest

from tests.goldens import Row, raised, refusals, rows_of, same

TEXT = """>>> import math

# A group, and what prepares it.
>>> number = 2
>>> math.sqrt(
...     -number)
ValueError: math domain error, or …
"""


def test_a_row_has_what_prepares_it():
    """That of the file, and that of its group."""
    assert rows_of(TEXT + "\n# Another.\n>>> f()\nE: a\n<BLANKLINE>\n  b\n") == [
        Row(("import math", "number = 2"), "math.sqrt(\n    -number)", TEXT.splitlines()[-1]),
        Row(("import math",), "f()", "E: a\n<BLANKLINE>\n  b"),
    ]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("[][0]", "IndexError: list index out of range"),
        ("{}['a\\n\\nb']", "KeyError: 'a\\n\\nb'"),
        ("raise ValueError('a\\n\\nb')", "ValueError: a\n<BLANKLINE>\nb"),
        ("(tmp_path / 'a').read_bytes()", "FileNotFoundError: … 'tmp_path/a'"),
        ("len([])", "nothing"),
    ],
)
def test_the_whole_text_is_compared(call, text):
    """The class of the error, too; a folder has one name, an ellipsis matches any text."""
    found = raised(Row((), call, ""), {})

    assert same(found, text)
    assert not same(found + ".", text)
    assert not same(found, text[:-1])


def test_another_text_is_an_error_and_is_written_if_asked(tmp_path, monkeypatch):
    """The row fails, whichever part of the text is another; with UPDATE_GOLDEN it is replaced."""
    file = tmp_path / "test_it.txt"
    file.write_text(TEXT)
    names = {"__file__": str(tmp_path / "test_it.py")}
    (row,) = rows_of(TEXT)
    monkeypatch.delenv("UPDATE_GOLDEN", raising=False)

    with pytest.raises(AssertionError, match=r"UPDATE_GOLDEN=1(.|\n)*math domain error, or"):
        refusals(names)(row)
    monkeypatch.setenv("UPDATE_GOLDEN", "1")
    refusals(names)(row)

    expected = str(raised(row, names))
    assert file.read_text() == TEXT.replace(row.expected, expected)
    monkeypatch.delenv("UPDATE_GOLDEN")
    refusals(names)(rows_of(file.read_text())[0])
