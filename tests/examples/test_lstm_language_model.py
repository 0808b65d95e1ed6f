"""The language model prints the numbers of the text that it is from."""

import contextlib
import io

import jax
import numpy as np
import pytest

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

PRINTED = {
    "fixed": ([0, 25, 25, 25, 25, 25], [26.58103370666504, 4.404336929321289, 2.6979217529296875]),
    "chained": (
        [0, 20, 20, 20, 20, 20],
        [24.401604652404785, 3.0977354049682617, 1.744471549987793],
    ),
}


@pytest.mark.parametrize("keys", PRINTED)
@pytest.mark.parametrize("cell", ["by-hand", "LSTM"])
@pytest.mark.sampled
def test_losses_and_samples_are_the_printed_ones(program, cell, keys):
    """With the cell by hand and with the library's, from either set of keys."""
    before, losses = PRINTED[keys]

    run = program.train(program.make_model(cell, keys))

    assert run.before == before
    np.testing.assert_allclose(run.losses, losses, rtol=0, atol=1e-4)
    assert run.after == [4, 8, 15, 16, 23, 42]


def test_another_cell_learns_as_well(program):
    """The command with a GRU, and its output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        (run,) = program.main(["--cell", "GRU"])

    assert run.after[:3] == [4, 8, 15]
    assert run.losses[0] > 20 > 4 > run.losses[-1]
    assert "cell GRU, fixed keys, tied head\n" in printed.getvalue()
    assert f"  sample after: {run.after}\n" in printed.getvalue()


def test_a_head_of_its_own_is_trained_apart(program):
    """It starts as the embeddings do, and has as many numbers again; tied, it is them."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        (run,) = program.main(["--cell", "LSTM", "--head", "own"])
    tied, own = (program.make_model("LSTM", "fixed", head) for head in ("tied", "own"))

    assert tied.head is tied.embeddings
    assert run.before == PRINTED["fixed"][0]
    np.testing.assert_allclose(run.losses[0], PRINTED["fixed"][1][0], rtol=0.05)
    assert run.losses[1] != PRINTED["fixed"][1][1]
    counts = [sum(leaf.size for leaf in jax.tree.leaves(model)) for model in (tied, own)]
    assert counts[1] - counts[0] == tied.embeddings.size
    assert f"own head\n  {counts[1]:,} numbers to train\n" in printed.getvalue()
