"""A library that imports Equinox itself takes our Modules as they are, and returns them.

For diffrax and optimistix the programs are on the page `docs/how-to/use-with-other-libraries.md`.
"""

import importlib

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

X = jnp.linspace(0.0, 1.0, 20)
Y = 2 * X + 1


class Line(pm.Module):
    slope: jax.Array
    offset: jax.Array

    def __call__(self, x):
        return self.slope * x + self.offset


def line(slope, offset):
    return Line(jnp.asarray(slope), jnp.asarray(offset))


def with_lineax(lineax):
    """A linear map of Modules, and a vector that is one."""
    operator = lineax.FunctionLinearOperator(
        lambda v: line(2.0 * v.slope, 3.0 * v.offset),
        line(0.0, 0.0),
        lineax.positive_semidefinite_tag,
    )
    return lineax.linear_solve(operator, line(4.0, 3.0), lineax.CG(1e-6, 1e-6)).value


def with_blackjax(blackjax):
    """The mean of samples, each of which is a Module."""

    def log_density(model):
        return -(((model(X) - Y) / 0.1) ** 2).sum() / 2

    def step(state, key):
        state, _ = kernel.step(key, state)
        return state, state.position

    kernel = blackjax.nuts(log_density, step_size=0.02, inverse_mass_matrix=jnp.ones(2))
    keys = jax.random.split(jax.random.key(0), 200)
    _, samples = jax.lax.scan(step, kernel.init(line(2.0, 1.0)), keys)
    return jax.tree.map(jnp.mean, samples)


def with_numpyro(numpyro):
    """A Module is declared by the function that numpyro has for Equinox's."""
    infer, dist = numpyro.infer, numpyro.distributions
    declare = importlib.import_module("numpyro.contrib.module").eqx_module

    def program():
        fitted = declare("line", line(1.0, 1.0))
        numpyro.sample("y", dist.Normal(fitted(X), 0.1), obs=Y)

    svi = infer.SVI(program, lambda: None, numpyro.optim.Adam(0.1), infer.Trace_ELBO())
    return svi.run(jax.random.key(0), 300, progress_bar=False).params["line$params"]


PROGRAMS = {"lineax": with_lineax, "blackjax": with_blackjax, "numpyro": with_numpyro}


@pytest.mark.parametrize("package", PROGRAMS)
def test_a_library_takes_modules_as_they_are(package):
    """The result is a Module, with the right numbers."""
    library = pytest.importorskip(package)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = PROGRAMS[package](library)
    assert isinstance(found, Line)
    assert abs(found.slope - 2) < 0.1
    assert abs(found.offset - 1) < 0.1
