"""The view of type checkers: pyright checks the other files in this folder."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent


@pytest.mark.slow
def test_pyright_accepts_what_users_write_and_finds_their_mistakes() -> None:
    """Every `assert_type` holds, and every mistake in refused.py is reported."""
    pytest.importorskip("pyright", reason="needs the type checker pyright")
    files = sorted(str(path) for path in FOLDER.glob("*.py"))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    run = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    report: dict[str, Any] = json.loads(run.stdout)
    assert report["summary"]["filesAnalyzed"] == len(files)
    found = [
        f"{Path(d['file']).name}:{d['range']['start']['line'] + 1}: {d['message']}"
        for d in report["generalDiagnostics"]
    ]
    assert found == []


CHECKED = ["tests/helpers/checked_annotations.py", "tests/docs/test_docstrings.py"]
"""A file that uses all of pytreemod, and violates no annotation."""


@pytest.mark.long
@pytest.mark.slow
def test_annotations_hold_when_they_are_checked_at_run_time() -> None:
    """Where jaxtyping lets beartype check pytreemod, examples and layers work as before."""
    pytest.importorskip("beartype", reason="needs the run-time type checker beartype")
    hook = "--jaxtyping-packages=pytreemod,beartype.beartype"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", hook, *CHECKED]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-10_000:] + run.stderr
