"""`dropout`."""

import jax
import jax.numpy as jnp
import pytest

from pytreemod.nn.functional import dropout
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.slow
def test_entries_are_dropped_with_probability_p_and_scaled(key, p):
    """The dropped share is within four standard deviations of p; the rest is x / (1 - p)."""
    n = 4000
    x = jnp.asarray(wave(n)) + 3

    out = dropout(x, p, key=key)

    kept = out != 0
    assert abs(float(jnp.mean(~kept, dtype=float)) - p) < 4 * (p * (1 - p) / n) ** 0.5
    assert_close(out[kept], x[kept] / (1 - p))


def test_the_key_decides(key):
    """The same key drops the same entries, another one others; rows differ from each other."""
    x = jnp.ones((2, 64))
    out = dropout(x, 0.5, key=key)

    assert (out == dropout(x, 0.5, key=key)).all()
    assert (out != dropout(x, 0.5, key=jax.random.key(1))).any()
    assert (out[0] != out[1]).any()


@pytest.mark.parametrize(("p", "slope"), [(0, 1), (1, 0)])
def test_certain_outcomes(key, p, slope):
    """Nothing or everything is dropped, with a finite gradient."""
    x = jnp.asarray(wave(5))

    assert_close(dropout(x, p, key=key), slope * x)
    assert_close(jax.grad(lambda x: dropout(x, p, key=key).sum())(x), jnp.full(5, slope))


def test_dtype_is_kept(key):
    """bfloat16 stays bfloat16."""
    assert dropout(jnp.ones(3, jnp.bfloat16), 0.5, key=key).dtype == jnp.bfloat16


@pytest.mark.parametrize(("dims", "axes"), [((0,), (0,)), ((-1,), (2,)), ((0, 2), (0, 2))])
def test_broadcast_axes_share_one_fate(key, dims, axes):
    """Along these axes all entries are dropped or none; along the others both occur."""
    dropped = dropout(jnp.ones((8, 9, 10)), 0.5, key=key, broadcast_dims=dims) == 0

    for axis in range(3):
        alike = (dropped.all(axis) == dropped.any(axis)).all()
        assert bool(alike) == (axis in axes)


@pytest.mark.slow
@pytest.mark.filterwarnings("default:::flax")
@pytest.mark.parametrize("dims", [(), (1,), (0, -1)], ids=label)
def test_the_same_entries_are_dropped_as_in_flax(key, dims):
    """For the same key, p and axes."""
    nnx = pytest.importorskip(
        "flax.nnx", reason="compares numbers with Flax: tasks.py install peers"
    )
    x = jnp.asarray(wave(4, 3, 5))

    found = dropout(x, 0.4, key=key, broadcast_dims=dims)

    assert_close(found, nnx.Dropout(0.4, broadcast_dims=dims, deterministic=False)(x, rngs=key))
