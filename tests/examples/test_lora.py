"""The example of low-rank updates learns, and does not change its base."""

import re

import jax
import numpy as np
import pytest

import pytreemod as pm

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

pytest.importorskip("sklearn", reason="examples/lora.py reads scikit-learn's digits")
pytest.importorskip("tqdm", reason="examples/lora.py shows tqdm's progress bar")


@pytest.fixture(scope="module")
def runs(program):
    """A short run, and its output."""
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("builtins.print", lambda *parts, end="\n": printed.append((*parts, end)))
        trained = program.main(["--width", "64", "--epochs", "6", "--alpha", "64"])
    return *trained, "".join("".join(parts) for parts in printed)


def test_updates_alone_learn_the_other_digits(runs):
    """Of which the base reads none."""
    first, second, printed = runs

    assert first.accuracies[-1] > 0.9
    assert second.accuracies[-1] > 0.4
    assert f"updates alone: accuracy {second.accuracies[-1]:.2%}\n" in printed
    # Merged, it reads as well as with its updates beside.
    assert f"merged: 6 arrays, as before, accuracy {second.accuracies[-1]:.2%}\n" in printed


def test_the_base_is_the_same_to_the_bit(program, runs):
    """As it says; and without its updates the model is the first one."""
    first, second, printed = runs

    assert "the base is the same to the bit: True\n" in printed
    for one, other in zip(program.base_of(second.model), jax.tree.leaves(first.model), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_optimizer_keeps_two_numbers_for_each_that_is_trained(program, runs):
    """And a count: its bytes are printed."""
    for trained, wrt in zip(runs, (program.EVERYTHING, program.UPDATES), strict=False):
        params, _ = pm.trainable(trained.model, wrt)
        assert trained.optimizer_bytes == 2 * program.size_in_bytes(params) + 4
    sizes = [int(size.replace(",", "")) for size in re.findall(r"([\d,]+) (?:bytes|for)", runs[2])]
    assert [runs[0].optimizer_bytes, runs[1].optimizer_bytes] == sizes
    assert runs[1].optimizer_bytes < 0.2 * runs[0].optimizer_bytes


def test_the_accuracy_is_a_picture(program, runs, tmp_path):
    """`--plot` saves a PNG, on a machine without a display too."""
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib")
    path = tmp_path / "accuracy.png"

    program.plot(*runs[:2], path)

    assert path.read_bytes().startswith(b"\x89PNG")
