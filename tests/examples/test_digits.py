"""The digits example runs and learns."""

import pytest

pytest.importorskip("sklearn", reason="examples/digits.py reads scikit-learn's digits")
pytest.importorskip("tqdm", reason="examples/digits.py shows tqdm's progress bar")


def test_short_run_learns(program, capsys):
    """Four epochs reach 90 % on the test set."""
    accuracy = program.main(["--epochs", "4"])

    assert accuracy >= 0.9
    assert f"test accuracy {accuracy:.2%}\n" in capsys.readouterr().out
