"""The solver solves, and each way to its gradient leads to the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow


def test_it_solves(program):
    """An equation whose solution is known, for a tree; a smaller tolerance is a smaller error."""
    with jax.enable_x64(True):
        solve = lambda tolerance: program.Solver(tolerance=tolerance)  # noqa: E731
        start = {"a": jnp.float64(2), "b": jnp.ones(3)}
        for tolerance in (1e-4, 1e-7):
            end, _ = solve(tolerance)(lambda y: jax.tree.map(jnp.negative, y), start, 3.0)
            for x, y in zip(jax.tree.leaves(end), jax.tree.leaves(start), strict=True):
                np.testing.assert_allclose(x, y * np.exp(-3), rtol=50 * tolerance)


def test_all_gradients_agree(program):
    """Over a short time; the memory of a checkpointed loop grows with what it stores."""
    options = ["--ring", "50", "--duration", "2", "--damping", "0.1"]
    few, *_, many, bounded, adjoint = program.main(options)

    assert max(row.error for row in (few, many, bounded, adjoint)) < 1e-3
    assert few.kilobytes < bounded.kilobytes < many.kilobytes
