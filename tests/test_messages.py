"""Messages: each program of `messages.md` ends in a mistake, and says what the file shows.

In that file `##` begins a group and `###` a mistake: a program, whose last statement is the
mistake, and the text of its error or warning. `…` stands for any text. The site makes its page of
mistakes from it. With UPDATE_GOLDEN=1 a run writes the texts that have changed: read the diff.
"""

import ast
import os
import re
import sys
import types
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

SOURCE = Path(__file__).with_name("messages.md")

PREAMBLE = """\
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytreemod as pm
from pytreemod import nn

key = jax.random.key(0)
"""

ENTRY = re.compile(
    r"^### (?P<title>[^\n]+)\n\n```python\n(?P<program>.+?)```\n\n```text\n(?P<text>.+?)\n```\n",
    re.M | re.S,
)


class Mistake(NamedTuple):
    """One mistake of the file."""

    title: str
    program: str
    text: str


MISTAKES = [Mistake(**found.groupdict()) for found in ENTRY.finditer(SOURCE.read_text("utf-8"))]


def message_of(program: str, module: types.ModuleType) -> str:
    """What the last statement of a program raises: the class of the error, and its text."""
    scope = vars(module)
    exec(PREAMBLE, scope)
    *setup, last = ast.parse(program).body
    exec(compile(ast.Module(setup, []), "program.py", "exec"), scope)
    try:
        exec(compile(ast.Module([last], []), "program.py", "exec"), scope)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def fits(found: str, expected: str) -> bool:
    """Whether a text is the expected one, in which `…` matches any text."""
    return re.fullmatch("(?s:.*?)".join(map(re.escape, expected.split("…"))), found) is not None


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.title for mistake in MISTAKES])
def test_a_mistake_says_what_is_wrong(mistake, monkeypatch, tmp_path):
    """The program ends in exactly this text."""
    module = types.ModuleType("program")
    monkeypatch.setitem(sys.modules, "program", module)
    monkeypatch.chdir(tmp_path)
    # As a reader has it: optax itself does not pass under the strict rules of the other tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = message_of(mistake.program, module).replace(str(tmp_path), "/home/you")
    if os.environ.get("UPDATE_GOLDEN") and not fits(found, mistake.text):
        before, title, rest = SOURCE.read_text("utf-8").partition(f"### {mistake.title}\n")
        rest = rest.replace(f"```text\n{mistake.text}\n```", f"```text\n{found}\n```", 1)
        SOURCE.write_text(before + title + rest, "utf-8")
    elif not fits(found, mistake.text):
        assert found == mistake.text, "as messages.md, or run with UPDATE_GOLDEN=1"


def test_every_entry_of_the_file_is_read():
    """No heading is left out, because its entry has another form; each has its own anchor."""
    titles = re.findall(r"^### (.+)$", SOURCE.read_text("utf-8"), re.M)

    assert [mistake.title for mistake in MISTAKES] == titles
    assert len({title.lower() for title in titles}) == len(titles)


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.title for mistake in MISTAKES])
def test_a_message_is_short(mistake):
    """At most four lines, so that it is read."""
    assert len(mistake.text.splitlines()) <= 4
