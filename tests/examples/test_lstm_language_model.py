"""The language model prints the numbers of the text that it is from."""

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
    """The command with a GRU."""
    (run,) = program.main(["--cell", "GRU"])

    assert run.after[:3] == [4, 8, 15]
    assert run.losses[0] > 20 > 4 > run.losses[-1]
