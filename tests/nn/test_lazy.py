"""`Lazy` and `materialize`: the result is the model written out."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn

KEY = jax.random.key(0)
X = jnp.ones((2, 3))


def lazy(n_out, key):
    return nn.Lazy(lambda n, key: nn.Linear(n, n_out, key=key), key=key)


def conv(n, key):
    return nn.Conv2d(n, 4, 2, key=key)


def stack(make):
    return lambda key: nn.Stack(make, 2, key=key)


def ensemble(make):
    return lambda key: nn.Ensemble(make, 2, key=key)


LAZY, LINEAR = ft.partial(lazy, 3), ft.partial(nn.Linear, 3, 3)
PAIRS = {
    "Conv2d": (
        lambda key: nn.Lazy(conv, key=key, axis=-3),
        ft.partial(conv, 6),
        jnp.ones((2, 6, 3, 3)),
    ),
    "without a key": (lambda key: nn.Lazy(nn.LayerNorm), lambda key: nn.LayerNorm(3), X),
    "Stack": (stack(LAZY), stack(LINEAR), X),
    "Stack without a key": (
        stack(lambda: nn.Lazy(nn.LayerNorm)),
        stack(lambda: nn.LayerNorm(3)),
        X,
    ),
    "Ensemble of Stacks": (ensemble(stack(LAZY)), ensemble(stack(LINEAR)), X),
}


@pytest.mark.parametrize(("make", "written", "x"), PAIRS.values(), ids=PAIRS.keys())
def test_the_model_is_that_written_out(make, written, x):
    """To the last bit, also inside of filter_jit, and a second time."""
    expected = written(KEY)

    assert pm.materialize(make(KEY), x) == expected
    assert pm.filter_jit(lambda key: pm.materialize(make(key), x))(KEY) == expected
    assert pm.materialize(expected, x) is expected


def test_a_later_layer_follows_an_earlier_one():
    """Also through a jitted part, whose trace of an earlier call is not used again."""
    inner = pm.filter_jit(lambda layer, x: layer(x))

    class Net(pm.Module):
        first: nn.Lazy
        second: nn.Lazy

        def __call__(self, x):
            return self.second(jax.nn.relu(inner(self.first, x)))

    one, two = jax.random.split(KEY)
    net = Net(lazy(4, one), lazy(5, two))
    for _ in range(2):
        made = pm.materialize(net, X)
        assert (made.first, made.second) == (nn.Linear(3, 4, key=one), nn.Linear(4, 5, key=two))


def test_a_stateful_layer_runs_on_a_state_of_its_own():
    """`materialize` is where the model is made with its State, whose streams have no seed yet."""

    def make(key):
        dropout = nn.Lazy(lambda n: nn.Dropout(0.5, stream=pm.RngStream()))
        layers = [nn.Dropout(0.5, stream=pm.RngStream()), nn.Lazy(nn.BatchNorm), dropout]
        model = nn.Sequential([lazy(4, key), *layers, nn.BatchNorm(4)])
        return pm.materialize(model, X, pm.State(model))

    model, state = pm.make_with_state(make)(KEY)
    out, _ = model(X, state.seed(KEY))

    assert out.shape == (2, 4)
    assert model[2].input_size == 4


def test_a_method_is_called():
    class Coder(pm.Module):
        layer: nn.Lazy

        def encode(self, x):
            return self.layer(x)

    coder = Coder(lazy(4, KEY))
    expected = Coder(nn.Linear(3, 4, key=KEY))
    assert pm.materialize(coder, X, method="encode") == expected
    assert pm.materialize(coder, X, method=lambda coder, x: coder.encode(x)) == expected
