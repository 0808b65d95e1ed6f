import jax
import jax.numpy as jnp
import pytest

from pytreemod import nn


@pytest.mark.parametrize(("use_bias", "use_final_bias"), [(True, False), (False, True)])
def test_biases_of_hidden_and_final_layers(key, use_bias, use_final_bias):
    mlp = nn.MLP(3, 2, 4, 2, use_bias=use_bias, use_final_bias=use_final_bias, key=key)

    has_bias = [layer.bias is not None for layer in mlp.layers]
    assert has_bias == [use_bias, use_bias, use_final_bias]


def test_initializers_and_dtype_reach_every_layer(key):
    ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros
    mlp = nn.MLP(3, 2, 4, 1, dtype=jnp.bfloat16, key=key, weight_init=ones, bias_init=zeros)

    for layer in mlp.layers:
        assert layer.weight.dtype == layer.bias.dtype == jnp.bfloat16
        assert (layer.weight == 1).all()
        assert (layer.bias == 0).all()
