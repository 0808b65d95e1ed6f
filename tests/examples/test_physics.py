"""The fit of the oscillator finds the truth: its intervals hold it."""

import pytest

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

pytest.importorskip("optimistix", reason="examples/physics.py fits with optimistix")
pytest.importorskip("tqdm", reason="examples/physics.py shows tqdm's progress bar")


def test_intervals_hold_the_truth(program):
    """Most of them, for every parameter."""
    coverage = program.main(["--experiments", "50", "--points", "60"])

    assert set(coverage) == {"frequency", "damping", "amplitude", "phase", "rest", "noise"}
    assert min(coverage.values()) > 0.75
