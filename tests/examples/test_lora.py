"""The example of low-rank updates learns, and does not change its base."""

import jax
import numpy as np
import pytest

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

pytest.importorskip("sklearn", reason="examples/lora.py reads scikit-learn's digits")
pytest.importorskip("tqdm", reason="examples/lora.py shows tqdm's progress bar")


def test_updates_alone_learn_the_other_digits(program, capsys):
    """Of which the base reads none; merged, and without them, it is what it was."""
    first, second = program.main(["--width", "64", "--epochs", "6", "--alpha", "64"])
    printed = capsys.readouterr().out

    assert first.accuracies[-1] > 0.9
    assert second.accuracies[-1] > 0.4
    # Merged, it reads as well as with its updates beside.
    assert f"merged: 6 arrays, as before, accuracy {second.accuracies[-1]:.2%}\n" in printed
    for one, other in zip(program.base_of(second.model), jax.tree.leaves(first.model), strict=True):
        np.testing.assert_array_equal(one, other)
