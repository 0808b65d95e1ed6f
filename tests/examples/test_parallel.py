"""The example trains alike on one device and on eight, and splits what it says to be split."""

import contextlib
import io
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from pytreemod import nn
from tests.helpers.examples import FOLDER

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

pytest.importorskip("sklearn", reason="examples/parallel.py reads scikit-learn's digits")
pytest.importorskip("tqdm", reason="examples/parallel.py shows tqdm's progress bar")


@pytest.fixture(scope="module")
def short_run(program):
    """One run of the command: what it printed, and what it returned."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        results = program.main(["--epochs", "2", "--width", "32", "--learning-rate", "0.3"])
    return printed.getvalue(), results


def test_all_ways_train_alike(short_run):
    """Loss by loss and weight by weight; and they learn."""
    _, results = short_run
    reference = results["one device"]

    assert list(results) == ["one device", "filter_jit", "filter_shard_map", "weights split"]
    assert reference.losses[-1] < 0.9 * reference.losses[0]
    for trained in results.values():
        np.testing.assert_allclose(trained.losses, reference.losses, atol=1e-5)
        for leaves in zip(*map(jax.tree.leaves, (trained.model, reference.model)), strict=True):
            np.testing.assert_allclose(*leaves, atol=1e-5)


def test_things_lie_where_is_said(short_run):
    """On one device, or on all eight; a weight that is split has an eighth on each."""
    models = {name: trained.model for name, trained in short_run[1].items()}

    weights = {name: model.layers[1].weight for name, model in models.items()}
    parts = {name: weight.addressable_shards[0].data.shape for name, weight in weights.items()}
    assert [len(weight.devices()) for weight in weights.values()] == [1, 8, 8, 8]
    assert list(parts.values()) == [(32, 32), (32, 32), (32, 32), (32, 4)]


def test_what_each_device_holds_is_counted(short_run):
    """Numbers and their momenta: all of them, or an eighth of the weights, and all biases."""
    held = [trained.bytes_on_each for trained in short_run[1].values()]

    weights, biases = 64 * 32 + 32 * 32 + 32 * 10, 32 + 32 + 10
    whole, split = 2 * 4 * (weights + biases), 2 * 4 * (weights // 8 + biases)
    assert held == [whole, whole, whole, split]


def test_what_is_printed_is_what_came(short_run):
    """A line for each way; and how wrong the mean of the gradients is."""
    printed, results = short_run

    for name, trained in results.items():
        line = rf"^{name} +{trained.losses[-1]:.6f} +\S+ +{trained.accuracy:.2%} +\d+\.\d  "
        assert re.search(line, printed, re.MULTILINE)
    assert "pmean(grad(loss)) is 8.0000 times as large as grad(pmean(loss))\n" in printed


def test_the_gradient_by_hand_is_the_gradient(program):
    """And the other one is that eight times, not otherwise wrong."""
    mesh = Mesh(np.array(jax.devices()[:8]), (program.AXIS,))
    model, (data, _) = nn.MLP(64, 10, 8, 1, key=jax.random.key(0)), program.load_data(0)
    batch = data.images[:16], data.labels[:16]

    expected = jax.jit(jax.grad(program.loss_fn))(model, *batch)
    found = jax.jit(lambda m: program.gradient_by_hand(mesh)(m, *batch))(model)[1]
    wrong = jax.jit(lambda m: program.gradient_by_hand(mesh, wrong=True)(m, *batch))(model)[1]

    for right, by_hand, too_large in zip(*map(jax.tree.leaves, (expected, found, wrong))):
        np.testing.assert_allclose(by_hand, right, atol=1e-6)
        np.testing.assert_allclose(too_large, 8 * right, atol=1e-5)


def test_too_few_devices_are_an_error(program, monkeypatch):
    """Said before anything is done."""
    devices = jax.devices()[:2]
    monkeypatch.setattr(program.jax, "devices", lambda: devices)

    with pytest.raises(SystemExit, match="eight devices are needed, and JAX has 2"):
        program.main([])


def test_the_losses_are_a_picture(program, short_run, tmp_path):
    """`--plot` saves a PNG, on a machine without a display too."""
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib")
    path = tmp_path / "losses.png"

    program.plot(short_run[1], path)

    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_as_a_program_it_has_eight_devices(program):
    """Where nobody has asked for them: it does so itself."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, FOLDER / "parallel.py", "--epochs", "1", "--width", "16"]

    printed = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={**environment, "PYTHONPATH": str(FOLDER.parent)},
    ).stdout

    assert "pmean(grad(loss)) is 8.0000 times" in printed
