"""`Sequential`, `Lambda`, `Identity` and `StatefulLayer`."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.module.classes import Module
from tests.nn.numbers_to_compare import assert_close


class KeyTaker(Module):
    def __call__(self, x, *, key=None):
        return (*x, key)


def two_layers():
    return nn.Sequential([nn.Linear(3, 2, key=jax.random.key(0)), nn.Lambda(jax.nn.relu)])


def test_sequential_is_a_sequence():
    net = two_layers()

    assert len(net) == 2
    assert [type(layer) for layer in net] == [nn.Linear, nn.Lambda]
    assert net[-1] is net.layers[1]
    assert isinstance(net[:1], nn.Sequential)
    assert net[:1].layers == (net.layers[0],)


def test_every_layer_gets_a_key_of_its_own(key):
    """The keys are those of one split; without a key, none is made."""
    net = nn.Sequential([KeyTaker(), KeyTaker(), KeyTaker()])

    keys = net((), key=key)

    assert (jnp.stack(keys) == jax.random.split(key, 3)).all()
    assert net(()) == (None, None, None)


def test_a_state_that_nobody_needs_is_handed_back():
    """Passing a State means a pair comes back, whatever the layers are."""
    net = two_layers()
    state = nn.State(net)

    assert net(jnp.ones(3), state)[1] is state
    assert not net.is_stateful()


def test_in_inference_mode_a_state_stays_as_it_was(key):
    def make():
        inner = [nn.BatchNorm(3, "batch"), nn.Dropout(0.5, stream=pm.RngStream())]
        return nn.Sequential([nn.Sequential(inner), nn.Lambda(jnp.tanh)])

    net, state = nn.make_with_state(make)()
    state = state.seed(key)
    before = jax.tree.leaves(state)

    out, after = nn.inference_mode(net)(jnp.ones(3), state, key=key)

    assert out.shape == (3,)
    assert all(new is old for new, old in zip(jax.tree.leaves(after), before, strict=True))
    assert net.is_stateful() == nn.inference_mode(net).is_stateful() is True


def cached():
    return nn.MultiheadAttention(2, 4, is_causal=True, cache_size=6, key=jax.random.key(0))


CONTAINERS = {
    "Sequential": lambda: nn.Sequential([cached(), nn.Identity()]),
    "nested": lambda: nn.Sequential([nn.Sequential([cached()])]),
    "Stack": lambda: nn.Sequential([nn.Stack.from_layers([cached()])]),
    "Ensemble": lambda: nn.Sequential(
        [nn.Ensemble.from_members([cached()]), nn.Lambda(jnp.squeeze)]
    ),
}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.sampled
def test_layers_that_can_do_without_state_do_so(name):
    """As alone, wherever they are; with State they go on."""
    net, state = pm.make_with_state(CONTAINERS[name])()
    x = jnp.arange(12.0).reshape(3, 4) / 12
    found, _ = net(x, state)

    assert_close(net(x), found)
    assert_close(net(x), cached()(x))


def test_a_missing_state_is_refused():
    """A layer that needs it would start anew at each call; the error says which."""
    net, _ = nn.make_with_state(lambda: nn.Sequential([nn.Identity(), nn.BatchNorm(2)]))()

    with pytest.raises(TypeError, match="state") as info:
        net(jnp.ones((3, 2)))
    assert "in layers[1]: BatchNorm" in info.value.__notes__
