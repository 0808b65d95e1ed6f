"""The command line: the content of a file, and the difference between two."""

import contextlib
import io
import runpy
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import pytreemod as pm
from pytreemod import nn
from tests.helpers.trees import ramp


class Unregistered(pm.Module):
    """A user's class, of which files have the name."""

    layer: nn.Identity


def main(*arguments):
    """The output of the command, and its status."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch("sys.argv", ["pytreemod.io", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit, match=r"\d") as ended,
    ):
        runpy.run_module("pytreemod.io", run_name="__main__")
    return out.getvalue().removesuffix("\n"), err.getvalue(), ended.value.code


def show_file(path, *options):
    """The table of a file."""
    return main("show", path, *options)[0]


def diff_files(path, other):
    """How two files differ."""
    return main("diff", path, other)[0]


@pytest.fixture
def saved(tmp_path):
    """A file with one leaf of each kind."""
    tree = {"layer": nn.Linear(3, 4, key=jax.random.key(0)), "key": jax.random.key(1), "rate": 0.5}
    tree |= {"weak": jnp.asarray(1.0), "numpy": np.ones((1000, 2))}
    pm.save(tmp_path / "file", tree, {"step": 3})
    return tmp_path / "file"


def test_show_is_a_table(saved):
    lines = show_file(saved, "--config").splitlines()

    assert lines[:6] == [
        "layer.weight  f32[4,3]                      48 B",
        "layer.bias    f32[4]                        16 B",
        "key           keys of threefry2x32, u32[2]  8 B",
        "rate          0.5",
        "weak          f32[] weak                    4 B",
        "numpy         f64[1000,2] numpy             16 kB",
    ]
    assert lines[6] == "6 leaves, 2,019 numbers, 16.1 kB"
    assert lines[7] == f"written by pytreemod {pm.__version__}, JAX {jax.__version__}"
    assert 'metadata: {"step": 3}' in lines
    assert "layer: pytreemod.nn.Linear" in lines
    assert "layer.out_features = 4" in lines


def test_diff_names_what_differs(tmp_path):
    layer = nn.Linear(3, 4, key=jax.random.key(0))
    pm.save(tmp_path / "a", {"layer": layer, "n": 1, "old": ramp(2), "same": ramp(2)})
    other = layer.replace(bias=layer.bias + 1)
    pm.save(tmp_path / "b", {"layer": other, "n": 2, "new": ramp(2), "same": ramp(2)})

    assert diff_files(tmp_path / "a", tmp_path / "b").splitlines() == [
        "Diff: 1 added, 1 removed, 1 configuration, 1 values, 2 equal",
        "  added",
        "    new: f32[2]",
        "  removed",
        "    old: f32[2]",
        "  configuration",
        "    n: 1 -> 2",
        "  values",
        f"    layer.bias: largest 1, relative {1 / abs(layer.bias).max():.3g}, 4 of 4",
    ]
    assert diff_files(tmp_path / "a", tmp_path / "a") == "Diff: none in 5 leaves"


def test_diff_sees_classes_and_configuration(tmp_path):
    pm.save(tmp_path / "a", nn.Dropout(0.5))
    pm.save(tmp_path / "b", nn.Dropout(0.1))
    pm.save(tmp_path / "c", nn.Identity())
    pm.save(tmp_path / "d", Unregistered(nn.Identity()))

    assert "p: 0.5 -> 0.1" in diff_files(tmp_path / "a", tmp_path / "b")
    assert "<root>: pytreemod.nn.Dropout -> pytreemod.nn.Identity" in diff_files(
        tmp_path / "a", tmp_path / "c"
    )
    assert "<root>: pytreemod.nn.Identity -> Unregistered" in diff_files(
        tmp_path / "c", tmp_path / "d"
    )
    assert "<root>: Unregistered" in show_file(tmp_path / "d", "--config")


def test_files_of_other_tools_are_shown_and_compared(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        safetensors.numpy.save_file({"x": np.full(2, value)}, tmp_path / name)

    assert show_file(tmp_path / "a") == "x  f64[2]  16 B\n1 leaf, 2 numbers, 16 B"
    assert diff_files(tmp_path / "a", tmp_path / "b").endswith("x: largest 1, relative 1, 2 of 2")


def test_the_command_answers_with_its_status(saved):
    assert main("show", saved)[1:] == ("", 0)
    assert main("diff", saved, saved) == ("Diff: none in 6 leaves", "", 0)
    pm.save(saved.with_name("other"), ramp(2))
    assert main("diff", saved, saved.with_name("other"))[2] == 1
    _, told, status = main("show", saved.with_name("none"))
    assert status == 2
    assert "no such file" in told


@pytest.mark.slow
def test_the_command_runs_as_a_module(saved):
    command = [sys.executable, "-W", "error", "-m", "pytreemod.io", "show", str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert "6 leaves" in done.stdout
