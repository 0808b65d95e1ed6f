"""The table of sizes counts correctly."""

import textwrap

from tests.architecture import figures
from tests.architecture.imports import PACKAGE


def test_lines_are_counted_by_what_is_on_them():
    """Docstrings and comments are not code; a statement of several lines is."""
    text = textwrap.dedent(
        '''
        """A file."""

        import threading  # Why.


        def check_size(n):
            """What it checks."""
            if n < 1:
                raise ValueError(
                    "no size"
                )


        LOCK = threading.Lock()
        '''
    )
    assert figures.figures_of(text) == figures.Figures(
        files=1, total=15, code=7, imports=1, refusals=5, hidden=1
    )


def test_the_table_has_every_room_and_the_sum(capsys):
    """Rooms are folders; files beside them are rows, too."""
    figures.main()
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line[:1] == "|"]
    named = {row[1].strip(): row for row in rows}

    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms < set(named)
    lines = sum(
        path.read_text(encoding="utf-8").count("\n") for path in sorted(PACKAGE.rglob("*.py"))
    )
    assert int(named["all"][3]) == lines
