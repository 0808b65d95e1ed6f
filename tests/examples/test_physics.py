"""The oscillator obeys its equation, its fit finds the truth, and its intervals hold it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

pytest.importorskip("optimistix", reason="examples/physics.py fits with optimistix")
pytest.importorskip("tqdm", reason="examples/physics.py shows tqdm's progress bar")


def test_it_is_the_solution_of_its_equation(program):
    """x'' + 2 c w x' + w² (x - rest) = 0."""
    one = program.truth()
    w, time = 2 * np.pi * float(one.frequency), 1.3

    place, speed, force = (float(f(time)) for f in (one, jax.grad(one), jax.grad(jax.grad(one))))

    resisted = force + 2 * float(one.damping) * w * speed
    assert resisted == pytest.approx(-(w**2) * (place - float(one.rest)), rel=1e-4)


def test_it_begins_in_the_right_valley(program):
    """At the peak of the spectrum; nearer than a swing in the ten seconds."""
    seen = program.measure(program.truth(), 60, jax.random.key(0))

    assert abs(float(program.guess(seen).frequency) - 0.8) < 0.05


@pytest.mark.slow
def test_intervals_hold_the_truth(program, tmp_path, capsys):
    """Most of them, for every parameter; all samples are inside the bounds."""
    path = tmp_path / "oscillator.png"
    coverage = program.main(["--experiments", "50", "--points", "60", "--plot", str(path)])

    assert set(coverage) == {"frequency", "damping", "amplitude", "phase", "rest", "noise"}
    assert min(coverage.values()) > 0.75
    assert "noise" in capsys.readouterr().out
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_what_is_drawn_is_inside_the_bounds(program):
    """However wide: a damping of nearly nothing, and draws that go down and up to it."""
    few = program.measure(program.truth().replace(damping=0.001), 20, jax.random.key(0))

    fitted, drawn, (low, high) = program.study(few, jax.random.key(1))
    clear = pm.resolve(drawn)

    assert 0 < float(clear.damping.min()) < float(clear.damping.max()) < 1
    assert float(low["frequency"]) < float(fitted.frequency) < float(high["frequency"])
    assert bool(jnp.all(clear.noise > 0))
