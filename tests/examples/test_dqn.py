"""The example of Q-learning: its physics are right, and it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

pytest.importorskip("tqdm", reason="examples/dqn.py shows tqdm's progress bar")


def test_the_physics_are_those_of_the_equations_of_motion(program):
    """Against Lagrange's equations of cart and pole, solved by SciPy with other steps."""
    cart = program.CartPole()
    m, mass, half = cart.pole_mass, cart.cart_mass + cart.pole_mass, cart.half_length

    def motion(_, now):
        # Of a rod of length 2 * half that turns around its lower end.
        _, speed, angle, turning = now
        matrix = np.array([[mass, m * half * np.cos(angle)], [np.cos(angle), 4 / 3 * half]])
        right = [cart.force + m * half * turning**2 * np.sin(angle), cart.gravity * np.sin(angle)]
        bend = np.linalg.solve(matrix, right)
        return [speed, bend[0], turning, bend[1]]

    start, steps = np.array([0.1, -0.2, 0.05, 0.3]), 10
    fine = cart.replace(seconds=1e-4)
    now = jnp.asarray(start, jnp.float32)
    now = jax.lax.fori_loop(0, 100 * steps, lambda _, s: fine.step(s, jnp.asarray(1))[0], now)
    exact = solve_ivp(motion, (0, 1e-2 * steps), start, rtol=1e-9, atol=1e-9).y[:, -1]
    np.testing.assert_allclose(now, exact, atol=2e-3)


def test_the_memory_is_a_ring(program):
    """The oldest entry is overwritten, and only stored entries are recalled."""
    memory = program.Memory(3, 1)
    for i in range(5):
        seen = jnp.full((1, 4), float(i))
        memory = memory.remember(program.Moments(seen, jnp.ones(1, int), seen, jnp.zeros(1, bool)))
        recalled = memory.recall(50, jax.random.key(i)).before[:, 0]
        assert set(recalled.tolist()) == {float(j) for j in range(max(0, i - 2), i + 1)}


@pytest.mark.slow
def test_poles_stand(program, tmp_path, capsys):
    """After a fifth of the steps, episodes are five times as long as at the beginning."""
    _, means, stood = program.main(["--steps", "4000", "--plot", str(tmp_path / "p.png")])
    assert means[0] < 40
    assert stood.mean() > 100
    assert "100 new poles" in capsys.readouterr().out
    assert (tmp_path / "p.png").stat().st_size > 10_000
