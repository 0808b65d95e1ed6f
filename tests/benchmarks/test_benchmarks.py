"""Every benchmark can be imported, the smallest runs, and programs are those written by hand."""

import importlib
import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import __main__ as runner
from benchmarks.medians import as_markdown

usual = pytest.mark.usefixtures("usual_promotion")
pytestmark = [pytest.mark.collects, pytest.mark.slow, usual]
pytest.importorskip("optax", reason="the benchmarks train with optax")


def test_every_benchmark_can_be_imported():
    """Each has a table."""
    assert all(importlib.import_module(f"benchmarks.{name}").BENCHMARK for name in runner.NAMES)


def test_the_runner_prints_tables_as_json(capfd):
    """Each row has its spread, its target and its verdict."""
    assert runner.main(["--only", "flattening", "--quick", "--json"]) == 0

    (table,) = json.loads(capfd.readouterr().out).values()
    assert table["surroundings"]["jax"] == jax.__version__
    assert {"label", "target", "met", "dicts", "pytreemod"} <= {*table["rows"][0]}


@pytest.mark.parametrize("name", ["jax-0.10", "jax-0.12"])
def test_the_readme_has_the_stored_results(name):
    """As `python -m benchmarks.medians` prints them."""
    results = json.loads((runner.ROOT / f"benchmarks/results/{name}.json").read_text("utf-8"))
    assert as_markdown(results) in (runner.ROOT / "benchmarks/README.md").read_text("utf-8")


def test_compiled_programs_are_those_written_by_hand():
    """Each layer, its gradient and a training step: operations, flops and bytes; one more shows."""
    programs = importlib.import_module("benchmarks.programs")
    one, two = (
        programs.Program.of(jax.jit(fn).lower(jnp.ones(3)).compile())
        for fn in (lambda x: x + 1, lambda x: jnp.sin(x) + 1)
    )

    assert "sine +1" in programs.differences(two, one)
    assert [row.label for row in programs.BENCHMARK.rows(True) if row.met is False] == []
