"""The example of Q-learning learns."""

import pytest

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

pytest.importorskip("tqdm", reason="examples/dqn.py shows tqdm's progress bar")


def test_poles_stand(program):
    """After a fifth of the steps, episodes are five times as long as at the beginning."""
    _, means, stood = program.main(["--steps", "4000"])
    assert means[0] < 40
    assert stood.mean() > 100
