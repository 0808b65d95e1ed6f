"""No room is larger than its budget in `pyproject.toml`, so that the library stays small."""

import pytest

import tasks

SIZES = tasks.sizes()


def test_everything_that_is_counted_has_a_budget():
    """A new room needs one, too."""
    assert sorted(SIZES) == sorted(tasks.budgets())


@pytest.mark.parametrize("name", sorted(SIZES))
def test_a_room_is_within_its_budget(name):
    """`python3 tasks.py size` shows all of them."""
    assert SIZES[name] <= tasks.budgets()[name]


def test_only_code_is_counted(tmp_path):
    """Not blank lines, comments and docstrings; a call over three lines is three."""
    path = tmp_path / "some.py"
    path.write_text(
        '"""Story.\n\nMore."""\n\nimport ast  # why\n\n# Comment.\nx = ast.dump(\n    1,\n)\n'
    )

    assert tasks.code_lines(path) == 4
