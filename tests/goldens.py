"""Errors and warnings as data: in a text file, each call with the whole text that it raises.

Beside `test_linear.py` there is `test_linear.txt`, if that file says `test_refusals =
refusals(globals())`:

    # A wrong feature axis: the hint names the axis that fits.
    >>> layer = nn.Linear(3, 4, key=key)
    >>> layer(jnp.ones((3, 7)))
    ShapeError: Linear(in_features=3, out_features=4): expected x of shape (..., 3), got f32[3,7].
      Axis 0 fits; ...

A heading begins a group. Code without a text prepares its group; before the first heading, it
prepares the file. The names are those of the test file, `key`, and `tmp_path`, an empty folder. `…`
matches any text, for instance an address. With UPDATE_GOLDEN=1 a run updates the texts: read the
diff.
"""

import os
import re
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

PROMPT, MORE, HEADING, EMPTY = ">>> ", "... ", "# ", "<BLANKLINE>"
FOLDER = "tmp_path"
JAXS_OWN = "JAX_TRACEBACK_FILTERING"  # in a note about frames that JAX has left out


class Row(NamedTuple):
    """One call, the code that prepares it, and the expected text."""

    setup: tuple[str, ...]
    call: str
    expected: str


def rows_of(text: str) -> list[Row]:
    """The rows of a text file.

    Examples:
        >>> rows_of("# Why.\\n>>> x = 1\\n>>> int(\\n...     'a')\\nValueError: b\\n  c\\n")
        [Row(setup=('x = 1',), call="int(\\n    'a')", expected='ValueError: b\\n  c')]
    """
    rows: list[Row] = []
    common: list[str] | None = None
    setup: list[str] = []
    lines: list[list[str]] = []
    for line in [*text.splitlines(), HEADING]:
        if line.startswith(MORE) and not lines[-1][1:]:
            lines[-1][0] += "\n" + line.removeprefix(MORE)
        elif line.startswith((PROMPT, HEADING)):
            if lines and not lines[-1][1:]:
                setup.append(lines[-1][0])
            elif lines:
                rows.append(Row((*setup,), lines[-1][0], "\n".join(lines[-1][1:])))
            lines = [[line.removeprefix(PROMPT)]] if line.startswith(PROMPT) else []
            if line.startswith(HEADING):
                common = setup if common is None else common
                setup = [*common]
        elif line:
            lines[-1].append(line)
    return rows


def raised(row: Row, names: dict[str, Any]) -> str:
    """The error of the call: the class, and the text."""
    with tempfile.TemporaryDirectory() if FOLDER in str(row) else nullcontext("") as folder:
        scope = {"key": jax.random.key(0), FOLDER: Path(folder), **names}
        for line in row.setup:
            exec(line, scope)
        try:
            exec(row.call, scope)
        except Exception as error:
            text = text_of(error)
            text = text.replace(folder, FOLDER) if folder else text
            return re.sub("(?m)^$", EMPTY, text)
    return "nothing"


def text_of(error: Exception) -> str:
    """The last lines of a traceback: the class of an error, its message, and its notes."""
    notes = (note for note in getattr(error, "__notes__", ()) if JAXS_OWN not in note)
    return "\n".join([f"{type(error).__name__}: {error}", *notes])


def same(found: str, expected: str) -> bool:
    """Whether a text is the expected one, in which `…` matches any text."""
    parts = map(re.escape, expected.split("…"))
    return re.fullmatch("(?s:.*?)".join(parts), found) is not None


def refusals(names: dict[str, Any]) -> Callable[..., None]:
    """The test of all rows of the text file beside a test file, whose names are given."""
    path = Path(names["__file__"]).with_suffix(".txt")
    rows = rows_of(path.read_text(encoding="utf-8"))

    @pytest.mark.parametrize("row", rows, ids=[row.call[:70] for row in rows])
    def test_refusals(row: Row) -> None:
        """The whole text of the error or warning is that of the file."""
        found = raised(row, names)
        if not same(found, row.expected) and os.environ.get("UPDATE_GOLDEN"):
            text = path.read_text(encoding="utf-8")
            call = PROMPT + row.call.replace("\n", "\n" + MORE) + "\n"
            text = text.replace(f"{call}{row.expected}\n", f"{call}{found}\n")
            path.write_text(text, encoding="utf-8")
        elif not same(found, row.expected):
            assert found == row.expected, f"as {path.name}, or run with UPDATE_GOLDEN=1"

    return test_refusals
