"""Libraries that are built on Equinox give the same numbers over pytreemod.

Each file of `libraries/` holds documented uses of one library. It runs in two processes: over
Equinox, and over an alias that makes pytreemod of `equinox` (see `alias`).
"""

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.parity.helpers import assert_same

ROOT = Path(__file__).parents[2]

SEES_NO_RULES = pytest.mark.xfail(
    jax.__version_info__ >= (0, 12),
    reason="mixes the arrays of a converted function with the jaxpr of another conversion; "
    "under this JAX both contain optimistix's own custom_jvp, whose rules cannot be compared",
)


def result_over(library: str, program: str, folder: Path) -> object:
    """The result of a program of `libraries/` in a process where Equinox is `library`."""
    file = folder / f"{program}-{library}"
    module = f"tests.parity.libraries.{program}"
    run = subprocess.run(
        [sys.executable, "-m", "tests.parity.alias", library, module, str(file)],
        cwd=ROOT,
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-5000:]
    return pickle.loads(file.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize(
    "package", ["diffrax", "lineax", pytest.param("optimistix", marks=SEES_NO_RULES)]
)
def test_a_library_gives_the_same_numbers(package, tmp_path):
    """Values, statistics and results by name, use by use."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; it is in the extra `tests`")
    theirs = result_over("equinox", f"{package}_uses", tmp_path)
    assert_same(theirs, result_over("pytreemod", f"{package}_uses", tmp_path))
