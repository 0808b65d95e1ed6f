"""The command line: what a file holds, and how two differ."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import pytreemod as pm
from pytreemod import nn
from pytreemod.io.showing import diff_files, main, show_file
from tests.helpers.trees import ramp


class Unregistered(pm.Module):
    """A user's class, of which files have the name."""

    layer: nn.Identity


@pytest.fixture
def saved(tmp_path):
    """A file with one leaf of each kind."""
    tree = {"layer": nn.Linear(3, 4, key=jax.random.key(0)), "key": jax.random.key(1), "rate": 0.5}
    tree |= {"weak": jnp.asarray(1.0), "numpy": np.ones((1000, 2))}
    pm.save(tmp_path / "file", tree, {"step": 3})
    return tmp_path / "file"


def test_show_is_a_table(saved):
    lines = show_file(saved, config=True).splitlines()

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
        "! layer.bias: f32[4] of other values",
        "! n: 1, 2",
        "- old: f32[2]",
        "+ new: f32[2]",
    ]
    assert diff_files(tmp_path / "a", tmp_path / "a") == ""


def test_diff_sees_classes_and_configuration(tmp_path):
    pm.save(tmp_path / "a", nn.Dropout(0.5))
    pm.save(tmp_path / "b", nn.Dropout(0.1))
    pm.save(tmp_path / "c", nn.Identity())
    pm.save(tmp_path / "d", Unregistered(nn.Identity()))

    assert "! p: 0.5, 0.1" in diff_files(tmp_path / "a", tmp_path / "b")
    assert "! class of <root>: pytreemod.nn.Dropout, pytreemod.nn.Identity" in diff_files(
        tmp_path / "a", tmp_path / "c"
    )
    assert "! class of <root>: pytreemod.nn.Identity, Unregistered" in diff_files(
        tmp_path / "c", tmp_path / "d"
    )
    assert "<root>: Unregistered" in show_file(tmp_path / "d", config=True)


def test_files_of_other_tools_are_shown_and_compared(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        safetensors.numpy.save_file({"x": np.full(2, value)}, tmp_path / name)

    assert show_file(tmp_path / "a") == "x  f64[2]  16 B\n1 leaf, 2 numbers, 16 B"
    assert diff_files(tmp_path / "a", tmp_path / "b") == "! x: f64[2] of other values"


def test_the_command_answers_with_its_status(saved, capsys):
    assert main(["show", str(saved)]) == 0
    assert "layer.weight" in capsys.readouterr().out
    assert main(["diff", str(saved), str(saved)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    pm.save(saved.with_name("other"), ramp(2))
    assert main(["diff", str(saved), str(saved.with_name("other"))]) == 1
    capsys.readouterr()
    assert main(["show", str(saved.with_name("none"))]) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_runs_as_a_module(saved):
    command = [sys.executable, "-W", "error", "-m", "pytreemod.io", "show", str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert "6 leaves" in done.stdout
