"""`MLP`."""

import jax
import jax.numpy as jnp
import pytest

from pytreemod import nn
from pytreemod.module.classes import Module
from tests.nn.catalogue import Slope
from tests.nn.numbers_to_compare import assert_close, wave


def test_by_default_hidden_layers_are_rectified_and_the_output_is_not(key):
    """activation=jax.nn.relu, final_activation=the identity."""
    mlp = nn.MLP(3, 2, 4, 1, key=key)
    first, last = mlp.layers
    x = jnp.asarray(wave(3))

    assert mlp.activation is jax.nn.relu
    assert_close(mlp(x), last(jnp.maximum(first(x), 0)))


@pytest.mark.parametrize(("use_bias", "use_final_bias"), [(True, False), (False, True)])
def test_biases_of_hidden_and_final_layers(key, use_bias, use_final_bias):
    """Each flag is for its own layers."""
    mlp = nn.MLP(3, 2, 4, 2, use_bias=use_bias, use_final_bias=use_final_bias, key=key)

    has_bias = [layer.bias is not None for layer in mlp.layers]
    assert has_bias == [use_bias, use_bias, use_final_bias]


def test_an_activation_that_is_a_module_is_copied_for_each_neuron(key):
    """Each copy is data, and gets the numbers of one neuron."""
    mlp = nn.MLP(3, 2, 4, 2, Slope(jnp.array(0.5)), Slope(jnp.array(0.1)), key=key)
    slopes = jnp.asarray(wave(2, 4))
    mlp = mlp.replace(activation=Slope(slopes))
    x = jnp.asarray(wave(5, 3))

    assert nn.MLP(3, 2, 4, 2, Slope(jnp.array(0.5)), key=key).activation.factor.shape == (2, 4)
    assert mlp.final_activation.factor.tolist() == [jnp.float32(0.1)] * 2
    first, second, last = mlp.layers
    h = first(x)
    h = second(jnp.where(h > 0, h, slopes[:1] * h))
    y = last(jnp.where(h > 0, h, slopes[1:] * h))
    assert_close(mlp(x), jnp.where(y > 0, y, 0.1 * y))


@pytest.mark.slow
def test_a_copy_sees_one_number_and_may_branch_on_it(key):
    """However many examples there are; a function gets all of them at once."""

    class Branching(Module):
        def __call__(self, x):
            return jax.lax.cond(x > 0, lambda x: x, lambda x: 0 * x, x)

    x = jnp.asarray(wave(2, 5, 3))
    relu = nn.MLP(3, 2, 4, 2, jax.nn.relu, jax.nn.relu, key=key)
    branching = nn.MLP(3, 2, 4, 2, Branching(), Branching(), key=key)
    softmax = nn.MLP(3, 2, 4, 2, final_activation=jax.nn.softmax, key=key)

    assert_close(branching(x), relu(x))
    assert_close(branching(x[0, 0]), relu(x[0, 0]))
    assert_close(softmax(x).sum(-1), jnp.ones((2, 5)))
    scalar = [nn.MLP(3, "scalar", 4, 1, a, a, key=key) for a in (Branching(), jax.nn.relu)]
    assert_close(scalar[0](x), scalar[1](x))


def test_initializers_and_dtype_reach_every_layer(key):
    """weight_init, bias_init and dtype are those of the Linear layers."""
    ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros
    mlp = nn.MLP(3, 2, 4, 1, dtype=jnp.bfloat16, key=key, weight_init=ones, bias_init=zeros)

    for layer in mlp.layers:
        assert layer.weight.dtype == layer.bias.dtype == jnp.bfloat16
        assert (layer.weight == 1).all()
        assert (layer.bias == 0).all()
