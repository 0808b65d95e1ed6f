"""What type checkers see of pytreemod: pyright checks the other files in this folder."""

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


PROGRAM = """
from jaxtyping import install_import_hook
with install_import_hook("pytreemod", "beartype.beartype"):
    import pytreemod as pm
import jax
import jax.numpy as jnp

@pm.filter_jit(donate="x")
@pm.filter_value_and_grad(has_aux=True)
def loss(model, x):
    return jnp.sum(model(x)), "aux"

model = pm.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
_, gradient = loss(model, jnp.ones(2))
model = pm.apply_updates(model, gradient).replace(use_bias=True)
assert pm.tree_equal(pm.combine(*pm.partition(model, pm.is_array)), model)
"""


@pytest.mark.slow
def test_annotations_hold_when_they_are_checked_at_run_time() -> None:
    """Under jaxtyping's import hook, beartype accepts pytreemod's annotations, and our calls."""
    pytest.importorskip("beartype", reason="needs the run-time type checker beartype")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
