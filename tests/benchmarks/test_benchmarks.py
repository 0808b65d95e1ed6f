"""Every benchmark runs, small and rough, and prints its table; no time is asserted."""

import importlib
import json
import shutil

import jax
import pytest

from benchmarks import __main__ as runner
from benchmarks.libraries import installed

pytest.importorskip("optax", reason="the benchmarks train with optax")

# Ten seconds and more: they compile much, and start many processes.
SLOW = {
    "programs",
    "importing",
    "instructions",
    "static",
    "eager",
    "dispatch",
    "training",
    "tracing",
    "stack",
    "initializing_keys",
    "surgery",
    "memory",
}


@pytest.fixture(autouse=True)
def usual_promotion():
    """JAX as users of the benchmarks find it: optax and hand-written code mix dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def named(names):
    """Parameters; the slow ones are marked."""
    return [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in names]


@pytest.mark.filterwarnings("default:::flax")
@pytest.mark.filterwarnings("default:::equinox")
@pytest.mark.parametrize("name", named(runner.NAMES))
def test_benchmark_prints_its_table(name, capsys):
    """In its quick form each one measures all that is installed, and ours against a target."""
    if name == "instructions" and shutil.which("valgrind") is None:
        pytest.skip("instructions are counted by valgrind, which is not installed")
    benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK

    benchmark.main(["--quick"])

    printed = capsys.readouterr().out
    versions, _, title, _, columns, *rows = printed.splitlines()
    assert "pytreemod" in versions
    assert title == benchmark.title
    assert columns.split()[-2:] == ["pytreemod", "target"]
    assert any(row.endswith((" met", " MISSED")) for row in rows)


def test_all_numbers_come_as_json(capsys):
    """The other form holds, for each row, every spread, the target and the verdict."""
    importlib.import_module("benchmarks.construction").BENCHMARK.main(["--quick", "--json"])

    content = json.loads(capsys.readouterr().out)
    row = content["rows"][0]
    assert content["surroundings"]["jax"] == jax.__version__
    assert set(row) == {"label", "target", "met", "dataclass", *installed()}
    assert set(row["pytreemod"]) == {"seconds", "ratio"}


def test_runner_gathers_what_each_process_has_measured(capfd):
    """`python -m benchmarks --only construction --quick --json` is a dict by name."""
    status = runner.main(["--only", "construction", "--quick", "--json"])

    tables = json.loads(capfd.readouterr().out)
    assert status == 0
    assert list(tables) == ["construction"]
    assert tables["construction"]["rows"]


def test_runner_says_which_benchmark_could_not_run(monkeypatch, capfd):
    """Those that fail do not stop the others, and are named in the end."""
    monkeypatch.setattr(runner, "NAMES", ("no_such_file", "nor_this"))

    status = runner.main(["--quick"])

    assert status == 1
    assert capfd.readouterr().err.endswith("failed: no_such_file, nor_this\n")
