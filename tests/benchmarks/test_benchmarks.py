"""Every benchmark runs, small and rough, and prints its table; no time is asserted."""

import importlib
import json
import shutil

import jax
import pytest

from benchmarks import __main__ as runner
from benchmarks.libraries import installed

pytestmark = pytest.mark.collects

pytest.importorskip("optax", reason="the benchmarks train with optax")


@pytest.fixture(autouse=True)
def usual_promotion():
    """JAX as users of the benchmarks find it: optax and hand-written code mix dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.filterwarnings("default:::flax")
@pytest.mark.filterwarnings("default:::equinox")
@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in runner.NAMES if n != "shares"])
def test_benchmark_prints_its_table(name, capsys):
    """With --quick each one measures all installed libraries, and pytreemod against a target."""
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


@pytest.mark.slow
def test_shares_add_up_to_what_a_thing_takes(capsys):
    """Each step has the time of all steps so far; the last one is pytreemod."""
    importlib.import_module("benchmarks.shares").BENCHMARK.main(["--quick", "--json"])

    rows = json.loads(capsys.readouterr().out)["rows"]
    steps = [row for row in rows if "seconds" in row]
    last = [row for row in steps if row["label"].endswith(": pytreemod")]
    assert len(rows) - len(steps) == len(last) == 4
    assert all(row["seconds"]["median"] > 0 for row in steps)


@pytest.mark.slow
def test_all_numbers_come_as_json(capsys):
    """The other form holds, for each row, every spread, the target and the verdict."""
    importlib.import_module("benchmarks.flattening").BENCHMARK.main(["--quick", "--json"])

    content = json.loads(capsys.readouterr().out)
    row = content["rows"][0]
    assert content["surroundings"]["jax"] == jax.__version__
    assert set(row) == {"label", "target", "met", "dicts", *installed()}
    assert set(row["pytreemod"]) == {"seconds", "ratio"}


@pytest.mark.slow
def test_runner_gathers_what_each_process_has_measured(capfd):
    """`python -m benchmarks --only flattening --quick --json` is a dict by name."""
    status = runner.main(["--only", "flattening", "--quick", "--json"])

    tables = json.loads(capfd.readouterr().out)
    assert status == 0
    assert list(tables) == ["flattening"]
    assert tables["flattening"]["rows"]


def test_runner_says_which_benchmark_could_not_run(monkeypatch, capfd):
    """Those that fail do not stop the others, and are named in the end."""
    monkeypatch.setattr(runner, "NAMES", ("no_such_file", "nor_this"))

    status = runner.main(["--quick"])

    assert status == 1
    assert capfd.readouterr().err.endswith("failed: no_such_file, nor_this\n")
