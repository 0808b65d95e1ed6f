import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.helpers.equations import equations
from tests.nn.numbers_to_compare import assert_close, wave


def streaming(p=0.5, **options):
    make = nn.make_with_state(lambda: nn.Dropout(p, stream=pm.RngStream(), **options))
    layer, state = make()
    return layer, state.seed(jax.random.key(3))


def test_with_a_stream_each_call_has_a_key_of_its_own():
    layer, state = streaming()
    x = jnp.ones(64)
    key, _ = state.substate(layer).next_key(layer.stream)

    first, state = layer(x, state)
    second, state = layer(x, state)

    assert_close(first, nn.Dropout(0.5)(x, key=key))
    assert (first != second).any()


def test_a_key_takes_the_place_of_the_stream(key):
    """The State is returned unchanged; without a State, the output is returned alone."""
    layer, state = streaming()
    x = jnp.ones(64)

    out, after = layer(x, state, key=key)

    assert after is state
    assert_close(out, nn.Dropout(0.5)(x, key=key))
    assert_close(out, layer(x, key=key))


@pytest.mark.parametrize(
    ("p", "options", "call"),
    [(0.5, {"inference": True}, {}), (0.5, {}, {"inference": True}), (0, {}, {})],
    ids=["by field", "by argument", "p=0"],
)
def test_without_dropping_the_stream_is_not_used(p, options, call):
    """The very same array and State come back; the program is empty."""
    layer, state = streaming(p, **options)
    x = jnp.ones(3)

    assert layer(x, state, **call) == (x, state)
    assert layer(x, **call) is x
    assert not equations(lambda x, state: layer(x, state, **call), x, state)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.sampled
def test_entries_are_dropped_with_probability_p_and_scaled(key, p):
    """The dropped share is within four standard deviations of p; the rest is x / (1 - p)."""
    n = 4000
    x = jnp.asarray(wave(n)) + 3

    out = nn.Dropout(p)(x, key=key)

    kept = out != 0
    assert abs(float(jnp.mean(~kept, dtype=float)) - p) < 4 * (p * (1 - p) / n) ** 0.5
    assert_close(out[kept], x[kept] / (1 - p))


@pytest.mark.parametrize(("p", "slope"), [(0, 1), (1, 0)])
def test_certain_outcomes_have_finite_gradients(key, p, slope):
    x, layer = jnp.asarray(wave(5)), nn.Dropout(p)

    assert_close(layer(x, key=key), slope * x)
    assert_close(jax.grad(lambda x: layer(x, key=key).sum())(x), jnp.full(5, slope))


@pytest.mark.parametrize(("dims", "axes"), [((0,), (0,)), ((-1,), (2,)), ((0, 2), (0, 2))])
@pytest.mark.sampled
def test_broadcast_axes_share_one_fate(key, dims, axes):
    """Along these axes all entries are dropped or none; along the others both occur."""
    dropped = nn.Dropout(0.5, broadcast_dims=dims)(jnp.ones((8, 9, 10)), key=key) == 0

    for axis in range(3):
        alike = (dropped.all(axis) == dropped.any(axis)).all()
        assert bool(alike) == (axis in axes)
