"""The variational autoencoder learns, draws anew at each call, and its bounds are bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

pytest.importorskip("sklearn", reason="examples/vae.py reads scikit-learn's digits")
pytest.importorskip("tqdm", reason="examples/vae.py shows tqdm's progress bar")


def make_net(program):
    """A net that has learned nothing."""
    return pm.stateful(program.Vae(2, key=jax.random.key(0))).seed(jax.random.key(1))


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_it_learns(program, tmp_path, capsys):
    """More than the pixels alone, in ten epochs; and it draws new images."""
    path = tmp_path / "digits.png"
    found = program.main(["--epochs", "10", "--draws", "10", "--plot", str(path)])

    printed = capsys.readouterr().out
    assert f"bound {found.elbo:.1f} nats per digit, {found.many:.1f} by many draws\n" in printed
    alone = float(printed.split("pixels by themselves: ")[1].split()[0])
    assert alone + 50 < found.elbo < found.many < 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_each_call_draws_anew(program):
    """And the same numbers again from the same seed."""
    images = jnp.full((2, 1, 8, 8), 5.0)
    call = pm.filter_jit(lambda net: net(images))

    first, net = call(make_net(program))
    second, _ = call(net)
    again, _ = call(make_net(program))

    assert not np.any(first == second)
    np.testing.assert_array_equal(first, again)


def test_more_draws_bound_more_closely(program):
    """As the formula says: the bound never becomes looser; every image has separate draws."""
    images = jnp.full((2, 1, 8, 8), 5.0)

    (elbo, many), net = program.bounds(make_net(program), images, 8)
    (_, again), _ = program.bounds(net, images, 8)

    assert elbo < many
    assert again != many


def test_the_likelihood_of_counts_sums_to_one(program):
    """Over all counts of a pixel."""
    counts = jnp.arange(17.0).reshape(17, 1, 1, 1)

    each = program.log_binomial(counts, jnp.full((17, 1, 1, 1), 0.7))

    assert float(jnp.exp(each).sum()) == pytest.approx(1, rel=1e-5)
