"""Code on the pages fits a narrow browser window, without a scroll bar."""

import pytest

from tests.docs.pages import PAGES, Block, blocks_in, blocks_of, name_of

WIDTH = 72
"""`docs/ruff.toml` has the same number. Output may be wider, because programs print it."""


def too_wide(block: Block) -> list[str]:
    """The lines of Python in a block that are wider than a page."""
    if block.language not in ("python", "pycon"):
        return []
    prompts = ">>> ", "... "
    lines = block.code.splitlines()
    code = lines if block.language == "python" else [x for x in lines if x.startswith(prompts)]
    return [line for line in code if len(line) > WIDTH]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_fits(page):
    """No line of Python is wider than 72 columns, the prompt of a session included."""
    assert [line for block in blocks_of(page) for line in too_wide(block)] == []


def test_a_wide_line_is_reported():
    """In a program and in a session, but not in the output of the session."""
    wide = "x" * (WIDTH - 3)
    text = f"```python\n{wide}xxxx\n```\n```pycon\n>>> {wide}\n{wide}xxxx\n```\n"
    program, session = blocks_in(text)

    assert too_wide(program) == [f"{wide}xxxx"]
    assert too_wide(session) == [f">>> {wide}"]
