"""`reset_cache`."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn

KEY = jax.random.key(0)


class Net(pm.Module):
    """A cache beside other State."""

    attention: nn.MultiheadAttention
    count: pm.StateIndex

    def __init__(self):
        self.attention = nn.MultiheadAttention(2, 4, is_causal=True, cache_size=8, key=KEY)
        self.count = pm.StateIndex(jnp.asarray(3))


@pytest.mark.slow
def test_caches_are_empty_and_the_rest_stays():
    """For other sequences, in another size and dtype; the model goes on with it."""
    net, state = pm.make_with_state(Net)()
    _, state = net.attention(jnp.ones((5, 4)), state=state)
    state = nn.reset_cache(net, state)
    keys, _, length = state.get(net.attention.cache)
    assert (keys.shape, int(length), bool(keys.any())) == ((2, 8, 2), 0, False)

    state = nn.reset_cache(
        net, state.set(net.count, jnp.asarray(4)), batch=(3, 1), size=5, dtype=jnp.bfloat16
    )
    keys, values, length = state.get(net.attention.cache)
    assert keys.shape == values.shape == (3, 1, 2, 5, 2)
    assert (keys.dtype, length.tolist()) == (jnp.bfloat16, [[0]] * 3)
    assert int(state.get(net.count)) == 4
    out, _ = net.attention(jnp.ones((3, 1, 2, 4)), state=state)
    assert out.shape == (3, 1, 2, 4)


class Layer(nn.StatefulLayer):
    """Attention that a Stack may have: called with State or without."""

    attention: nn.MultiheadAttention

    def __init__(self, *, key):
        self.attention = nn.MultiheadAttention(2, 4, is_causal=True, cache_size=8, key=key)

    def needs_state(self):
        return False

    def __call__(self, x, state=None):
        return self.attention(x) if state is None else self.attention(x, state=state)


@pytest.mark.parametrize("change", ["lora", "quantize", "tie"])
def test_weights_of_a_stack_may_be_computed(change):
    """By an added array, from integers, or at another path: shapes are enough."""
    stack, state = pm.make_with_state(nn.Stack)(Layer, 3, key=KEY)
    if change == "tie":
        stack = pm.tie(stack, "layer.attention.key_proj", to="layer.attention.query_proj")
    elif change == "lora":
        stack = pm.lora(stack, nn.Linear, 1, key=KEY)
    else:
        stack = pm.quantize(stack, "int8")
    x = jnp.linspace(-1, 1, 2 * 5 * 4).reshape(2, 5, 4)
    state = nn.reset_cache(stack, state, batch=2)
    first, state = stack(x[:, :3], state)
    second, _ = stack(x[:, 3:], state)

    assert jnp.allclose(jnp.concatenate([first, second], 1), stack(x), atol=1e-5)
